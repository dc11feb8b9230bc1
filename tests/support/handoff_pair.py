"""Connects two cores by a real transport, whatever their engines and tensor-parallel sizes.

The test plays their nodes. The bytes that both ends hold are compared, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.thread_connector import (
    ThreadKvConnector,
    make_thread_connector,
)
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    OpenAttemptBlocks,
    Prefilled,
    PrefillForPeer,
    SetNodeLife,
    SubmitRemote,
)
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.output_checker import OutputChecker
from pdserve.testing.transfer_support import CallCarrier
from pdserve.transfer.copy_plan import heads_of
from tests.engine_core.kv_fetch.test_real_transports import RealEnd, RealPair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdserve.engine_core.core import EngineCore
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.messages.engine import EngineSpec, Event
    from pdserve.messages.request import GenerateRequest
    from pdserve.messages.transfer import TransferTicket
    from pdserve.transfer.base import KvPart, Region

__all__ = ["EnginePair", "HandoffEnd", "HandoffPair", "kv_bytes"]


def kv_bytes(region: Region, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
    """`[layer, k|v, head, token, byte]` of a sequence, from the pools of all ranks; asserts that
    ranks that hold the same head have the same bytes."""
    found: dict[int, NDArray[np.uint8]] = {}
    for pool in region.pools:
        assert pool.view is not None
        held, layout = heads_of(pool.layout), pool.layout
        entry = layout.dim * layout.itemsize
        shape = (pool.blocks, layout.layers, 2, len(held), layout.tokens, entry)
        all_blocks = np.frombuffer(pool.view, dtype=np.uint8).reshape(shape)
        ours = np.concatenate([all_blocks[block] for block in blocks], axis=3)[:, :, :, :tokens]
        for place, head in enumerate(held):
            known = found.setdefault(head, ours[:, :, place])
            assert np.array_equal(known, ours[:, :, place]), f"copies of head {head} differ"
    return np.stack([found[head] for head in range(region.layout.heads)], axis=2)


class EnginePair(RealPair):
    """R (`d`) fetches what O (`p`) has."""

    make_end: Callable[[CallCarrier, InlineEngine], RealEnd] = RealEnd

    def __init__(
        self,
        backend: str,
        make_core: Callable[[KvConnector], EngineCore],
        specs: Mapping[str, EngineSpec],
    ) -> None:
        """`specs`: of `p` and of `d`; both get the `backend`."""
        self._make_core, self._specs = make_core, specs
        super().__init__(backend)

    def _end(self, name: str, spec: EngineSpec) -> RealEnd:
        ours, asked = self._specs[name].transfer, spec.transfer
        assert ours is not None
        assert asked is not None
        transfer = replace(ours, backends=asked.backends)
        carrier = CallCarrier(NodeLife(NodeId(name), 1))
        mover = make_thread_connector(transfer, self._woken.set, carrier.end.theirs)
        core = self._make_core(mover)
        wanted = replace(self._specs[name], transfer=transfer)
        end = type(self).make_end(carrier, InlineEngine(core, wanted))
        core.handle(SetNodeLife(*end.life))
        return end


@dataclass(eq=False)
class HandoffEnd(RealEnd):
    """A worker that prefills for its peer, or decodes what its peer has prefilled."""

    requests: dict[int, GenerateRequest] = field(default_factory=dict)
    """What it decodes, by handle; the peer prefills it under the same one."""
    tickets: dict[int, TransferTicket] = field(default_factory=dict)
    sent: dict[int, dict[int, int]] = field(default_factory=dict)
    """By handle, which block holds the prompt's first, second, ... block at the sender."""

    @property
    def region(self) -> Region:
        region = self.core._region
        assert region is not None
        return region

    def note(self, handle: int, part: KvPart) -> None:
        """A part is sent."""
        first = part.start // self.region.layout.tokens
        self.sent.setdefault(handle, {}).update(enumerate(part.blocks, first))

    def submit(self, wanted: GenerateRequest) -> OutputChecker:
        handle = len(self.engine.ledgers) + 1
        self.requests[handle] = wanted
        ledger = self.engine.ledgers[handle] = OutputChecker(wanted)
        self.core.handle(SubmitRemote(handle, wanted))
        return ledger

    def _pass(self, event: Event) -> None:
        assert not isinstance(event, AttemptLost), event.message
        match event:
            case Admitted():
                self.core.handle(OpenAttemptBlocks(event.handle, 1, *self.peer.life))
            case AttemptBlocksOpened():
                self.tickets[event.handle] = event.ticket
                order = PrefillForPeer(
                    event.handle, self.requests[event.handle], event.ticket, *self.life
                )
                self.peer.core.handle(order)
            case Prefilled():
                self.peer.core.handle(Activate(event.handle, 1, event.handoff))
            case _:
                super()._pass(event)


class HandoffPair(EnginePair):
    """`p` prefills, `d` decodes."""

    make_end = HandoffEnd

    @property
    def prefill(self) -> HandoffEnd:
        assert isinstance(self.o, HandoffEnd)
        return self.o

    @property
    def decode(self) -> HandoffEnd:
        assert isinstance(self.r, HandoffEnd)
        return self.r

    def hand_over(self, wanted: Sequence[GenerateRequest]) -> list[list[list[int]]]:
        """Prefill all at `p` and decode them at `d`; returns the tokens of each one's choices.

        Asserts that each rank of `d` has the bytes of its own heads, that nothing else has
        travelled, and that `d` has computed no prompt."""
        deliver = ThreadKvConnector.deliver

        def noted(mover: ThreadKvConnector, handle: int, *rest: Any) -> None:
            self.prefill.note(handle, rest[-1])
            deliver(mover, handle, *rest)

        with mock.patch.object(ThreadKvConnector, "deliver", noted):
            ledgers = [self.decode.submit(one) for one in wanted]
            self.until(lambda: all(ledger.done for ledger in ledgers) and self.idle())
        blocks = sum(self._same_bytes(handle, one) for handle, one in enumerate(wanted, 1))
        stats = self.decode.core.stats()
        assert stats.received_blocks == blocks
        assert stats.received_bytes == blocks * self.decode.region.block_bytes
        assert self.prefill.core.stats().sent_bytes == stats.received_bytes
        assert stats.received_tokens == sum(len(one.prompt) for one in wanted)
        outputs = sum(len(tokens) for ledger in ledgers for tokens in ledger.tokens)
        choices = sum(one.n for one in wanted)
        assert stats.computed_tokens == outputs - choices, "a prompt was computed again"
        return [ledger.tokens for ledger in ledgers]

    def _same_bytes(self, handle: int, wanted: GenerateRequest) -> int:
        """Compare both ends' bytes of a prompt; returns its blocks."""
        sent, taken = self.prefill.sent[handle], list(self.decode.tickets[handle].blocks)
        length, count = len(wanted.prompt), len(sent)
        ours = kv_bytes(self.prefill.region, [sent[place] for place in range(count)], length)
        theirs = kv_bytes(self.decode.region, taken[:count], length)
        assert ours.any()
        assert np.array_equal(ours, theirs)
        return count
