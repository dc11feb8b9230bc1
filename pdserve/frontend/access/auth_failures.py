"""Logs and counts requests whose API key was refused, with a bounded number of log lines.

A log watcher such as fail2ban can ban an address by these lines. They name the address and the
reason, never what was sent. The caller passes times.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from pdserve.frontend.access.admission import MINUTE, TokenBucket

if TYPE_CHECKING:
    from pdserve.frontend.access.api_keys import KeyRefused
    from pdserve.ids import Seconds
    from pdserve.observe.metrics import Metrics

__all__ = ["AuthFailures"]

_log = logging.getLogger("pdserve.frontend.keys")

_EVERY: Final[Seconds] = 10.0
"""Seconds between two log lines about one address."""
_PER_MINUTE: Final = 60
"""Most log lines per minute, over all addresses."""
_MOST: Final = 1024
"""Most addresses remembered."""


class AuthFailures:
    """The authentication failures of one frontend."""

    def __init__(self, metrics: Metrics, now: Seconds) -> None:
        self._metrics = metrics
        self._lines = TokenBucket(_PER_MINUTE, now)
        self._last: OrderedDict[str, tuple[Seconds, int]] = OrderedDict()
        """Per address: time of its last log line, and refusals since then."""

    def note(self, error: KeyRefused, address: str | None, now: Seconds) -> None:
        """Counts and perhaps logs a refused request; `address` None: unknown."""
        self._metrics.api_keys_refused.labels(error.reason).inc()
        name = address or "an unknown address"
        told, silent = self._last.pop(name, (-MINUTE, 0))
        if now - told < _EVERY or self._lines.wait(1, now):
            self._last[name] = (told, silent + 1)
        else:
            self._lines.spend(1, now)
            self._last[name] = (now, 0)
            before = f", {silent} more before" if silent else ""
            _log.warning("refused an API key from %s: %s%s", name, error.reason, before)
        if len(self._last) > _MOST:
            self._last.popitem(last=False)
