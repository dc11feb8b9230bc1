"""Defines the exit codes; `docs/operations.md` repeats this table for scripts."""

from __future__ import annotations

OK = 0
"""Done, or served and shut down in order."""
FAILED = 1
"""Something broke that nobody foresaw; the log says what."""
USAGE = 2
"""A flag, variable, file or model is wrong: the message names cause and remedy."""
CANNOT_LISTEN = 3
"""The address is in use or not ours."""
ENGINE_FAILED = 4
"""The engine could not start, or died too often to be started again."""
CANNOT_JOIN = 5
"""The cluster will not have this node: another key or cluster, or its name is taken."""
INTERRUPTED = 130
"""Ended at once by a second Ctrl-C or SIGTERM."""
