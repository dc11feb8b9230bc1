"""pdserve's own back ends, as workers use them: shm and tcp, with each way of checking.

Every part carries the hashes of its blocks, as in production. The clock runs from `deliver` at the
source to its `done`, after the destination has placed, checked and reported. Tickets are exchanged
before, because they come with the request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, os.getcwd())

import msgspec
import uvloop

from bench.transfer_arms.base import BLOCK, BLOCKS, Arm, Talk, fill, run
from pdserve.errors import LinkLost
from pdserve.ids import NodeId, NodeLife
from pdserve.kv.storage import BlockMemory
from pdserve.messages.transfer import RankKvLayout, TransferControl, TransferTicket
from pdserve.transfer.base import GrantSpec, KvPart, Region
from pdserve.transfer.same_host.shm import ShmTransport
from pdserve.transfer.tcp.transport import TcpTransport
from pdserve.transfer.verify import Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import TransferError
    from pdserve.transfer.base import KvPath, KvTransport

SOURCE, DESTINATION = NodeLife(NodeId("source"), 1), NodeLife(NodeId("destination"), 2)
TOKENS = 32
LAYOUT = RankKvLayout(content="bench", layers=4, heads=2, tokens=TOKENS, dim=64, itemsize=2)
_LENGTH = struct.Struct("<I")
_TIMEOUT = 30.0


class _Deaf:
    """A sink that ignores events, because the source gets them too."""

    def on_part(self, part: int) -> None: ...

    def on_failed(self, error: TransferError) -> None:
        print(error, file=sys.stderr)


class End:
    """One process: its pool, and a transport for each mode."""

    layout = LAYOUT

    def __init__(self, key: NodeLife, value: int, ask: Any) -> None:
        self.memory = BlockMemory(BLOCKS, (BLOCK,))
        self.view = self.memory.view()
        fill(self.view, value)
        regions = [Region(LAYOUT, BLOCKS, self.view, self.memory.export().fd)]
        self.transports: dict[str, KvTransport] = {}
        for mode in ("off", "sample", "all"):
            self.transports[f"shm/{mode}"] = ShmTransport(
                *key, regions, ask(f"shm/{mode}"), verify=as_verify(mode)
            )
            self.transports[f"tcp/{mode}"] = TcpTransport(
                *key, regions, ask(f"tcp/{mode}"), host="127.0.0.1", verify=as_verify(mode)
            )

    def head(self, block: int) -> bytes:
        """A block's beginning."""
        return bytes(self.view[block * BLOCK : block * BLOCK + 64])

    def mark(self, block: int, value: bytes) -> None:
        """Overwrites a block's beginning."""
        self.view[block * BLOCK : block * BLOCK + len(value)] = value


def as_verify(mode: str) -> Verify:
    checked: Verify = msgspec.convert(mode, type=Verify)
    return checked


class Ours(Arm):
    name = "pdserve"
    about = "pdserve's back ends, from `deliver` to `done`"
    modes: ClassVar[tuple[str, ...]] = (
        *("shm/off", "shm/sample", "shm/all"),
        *("tcp/off", "tcp/sample", "tcp/all"),
    )
    make_end: ClassVar[type[End]] = End

    # ------------------------------------------------------------------ the driver

    def connect(self, partner: Talk | None) -> None:
        assert partner is not None
        self.partner = partner
        self.numbers = itertools.count(1)
        self.loop = uvloop.new_event_loop()
        self.loop.run_until_complete(self._connect())

    async def _connect(self) -> None:
        self.end = self.make_end(SOURCE, 1, self._ask_of)
        self.paths: dict[str, KvPath] = {}
        for mode, transport in self.end.transports.items():
            self.paths[mode] = await transport.connect(DESTINATION, timeout=_TIMEOUT)

    def _ask_of(self, mode: str) -> Any:
        async def ask(peer: NodeLife, control: TransferControl, timeout: float) -> TransferControl:
            request = {"what": "control", "mode": mode, "control": _packed(control)}
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(None, self.partner.ask, request)
            return _control(answer)

        return ask

    def move(self, mode: str, here: Sequence[int], there: Sequence[int]) -> float:
        request = {"what": "grant", "mode": mode, "blocks": list(there)}
        packed = self.partner.ask(request)["ticket"]
        ticket = msgspec.msgpack.decode(bytes.fromhex(packed), type=TransferTicket)
        names = b"".join(number.to_bytes(16, "little") for number in here)
        part = KvPart(0, 0, list(here), (0, self.end.layout.layers), names)
        elapsed = self.loop.run_until_complete(self._move(self.paths[mode], ticket, part))
        self.partner.ask({"what": "finish", "slot": ticket.slot})
        return elapsed

    async def _move(self, path: KvPath, ticket: TransferTicket, part: KvPart) -> float:
        ended = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        path.deliver(ticket, part, ended.set_result)
        error = await ended
        elapsed = time.perf_counter() - started
        if error is not None:
            raise error
        return elapsed

    def mark(self, here: int, value: bytes) -> None:
        self.end.mark(here, value)


async def _partner(make_end: type[End]) -> None:
    """Runs the destination; it answers while its loop serves the transports."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if sys.argv[2:]:
        os.sched_setaffinity(0, {int(sys.argv[3])})
    end = make_end(DESTINATION, 2, lambda mode: _no_partner)
    grants: dict[int, Any] = {}
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        found = await _answer(end, grants, msgspec.json.decode(line))
        answers.write(msgspec.json.encode(found) + b"\n")
        answers.flush()
    os._exit(0)  # its paths need no orderly end


async def _answer(end: End, grants: dict[int, Any], request: dict[str, Any]) -> dict[str, Any]:
    match request["what"]:
        case "control":
            answer = await end.transports[request["mode"]].answer(SOURCE, _control(request))
            return {"control": _packed(answer)}
        case "grant":
            path = end.transports[request["mode"]].path(SOURCE)
            assert path is not None
            blocks = request["blocks"]
            grant = path.grant(GrantSpec("bench", 1, 0, TOKENS * len(blocks), blocks), _Deaf())
            grants[grant.ticket.slot] = grant
            return {"ticket": _packed(grant.ticket)}
        case "finish":
            grants.pop(request["slot"]).finish()
            return {}
        case _:
            return {"bytes": end.head(request["block"]).hex()}


def _control(said: dict[str, Any]) -> TransferControl:
    control: TransferControl = msgspec.msgpack.decode(
        bytes.fromhex(said["control"]), type=TransferControl
    )
    return control


def _packed(record: object) -> str:
    return msgspec.msgpack.encode(record).hex()


async def _no_partner(peer: NodeLife, control: TransferControl, timeout: float) -> TransferControl:
    raise LinkLost("this process asks nothing")


def main(arm: Ours) -> None:
    """Runs the process that the command line names."""
    if sys.argv[1] == "partner":
        uvloop.run(_partner(arm.make_end))
    else:
        run(arm)


if __name__ == "__main__":
    main(Ours())
