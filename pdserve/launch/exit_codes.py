"""Defines the exit codes; `docs/operations.md` repeats this table for scripts."""

from __future__ import annotations

OK = 0
"""Success, or an orderly shut-down."""
FAILED = 1
"""An unforeseen failure; the log has the details."""
USAGE = 2
"""A wrong flag, variable, file or model; the message names cause and remedy."""
CANNOT_LISTEN = 3
"""The address is in use or not available."""
ENGINE_FAILED = 4
"""The engine could not start, or died too often to be restarted."""
CANNOT_JOIN = 5
"""The cluster refused this node: another key or cluster, or a name in use."""
INTERRUPTED = 130
"""Ended at once by a second Ctrl-C or SIGTERM."""
