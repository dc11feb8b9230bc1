"""Runs `pdserve drain NODE[,NODE]`: nodes take no new work, hand over what they have, and end, or
serve again.

It asks one node for the members, sends the request to each named node, and can wait until they are
done. It joins nothing. `runtime.orders.drain` implements the drain in a node.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError, HandshakeRefused, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import closest_match
from pdserve.runtime.orders.drain import describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.cli.console.reach import Reach
    from pdserve.ids import NodeId, Seconds
    from pdserve.launch.cluster.admin_client import AdminClient
    from pdserve.messages.status import ClusterStatus, MemberStatus

__all__ = ["DrainProgress", "ending", "members_named", "run"]

_POLL: Final[Seconds] = 0.5
_MARGIN: Final[Seconds] = 15.0
"""Seconds beyond a node's own drain timeout, to leave the cluster and for that to be seen."""
_DESCRIPTION: Final = """\
Take nodes away without losing a request: each takes nothing new from now on and has what it is
doing served elsewhere, or finishes it; then it leaves the cluster and its process ends with exit
status 0, as it does after SIGTERM. What is left after its --drain-timeout is sent on by the
frontends, computed anew. A node in a process with others drains them all. Instead of
a node, --port names a server on this machine that has no cluster.

Routers, workers and frontends drain alike; a frontend finishes its own streams. A service manager
that starts ended processes again does so here, too: that is a rolling restart.

--undo has nodes that drain serve again: those that stay, and others until they have handed over
everything and begin to end. Streams that were asked to move may still move. A drain by a signal
cannot be undone."""


def run(arguments: list[str]) -> int:
    """Sends the drains; the exit status is 0 if all nodes confirmed and, with waiting, are done."""
    parser = Parser("pdserve drain", _DESCRIPTION)
    parser.own.add_argument(
        "nodes",
        metavar="NODE[,NODE]",
        nargs="*",
        help="Names, as in status; not needed for the server that --port or --admin-socket names.",
    )
    parser.own.add_argument(
        "--wait",
        action="store_true",
        help="Return when the nodes are gone or, with --stay, drained.",
    )
    parser.own.add_argument(
        "--stay",
        action="store_true",
        help="Stay in the cluster, drained, until a signal or another drain.",
    )
    parser.own.add_argument(
        "--undo",
        action="store_true",
        help="Serve again: the opposite of a drain that has not ended the process yet.",
    )
    add_reach(parser)
    parsed = parser.parse(arguments)
    if parsed.undo and (parsed.stay or parsed.wait):
        raise ConfigError("--undo ends a drain: leave out --stay and --wait")
    names = [name for word in parsed.nodes for name in word.split(",")]
    if "" in names:
        raise ConfigError("a name of a node is empty: give names as `pdserve status` shows them")
    reach = reach_of(parsed)
    if not names and not reach.server:
        raise ConfigError(
            "name the nodes to drain as `pdserve status` shows them or, for a server without a "
            "cluster, give its --port"
        )
    if parsed.undo:
        return asyncio.run(_undo(reach, names))
    return asyncio.run(_drain(reach, names, stay=parsed.stay, wait=parsed.wait))


async def _drain(reach: Reach, names: list[str], *, stay: bool, wait: bool) -> int:
    visitor = reach.client()
    try:
        status = await visitor.status()
        members = members_named(status, names or [status.asked])
        patience = [await _tell(visitor, member, stay=stay) for member in members]
        heard = {m.node: m.epoch for m, left in zip(members, patience, strict=True) if left >= 0}
        fine = len(heard) == len(members)
        if wait and heard:
            progress = DrainProgress(heard, stay, status.asked, ending(status, members))
            fine &= await _wait(visitor, progress, max(patience) + _MARGIN)
    finally:
        await visitor.close()
    return exit_codes.OK if fine else exit_codes.FAILED


async def _undo(reach: Reach, names: list[str]) -> int:
    visitor = reach.client()
    try:
        status = await visitor.status()
        members = members_named(status, names or [status.asked])
        serve = [await _tell_to_serve(visitor, member) for member in members]
    finally:
        await visitor.close()
    return exit_codes.OK if all(serve) else exit_codes.FAILED


async def _tell_to_serve(visitor: AdminClient, member: MemberStatus) -> bool:
    """Undoes a node's drain; returns True if it serves."""
    try:
        state = await visitor.undo_drain(member.address, member.node)
    except PdserveError as error:
        _say(member.node, error.message)
        return False
    if state.refused:
        _say(member.node, f"{describe(state)}: {state.refused}")
    else:
        _say(member.node, "it did not drain" if state.already else "serves again")
    return state.serves


def ending(status: ClusterStatus, members: Sequence[MemberStatus]) -> frozenset[NodeId]:
    """The nodes that end with these: those of the same processes."""
    processes = {(member.host, member.pid) for member in members if member.pid}
    beside = [one.node for one in status.members if (one.host, one.pid) in processes]
    return frozenset((*(member.node for member in members), *beside))


def members_named(status: ClusterStatus, names: Sequence[str]) -> list[MemberStatus]:
    """The members of these names, each once. Raises `ConfigError` for an unknown name; then nothing
    is sent to any node."""
    there = {member.node: member for member in status.members}
    found: dict[str, MemberStatus] = {}
    for name in names:
        member = next((m for node, m in there.items() if node == name), None)
        if member is None:
            close = closest_match(name, there)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(there)}"
            raise ConfigError(printable(f"there is no node {name!r} in the cluster; {hint}"))
        found[name] = member
    return list(found.values())


async def _tell(visitor: AdminClient, member: MemberStatus, *, stay: bool) -> Seconds:
    """Seconds that the drain may take; below 0 if the node did not confirm."""
    try:
        state = await visitor.drain(member.address, member.node, stay=stay)
    except PdserveError as error:
        _say(member.node, error.message)
        return -1.0
    was = " already" if state.already else ""
    _say(member.node, describe(state).replace("draining", f"draining{was}", 1))
    return state.remaining


async def _wait(visitor: AdminClient, progress: DrainProgress, patience: Seconds) -> bool:
    """Waits for the drains; returns False if some are not done in time."""
    until = time.monotonic() + patience
    while progress.waiting:
        if time.monotonic() > until:
            for node in progress.waiting:
                _say(node, f"not done within {patience:.0f} s; `pdserve status` says how it is")
            return False
        await asyncio.sleep(_POLL)
        try:
            status = await visitor.status()
        except HandshakeRefused:
            raise
        except PdserveError:
            if not progress.asked_is_going:
                raise
            status = None
        for node, words in progress.look(status):
            _say(node, words)
    return True


@dataclass
class DrainProgress:
    """The state of nodes that drain. Pure."""

    waiting: dict[NodeId, int]
    """Epochs of nodes that are not done."""
    stay: bool
    asked: NodeId | None = None
    """The node whose view was seen last."""
    ending: frozenset[NodeId] = frozenset()
    """All nodes whose processes end."""
    _said: dict[NodeId, str] = field(default_factory=dict)

    @property
    def asked_is_going(self) -> bool:
        """True if that node's process drains, so it may be gone when it does not answer."""
        return not self.stay and (self.asked in self.waiting or self.asked in self.ending)

    def look(self, status: ClusterStatus | None) -> list[tuple[NodeId, str]]:
        """Returns the news in a status. `status` None: the node that was asked is gone, and no
        other answered."""
        if status is None:
            gone = [(node, "gone, as far as can be seen") for node in self.waiting]
            self.waiting.clear()
            return gone
        self.asked = status.asked
        there = {(member.node, member.epoch): member for member in status.members}
        news = []
        for node, epoch in tuple(self.waiting.items()):
            words = self._words(there.get((node, epoch)))
            if words in ("gone", "drained"):
                del self.waiting[node]
            if words and self._said.get(node) != words:
                self._said[node] = words
                news.append((node, words))
        return news

    def _words(self, member: MemberStatus | None) -> str:
        if member is None:
            return "gone"
        state = None if member.report is None else member.report.drain
        if state is None:
            return ""
        if state.drained:
            return "drained" if self.stay else "drained: it is leaving"
        return f"{state.left} request{'' if state.left == 1 else 's'} left"


def _say(node: str, words: str) -> None:
    print(printable(f"{node}: {words}"), flush=True)
