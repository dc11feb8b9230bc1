"""Raises the file descriptor limit so that the configured number of connections fits."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger("pdserve.frontend")

RESERVED = 128
"""Descriptors for everything other than client connections: engine, log, model files."""


def usable_connections(wanted: int) -> int:
    """Returns how many of `wanted` connections the process may have.

    Raises the soft limit on open files as far as needed and allowed. Without this, accepting would
    fail at the limit, together with everything else that opens a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    usable = max(1, soft - RESERVED)
    logger.warning(
        "only %d connections are possible, not %d: the limit on open files is %d (ulimit -n)",
        usable,
        wanted,
        soft,
    )
    return usable
