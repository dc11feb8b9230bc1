"""Two torch cores in one process that fetch KV from each other, for bench/tiers.py.

Their transports are those of workers, each in a thread of its own; this module plays their nodes.
Pools can be filled without computing: a fetch does not look into its bytes.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from pdserve.blocks.hashing import joined_hashes, prompt_root, split_hashes
from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.checksums import checksum_of
from pdserve.engine_core.kv_transfer.connector import (
    AttemptGranted,
    AttemptKey,
    PartArrived,
)
from pdserve.engine_core.kv_transfer.thread_connector import make_thread_connector
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    EngineSpec,
    KvPullAnswer,
    KvPullOpened,
    KvPullServed,
    Rejected,
    ServeKvPull,
    SetNodeLife,
    StepOutput,
    Submit,
    TransferSpec,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import KvSource
from pdserve.testing.transfer_support import CallCarrier
from pdserve.token_ids import token_ids
from pdserve.transfer.base import GrantSpec, KvPart
from pdserve_engines.torch.executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pdserve.messages.engine import Event
    from pdserve.messages.request import FirstTokenStats

Heard = TypeVar("Heard", bound=object)
SECRET: Final = b"bench"
_LATE: Final = 60.0


@dataclass(eq=False)
class End:
    """One worker: its core, and what its node does with the core's events."""

    carrier: CallCarrier
    core: EngineCore
    model: str
    """Hash of what the model computes."""
    peer: End = field(init=False)
    outputs: list[tuple[float, StepOutput]] = field(default_factory=list)
    _calls: dict[int, int] = field(default_factory=dict)
    """The peer's numbers of questions, by those here."""
    _numbers: int = 0

    @property
    def life(self) -> NodeLife:
        return self.carrier.life

    def touch(self) -> None:
        """Have all pages of the pool, each with bytes of its own."""
        assert self.core._puller is not None
        view = self.core._puller._region.view
        assert view is not None
        piece = _small_numbers(1 << 20)
        for at in range(0, len(view), len(piece)):
            view[at : at + len(piece)] = piece[: len(view) - at]

    def step(self) -> None:
        for event in self.core.step():
            self.carry(event)

    def carry(self, event: Event) -> None:
        match event:
            case StepOutput():
                self.outputs.append((time.perf_counter(), event))
            case Rejected():
                raise RuntimeError(event.message)
            case KvPullOpened():
                number = self.peer._number(event.number)
                self.peer.core.handle(
                    ServeKvPull(
                        number=number,
                        node=self.life.node,
                        epoch=self.life.epoch,
                        hashes=event.hashes,
                        ticket=event.ticket,
                        timeout=event.timeout,
                    )
                )
            case KvPullServed():
                self.peer.core.handle(KvPullAnswer(self._calls.pop(event.number), event.grant))

    def _number(self, of_peer: int) -> int:
        self._numbers += 1
        self._calls[self._numbers] = of_peer
        return self._numbers

    def hashes(self, prompt: Sequence[int]) -> list[bytes]:
        """Hashes of the prompt's full blocks."""
        core = self.core
        return [
            *split_hashes(
                joined_hashes(list(prompt), core.pool.block_size, parent=self.root, secret=SECRET)
            )
        ]

    @property
    def root(self) -> bytes:
        return prompt_root(SECRET, self.model, "")


def _small_numbers(size: int) -> bytes:
    """Random numbers between 0.007 and 0.03, read as float32 or as bfloat16: a model that attends
    to them computes no NaN."""
    piece = bytearray(os.urandom(size))
    piece[1::2] = bytes([0x3C]) * (size // 2)
    return bytes(piece)


@dataclass
class _Pulled:
    """Waits for the end of a pull."""

    good: int | None = None
    error: str = ""

    def on_pulled(self, number: int, blocks_ok: int, error: str) -> None:
        self.good, self.error = blocks_ok, error

    def on_fenced(self, number: int) -> None: ...


class Pair:
    """`r` fetches what `o` has."""

    def __init__(self, model: Path, backend: str, kv_memory: int, length: int) -> None:
        self._woken = threading.Event()
        self._handles = 0
        spec = EngineSpec(
            engine="torch",
            model=str(model),
            device="cpu",
            kv_memory=kv_memory,
            max_model_len=length,
            hash_secret=SECRET,
            transfer=TransferSpec(backends=(backend,), verify="all"),
        )
        self.r, self.o = self._end("r", spec), self._end("o", spec)
        self.r.peer, self.o.peer = self.o, self.r
        self.r.carrier.join(self.o.carrier)
        for end in (self.r, self.o):
            end.touch()

    def _end(self, name: str, spec: EngineSpec) -> End:
        assert spec.transfer is not None
        carrier = CallCarrier(NodeLife(NodeId(name), 1))
        mover = make_thread_connector(spec.transfer, self._woken.set, carrier.end.theirs)
        core = EngineCore(TorchExecutor(), SystemClock(), mover)
        model = core.load(spec, lambda progress: None).compat_hash
        core.handle(SetNodeLife(name, 1))
        return End(carrier, core, model)

    def close(self) -> None:
        for end in (self.r, self.o):
            end.core.close()
            end.carrier.end.close()

    def until(self, met: Callable[[], object]) -> None:
        """Step both cores."""
        late = time.monotonic() + _LATE
        while not met():
            if time.monotonic() > late:
                raise TimeoutError("the two cores make no progress")
            if not (self.r.core.has_work or self.o.core.has_work):
                self._woken.wait(0.002)
            self._woken.clear()
            self.r.step()
            self.o.step()

    # ------------------------------------------------------------------ requests

    def first_token(self, prompt: list[int], fetched: int = 0) -> tuple[float, FirstTokenStats]:
        """Seconds until R has the first token, and what is told with it. R is told that O has the
        first `fetched` blocks."""
        self._handles += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(self._handles),
            model="m",
            prompt=token_ids(prompt),
            sampling=sampling,
            kv_sources=(KvSource("o", 1, fetched),) if fetched else (),
        )
        self.r.outputs.clear()
        began = time.perf_counter()
        self.r.core.handle(Submit(handle=self._handles, request=request))
        self.until(lambda: self.r.outputs)
        at, output = self.r.outputs[0]
        started = output.deltas[0].started
        assert started is not None
        return at - began, started

    # ------------------------------------------------------------------ bytes alone

    def fill(self, seed: int, blocks: int) -> list[bytes]:
        """Let O have this many blocks of a chain; returns their hashes."""
        size = self.o.core.pool.block_size
        hashes = self.o.hashes([seed * 7919 + place for place in range(blocks * size)])
        self.give(hashes)
        return hashes

    def give(self, hashes: list[bytes]) -> None:
        """Let O have these blocks, whatever their bytes are."""
        pool = self.o.core.pool
        taken = pool.reserve(len(hashes))
        assert taken is not None
        pool.release(pool.commit_run(taken, hashes, self.o.root))

    def pull(self, hashes: Sequence[bytes]) -> float:
        """Seconds until R has these blocks, checked. It keeps none."""
        pool, now = self.r.core.pool, time.monotonic()
        blocks = pool.reserve(len(hashes))
        assert blocks is not None
        assert self.r.core._puller is not None
        self._handles += 1
        ended = _Pulled()
        began = time.perf_counter()
        source = KvSource("o", 1, len(hashes))
        self.r.core._puller.pull(
            self._handles, source, hashes, blocks, 0, now + _LATE, now=now, listener=ended
        )
        self.until(lambda: ended.good is not None)
        seconds = time.perf_counter() - began
        assert ended.good == len(hashes), ended.error
        pool.release(blocks)
        self.until(lambda: not self.o.core.pool.counts().used)  # O has heard of the end, too
        return seconds

    def hand_off(self, count: int) -> float:
        """Seconds until R has as many blocks as one part of a handoff, checked. The cores make no
        step: this is what their transports and checksums take."""
        here, there = self.o.core.pool.reserve(count), self.r.core.pool.reserve(count)
        assert here is not None
        assert there is not None
        self._handles += 1
        seconds = self._deliver(AttemptKey(1_000_000 + self._handles, 1), here, there)
        self.o.core.pool.release(here)
        self.r.core.pool.release(there)
        return seconds

    def _deliver(self, key: AttemptKey, here: list[int], there: list[int]) -> float:
        r, o = (end.core._puller for end in (self.r, self.o))
        assert r is not None
        assert o is not None
        layout = r._region.layout
        tokens = len(there) * layout.tokens
        began = time.perf_counter()
        order = GrantSpec("handoff", key.attempt, 0, tokens, there)
        r._mover.open(key, self.o.life, order)
        granted = self._heard(AttemptGranted)
        part = KvPart(0, 0, here, (0, layout.layers))
        o._mover.deliver(key.handle, self.r.life, granted.ticket, part)
        sums = [checksum_of(o._region, block, layout.tokens) for block in here]
        self._heard(PartArrived)
        assert sums == [checksum_of(r._region, block, layout.tokens) for block in there]
        seconds = time.perf_counter() - began
        r._mover.finish(key)
        return seconds

    def _heard(self, kind: type[Heard]) -> Heard:
        """Wait for an event of R's connector."""
        late = time.monotonic() + _LATE
        while time.monotonic() < late:
            self._woken.wait(0.002)
            self._woken.clear()
            found = None
            for end in (self.r, self.o):
                assert end.core._puller is not None
                for event in end.core._puller._mover.poll():
                    if isinstance(event, kind):
                        found = event
            if found is not None:
                return found
        raise TimeoutError(f"no {kind.__name__}")
