"""Reports fields nobody knows: each name once in the log, every use in a metric of bounded size."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

from pdserve.openai.fields import shorten, without_places

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.observe.metrics import Metrics

logger = logging.getLogger("pdserve.frontend.fields")

MAX_NAMES = 64
"""Names remembered, so that a client that invents names can grow neither log nor metric."""


class UnknownFields:
    """Remembers which names were reported. Owned by the frontend."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: set[str] = set()

    def report(self, names: Iterable[str]) -> None:
        """Count each name, and log those seen for the first time.

        Of one request the first so many; a client that sends more is not making a spelling mistake.
        """
        for name in islice(names, MAX_NAMES):
            name = shorten(without_places(name))
            self._metrics.unknown_fields.labels(name).inc()
            if name not in self._seen and len(self._seen) < MAX_NAMES:
                self._seen.add(name)
                logger.warning("ignoring the unknown request field %r (reported once)", name)
