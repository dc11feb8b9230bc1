"""Records in which ways this process runs degraded, and why.

Code that falls back to a slower or poorer way reports it here; each reason becomes one log line, a
metric and an entry in `/health`. This file knows no reason by name.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.observe.metrics import Metrics

_log = logging.getLogger(__name__)


class Degradations:
    """The active degradations, by a short snake_case name; owned by the process's start-up."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reasons: dict[str, str] = {}

    def add(self, reason: str, detail: str) -> None:
        """Activates `reason`; `detail` gives the cause and the remedy. Idempotent."""
        if reason in self._reasons:
            return
        # A path may have bytes that are no text, and then neither JSON nor gossip could carry it.
        detail = detail.encode("utf-8", "backslashreplace").decode()
        self._reasons[reason] = detail
        self._metrics.degraded.labels(reason).value = 1
        _log.warning("degraded (%s): %s", reason, detail)

    def clear(self, reason: str) -> None:
        """Ends a reason; unknown ones are ignored."""
        if self._reasons.pop(reason, None) is None:
            return
        self._metrics.degraded.remove(reason)
        _log.info("no longer degraded (%s)", reason)

    def reasons(self) -> Mapping[str, str]:
        """A live read-only view: reason to detail."""
        return MappingProxyType(self._reasons)
