"""What all parts are: the same life, `begin`, `join`, `drain`, `close`, and the same surroundings.

    begin   whatever can fail at once: addresses, settings; nothing is promised yet
    join    take part in the cluster
    drain   take nothing new, finish what is under way or have it served elsewhere
    close   leave, and let go of everything

Each part has a node of its own, so that one process with three roles and three processes with one
look the same to each other. What a role does is its package's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pdserve.messages.status import Report

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.launch.cluster import Membership
    from pdserve.launch.config import Config
    from pdserve.launch.drain import Drain
    from pdserve.launch.screen import Screen
    from pdserve.messages.node import NodeCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node

__all__ = ["Context", "Part", "card", "report"]


@dataclass(frozen=True, slots=True)
class Context:
    """What the parts of one process share."""

    config: Config
    membership: Membership
    screen: Screen
    metrics: Metrics
    degradations: Degradations
    drain: Drain | None = None
    """None where no process is played."""


class Part(Protocol):
    """See above."""

    node: Node

    async def begin(self) -> None: ...

    async def join(self, seeds: tuple[str, ...] = ()) -> None:
        """`seeds`: nodes of this process that have joined."""
        ...

    async def drain(self, timeout: Seconds) -> None:
        """Returns when nothing is left, at the latest after `timeout`. May be called again."""
        ...

    @property
    def left(self) -> int:
        """Requests that a drain has to see gone."""
        ...

    async def close(self) -> None: ...

    def unready_reason(self) -> str | None:
        """None when the role can do its work, else why not."""
        ...


def report(context: Context, part: Part) -> Report:
    """What any part says of itself to whoever asks; roles add their numbers."""
    degraded = dict(context.degradations.reasons())
    drain = None if context.drain is None else context.drain.state()
    return Report(reason=part.unready_reason() or "", degraded=degraded, drain=drain)


def card(context: Context, role: str) -> NodeCard:
    """What any part says of itself to everybody; roles add theirs."""
    degraded = tuple(sorted(context.degradations.reasons()))
    return replace(context.membership.card(role), degraded=degraded)
