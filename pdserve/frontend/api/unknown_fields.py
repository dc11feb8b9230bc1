"""Reports request fields and tool types that the server ignores: one log line each, and a metric.

Clients can send any number of unknown fields, so the memory of those already logged is bounded.
The tool types that are left out are a closed set.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

from pdserve.protocols.unsupported_fields import shorten, without_indices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend.fields")

MAX_NAMES = 64
"""Most names remembered, so that a client that invents names can grow neither log nor metric."""


_HOSTED = "leaving out a tool of type %s: only tools that clients run themselves can be called"
_LEFT_OUT = {"custom.format": "a custom tool's grammar is shown to the model, but not enforced"}


class UnknownFields:
    """Remembers which names were reported. Owned by the frontend."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: set[str] = set()
        self._left_out: set[str] = set()

    def report(self, names: Iterable[str]) -> None:
        """Counts each name and logs new ones.

        Only a limited number of names per request: a client that sends more has not made a spelling
        mistake.
        """
        for name in islice(names, MAX_NAMES):
            name = shorten(without_indices(name))
            self._metrics.unknown_fields.labels(name).inc()
            if name not in self._seen and len(self._seen) < MAX_NAMES:
                self._seen.add(name)
                logger.warning("ignoring the unknown request field %r (reported once)", name)

    def report_left_out(self, kinds: Iterable[str]) -> None:
        """Counts each type of tool that a request has and that is left out; logs it once."""
        for kind in kinds:
            self._metrics.tools_left_out.labels(kind).inc()
            if kind not in self._left_out:
                self._left_out.add(kind)
                logger.warning("%s (reported once)", _LEFT_OUT.get(kind, _HOSTED % kind))
