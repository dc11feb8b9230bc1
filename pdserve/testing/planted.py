"""Bugs planted on purpose: a suite that does not catch them does not test what it says.

Each entry takes one rule out of the product, by replacing one named function for a while. Nothing
in the product knows of this file; a name that no longer exists fails at once.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import DialFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BUGS", "Bug", "planted"]


@dataclass(frozen=True, slots=True)
class Bug:
    """One rule that is taken out."""

    module: str
    path: str
    """Class and function."""
    make: Callable[[Any], Any]
    """From the function to the one with the bug."""
    why: str
    """What goes wrong."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[Bug]:
    """The bug is in the product while this lasts."""
    bug = BUGS[name]
    owner: Any = importlib.import_module(bug.module)
    *classes, function = bug.path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    original = vars(owner)[function]
    setattr(owner, function, bug.make(original))
    try:
        yield bug
    finally:
        setattr(owner, function, original)


# ------------------------------------------------------------------------------ how it is done


def _never(original: Callable[..., Any]) -> Callable[..., Any]:
    """Not done at all."""
    return lambda *args, **kwargs: None


def _each(number: int, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Every so many calls something else is done."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % number == 0:
                return instead(original, *args, **kwargs)
            return original(*args, **kwargs)

        return sometimes

    return make


def _skip(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    pass


def _again(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return original(*args, **kwargs)


def _gone_stays(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Registry._gone`, and once more by and by."""

    def gone(self: Any, record: Any, reason: str) -> None:
        member = self.get(record.node)
        original(self, record, reason)
        if member is not None and member.epoch == record.epoch:
            self._members[record.node] = member
            original(self, record, reason)

    return gone


def _refuted_by_nobody(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Gossip._about_me`, but an accusation is taken lying down."""

    def about_me(self: Any, record: Any) -> None:
        if record.state.name != "SUSPECT":
            original(self, record)

    return about_me


def _forgets_card(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Node._tell_card`, but in the first life only."""

    def tell_card(self: Any, life: Any) -> None:
        if self.lives <= 1:
            original(self, life)

    return tell_card


def _keeps_finished(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_Channel._finish` of the worker, but what runs goes on."""

    def finish(self: Any) -> None:
        self.requests.clear()
        original(self)

    return finish


def _dead_connection(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GossipService._dialled`, but a failure is not told."""

    async def dialled(self: Any, address: str) -> None:
        try:
            await self._network.dial(address)
        except DialFailed:
            return
        await original(self, address)

    return dialled


def _keeps_timer(original: Callable[..., Any]) -> Callable[..., Any]:
    """`GossipService.close`, but its timer stays."""

    async def close(self: Any) -> None:
        timer, self._timer = self._timer, None
        await original(self)
        self._timer = timer

    return close


async def _no_rejoin(self: Any, effect: Any) -> None:
    """`Node._rejoin`, undone."""


def _release_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_Releaser.__call__`, without its memory."""

    def release(self: Any, outcome: str) -> None:
        original(self, outcome)
        self._told = False
        original(self, outcome)

    return release


BUGS: Final[dict[str, Bug]] = {
    "release not sent": Bug(
        "pdserve.frontend.cluster", "_Releaser.__call__", _never, "answers are not given back"
    ),
    "release sent twice": Bug(
        "pdserve.frontend.cluster",
        "_Releaser.__call__",
        _release_twice,
        "answers are given back twice",
    ),
    "abort not forwarded": Bug(
        "pdserve.worker.channel", "_Channel._abort", _never, "engines work for nobody"
    ),
    "a lost channel ends nothing": Bug(
        "pdserve.worker.channel",
        "_Channel._finish",
        _keeps_finished,
        "requests of a dead frontend go on",
    ),
    "end of a booking not told": Bug(
        "pdserve.worker.member", "WorkerMember._end", _never, "workers hold bookings for ever"
    ),
    "a token batch is lost": Bug(
        "pdserve.frontend.channel", "WorkerChannel._deliver", _each(97, _skip), "tokens are missing"
    ),
    "a token batch comes twice": Bug(
        "pdserve.frontend.channel", "WorkerChannel._deliver", _each(97, _again), "tokens double"
    ),
    "channel outlives its end": Bug(
        "pdserve.frontend.channel", "WorkerChannel._end", _never, "requests never end"
    ),
    "booking never expires": Bug(
        "pdserve.router.bookings", "Bookings.expire", _never, "what was never placed is charged"
    ),
    "epoch not compared": Bug(
        "pdserve.gossip.member",
        "Change.new_life",
        lambda _: property(lambda change: change.old is None),
        "a later life is taken for the one before",
    ),
    "LinkDown dropped": Bug(
        "pdserve.gossip.service", "GossipService.link_down", _never, "membership trusts dead links"
    ),
    "failed dials not told": Bug(
        "pdserve.gossip.service",
        "GossipService._dialled",
        _dead_connection,
        "nobody is looked for again",
    ),
    "own death not heard": Bug(
        "pdserve.runtime.node", "Node._rejoin", lambda original: _no_rejoin, "the dead stay"
    ),
    "card not told in a later life": Bug(
        "pdserve.runtime.node", "Node._tell_card", _forgets_card, "nobody knows what it serves"
    ),
    "Gone told twice": Bug(
        "pdserve.runtime.registry", "Registry._gone", _gone_stays, "deaths are told twice"
    ),
    "refutation not spoken": Bug(
        "pdserve.gossip.core", "Gossip._about_me", _refuted_by_nobody, "the living are buried"
    ),
    "credit not returned": Bug(
        "pdserve.wire.protocol", "Connection.consumed", _never, "streams come to a halt"
    ),
    "watermark not checked": Bug(
        "pdserve.runtime.topics.reader", "LogReader._watermark", _never, "a lost event stays lost"
    ),
    "a pool's events are lost": Bug(
        "pdserve.worker.kv_log", "KvLog.apply", _each(5, _skip), "routers hear of old pools"
    ),
    "removed blocks are not told": Bug(
        "pdserve.worker.kv_log", "KvLog._remove", _never, "routers send prompts to what is gone"
    ),
    "a dead engine's blocks stay": Bug(
        "pdserve.worker.kv_log", "KvLog._clear", _never, "a new engine is taken for a full one"
    ),
    "a snapshot is not put in place": Bug(
        "pdserve.router.index.feed", "Feed.commit", _never, "who comes late knows nothing"
    ),
    "an index keeps dead workers": Bug(
        "pdserve.router.index.view", "PrefixIndex.worker_gone", _never, "memory is never given back"
    ),
    "gossip timer left behind": Bug(
        "pdserve.gossip.service", "GossipService.close", _keeps_timer, "timers leak"
    ),
}
