"""Sums the metrics of frontends that share one listening port.

The kernel gives a scrape to any one of them. That frontend asks the others, which it finds by the
group in their cards, and answers with the sum. A frontend that does not answer in time is missing
from the sum, and the degradation `frontend_silent` reports it. Owned by the frontend's start-up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.messages.status import MetricPage, Scrape
from pdserve.observe.merge import merge
from pdserve.observe.scrapes import PLAIN, ScrapedPage, ScrapeForm, page_of
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.peers.peer_ref import ask_all
from pdserve.runtime.rpc_methods import SCRAPE

if TYPE_CHECKING:
    from pdserve.ids import NodeId, Seconds
    from pdserve.net.base import IncomingCall
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.metrics import Metrics
    from pdserve.runtime.node import Node

__all__ = ["GroupMetrics"]

_PATIENCE: Final[Seconds] = 1.0
"""Seconds for all siblings together; scrapers wait ten seconds by default."""
_SILENT: Final = "frontend_silent"


class GroupMetrics:
    """`page` is what `Metrics.page` is for one process."""

    def __init__(
        self, node: Node, group: str, metrics: Metrics, degradations: Degradations
    ) -> None:
        self.names = metrics.names
        self._node = node
        self._group = group
        self._metrics = metrics
        self._degradations = degradations
        self._silent: dict[NodeId, str] = {}
        self._asking: asyncio.Task[list[MetricPage]] | None = None
        node.host(self)

    async def page(self, form: ScrapeForm = PLAIN) -> ScrapedPage:
        """The page of the whole group. Concurrent scrapes share one call of the siblings."""
        if self._asking is None or self._asking.done():
            self._asking = self._node.tasks.spawn(self._ask_all(), "numbers of siblings")
        asking = self._asking
        await asyncio.wait({asking})
        others = [] if asking.cancelled() else asking.result()
        pages = [self._metrics.families(), *(page.scraped for page in others)]
        return page_of(merge(pages), form)

    @answers(SCRAPE)
    def _scrape(self, scrape: Scrape, call: IncomingCall) -> MetricPage:
        if scrape.group != self._group:
            return MetricPage(())
        return MetricPage((), tuple(self._metrics.families()))

    async def _ask_all(self) -> list[MetricPage]:
        # A frontend that has just joined may serve before its card is here. It answers with an
        # empty page if it belongs to another group.
        siblings = [
            member.node
            for member in self._node.registry.by_role("frontend")
            if member.card is None or member.card.group == self._group
        ]
        scrape = Scrape(self._group)
        answers = await ask_all(self._node, siblings, SCRAPE, scrape, timeout=_PATIENCE)
        self._note(
            {node: page.message for node, page in answers.items() if isinstance(page, PdserveError)}
        )
        return [page for page in answers.values() if isinstance(page, MetricPage)]

    def _note(self, silent: dict[NodeId, str]) -> None:
        if silent.keys() == self._silent.keys():
            return
        self._silent = silent
        self._degradations.clear(_SILENT)
        if silent:
            words = "; ".join(f"{node}: {why}" for node, why in sorted(silent.items()))
            text = f"/metrics lacks the numbers of frontends that share its port: {words}"
            self._degradations.add(_SILENT, text)
