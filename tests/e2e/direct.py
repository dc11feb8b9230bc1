"""A node of the test's own in a cluster of real processes: it opens requests at workers of its
choice, token by token, as a frontend does after it has asked a router.

It runs on a loop in a thread; a test calls plain methods.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.messages.engine_errors import error_of
from pdserve.messages.worker_stream import (
    WORKER_STREAM,
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    OutputBatch,
    WorkerMigrationHint,
    split_message,
)
from pdserve.wire.codec import decoder, encode
from tests.chaos.cluster import eventually
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from pdserve.messages.request import Finish, FirstTokenStats, GenerateRequest, TokenLogprob
    from pdserve.net.base import ItemStream
    from pdserve.wire.parser import Buffer

_decode: Any = decoder(cast("Any", OutputBatch | Fragment))


@dataclass(eq=False)
class Call:
    """One request at one worker, as far as it has come; of its first choice only."""

    channel: _Channel
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    started: FirstTokenStats | None = None
    finish: Finish | None = None
    error: Exception | None = None
    moving: list[str] = field(default_factory=list)
    """Why its worker wants it to move."""

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def prefill(self) -> str:
        return "" if self.started is None else self.started.prefill


class _Channel:
    """To one worker; see `net.base.Sink`."""

    def __init__(self, stream_of: Any) -> None:
        self.calls: dict[int, Call] = {}
        self.by_handle: dict[int, Call] = {}
        self.waiting: deque[bytes] = deque()
        self.assembler = FragmentAssembler()
        self.ended: BaseException | bool | None = False
        self.stream: ItemStream = stream_of(self)

    def post(self, message: OpenRequest | AbortRequest) -> None:
        self.waiting.extend(split_message(encode(message)))
        self.on_unblocked()

    def on_unblocked(self) -> None:
        while self.waiting and self.stream.try_send(self.waiting[0]):
            self.waiting.popleft()

    def on_data(self, body: Buffer) -> None:
        message = _decode(body)
        if isinstance(message, Fragment):
            whole = self.assembler.take(message)
            if whole is None:
                return
            message = _decode(whole)
        for number, handle in message.accepted:
            self.by_handle[handle] = self.calls[number]
        for delta in message.deltas:
            call = self.by_handle.get(delta.handle)
            if call is not None and delta.choice == 0:
                call.started = call.started or delta.started
                call.logprobs += delta.logprobs or []
                call.tokens += delta.tokens
                call.finish = delta.finish
        for record in message.rejected:
            self.calls[record.handle].error = error_of(record)
        for moving in message.moving:
            self._ask(moving)

    def _ask(self, moving: WorkerMigrationHint) -> None:
        self.calls[moving.number].moving.append(moving.reason)

    def on_end(self, error: BaseException | None) -> None:
        self.ended = error or True
        for call in self.calls.values():
            if not call.over:
                call.error = ConnectionError(f"the channel has ended: {error}")


class Direct:
    """Use with `with`."""

    def __init__(self, home: Path, address: str, name: str = "direct") -> None:
        """`home`: where the cluster's nodes have their key; `address`: one of them."""
        self._config = ClusterConfig(join=(address,), node_name=name)
        self._environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._channels: dict[tuple[str, int], _Channel] = {}
        self._numbers = 0

    def __enter__(self) -> Direct:
        self._thread.start()
        self._run(self._join())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _join(self) -> None:
        membership = NodeFactory(self._config, private=False, environ=self._environ)
        self.node = membership.node("frontend")
        await self.node.start()

    async def _leave(self) -> None:
        await self.node.leave()
        await self.node.close()

    # ------------------------------------------------------------------ what a test does

    def epoch(self, worker: str) -> int:
        """The present life of a worker that serves."""

        def serving() -> int:
            member = self.node.registry.get(worker)  # type: ignore[arg-type]
            card = None if member is None else member.card
            return member.epoch if member is not None and card is not None and card.models else 0

        return int(eventually(serving, f"{worker} does not serve"))

    def open(self, worker: str, request: GenerateRequest) -> Call:
        """It is not waited for."""
        call: Call = self._run(self._open(worker, self.epoch(worker), request))
        return call

    async def _open(self, worker: str, epoch: int, request: GenerateRequest) -> Call:
        channel = self._channels.get((worker, epoch))
        if channel is None or channel.ended:
            link = await self.node.link(worker, timeout=PATIENCE)  # type: ignore[arg-type]
            channel = _Channel(
                lambda sink: link.open_stream(WORKER_STREAM, b"", sink, window=1 << 20)
            )
            self._channels[worker, epoch] = channel
        self._numbers += 1
        call = channel.calls[self._numbers] = Call(channel, self._numbers)
        channel.post(OpenRequest(self._numbers, 0, request))
        return call

    def tokens(self, call: Call, count: int) -> list[int]:
        """Once there are so many, or it is over."""
        eventually(lambda: call.over or len(call.tokens) >= count, lambda: call)
        assert call.error is None, call.error
        return list(call.tokens)

    def finished(self, call: Call) -> Call:
        """Once it is."""
        eventually(lambda: call.over, lambda: call)
        assert call.error is None, call.error
        return call

    def abort(self, call: Call) -> list[int]:
        """Nothing more is wanted of it; returns what has come."""

        async def post() -> list[int]:
            call.channel.post(AbortRequest(call.number))
            call.channel.calls.pop(call.number, None)
            return list(call.tokens)

        tokens: list[int] = self._run(post())
        return tokens
