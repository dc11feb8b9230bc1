"""Runs `pdserve trace`: lists the last traces of requests, draws one, or watches a model.

It asks any one node, which asks all frontends; with `--changes` all planners and workers.
`tracing.waterfall` draws, `console.trace_list` makes the table.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import shutil
import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.console.trace_list import (
    cut,
    reply_as_json,
    summary_as_json,
    summary_line,
    trace_as_json,
    trace_list,
    trace_list_head,
)
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser, value_of
from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.launch import exit_codes
from pdserve.launch.config.units import parse_count, parse_duration
from pdserve.messages.trace import TraceQuery
from pdserve.tracing.ring import MOST_SUMMARIES, MOST_TRACES, is_id_of
from pdserve.tracing.watches import LONGEST_WATCH
from pdserve.tracing.waterfall import MAX_WIDTH, MIN_WIDTH, waterfall

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from pdserve.ids import Seconds
    from pdserve.launch.cluster.admin_client import AdminClient
    from pdserve.messages.trace import TraceReply, TraceSummary

__all__ = ["run"]


_WIDTH: Final = 80
_WATCH: Final[Seconds] = 60.0
_PAUSE: Final[Seconds] = 1.0
"""Seconds between two questions of a watch."""
_TAIL: Final[Seconds] = 2.0
"""A watch listens so much longer: requests that have ended are told of in a moment."""
_HURRY: Final = 50
"""From so many traces at a time on, a watch asks ten times as often."""
_ID: Final = 20
"""Characters of a request id in a watch: enough to ask for it, with room for the reasons behind."""
_MODEL: Final = 18
_AT_ONCE: Final[Seconds] = 0.001
"""The rest of a watch that was interrupted."""
_WHY_FEW: Final = (
    "Each frontend has the last 200 that were kept: a share of all requests (one in a hundred, or "
    "--trace-sample at the server), and those that fail, move, are preempted, are tried twice or "
    "miss their SLO. `pdserve trace --watch model=NAME` keeps all of a model for a minute."
)

_WHY_NO_CHANGES: Final = (
    "Each planner and each worker has the last 200 changes that ended there in its present life."
)


def run(arguments: list[str]) -> int:
    """Prints what is asked for; the exit status is 0 if there was something to ask."""
    parsed = _parser().parse(arguments)
    query = _query(parsed)
    reach = reach_of(parsed)

    async def ask() -> int:
        visitor = reach.client()
        try:
            if query.watch:
                return await _watch(visitor, query, as_json=parsed.json)
            return _show(await visitor.traces(query), query, parsed)
        finally:
            await visitor.close()

    return asyncio.run(ask())


def _parser() -> Parser:
    parser = Parser(
        "pdserve trace",
        "Show where the time of requests went. Without a request: the last traces that are kept.\n"
        "With one: its phases, drawn over its time. It needs no collector.",
    )
    own = parser.own
    text = "Its x-request-id, its trace id, or the beginning of one of them."
    own.add_argument("request", metavar="REQUEST", nargs="?", default="", help=text)
    own.add_argument("--model", metavar="NAME", default="", help="Only requests of this model.")
    own.add_argument("--errors", action="store_true", help="Only requests that failed.")
    own.add_argument("--slow", action="store_true", help="Only requests that missed an SLO.")
    text = "Only requests that took longer, such as 2s."
    own.add_argument("--over", metavar="TIME", default="", help=text)
    text = f"Most requests in the list [20; at most {MOST_SUMMARIES}]."
    own.add_argument("--limit", metavar="N", default="20", help=text)
    text = "Trace all requests of a model for a while, and print each as it ends."
    own.add_argument("--watch", metavar="model=NAME", default="", help=text)
    text = f"How long to watch [60s; at most {LONGEST_WATCH / 60:.0f}m]."
    own.add_argument("--for", dest="time", metavar="TIME", default="", help=text)
    text = "Changes of planners and mode switches of workers, in place of requests."
    own.add_argument("--changes", action="store_true", help=text)
    own.add_argument("--json", action="store_true", help="As JSON; of a watch one line each.")
    own.add_argument("--ascii", action="store_true", help="Draw with ASCII only.")
    add_reach(parser)
    return parser


# ---------------------------------------------------------------------- arguments


def _query(parsed: argparse.Namespace) -> TraceQuery:
    """Errors: `ConfigError` names the argument."""
    watch = _watched(parsed.watch)
    if watch and (parsed.request or parsed.model):
        raise ConfigError("--watch is for all requests of its model: give no other one beside it")
    if watch and parsed.changes:
        raise ConfigError("--watch is for requests: pdserve trace --changes lists what has ended")
    if parsed.time and not watch:
        raise ConfigError("--for needs --watch model=NAME")
    seconds = value_of("--for", parse_duration, parsed.time) if parsed.time else _WATCH
    if not 0 < seconds <= LONGEST_WATCH:
        raise ConfigError(f"--for: a watch lasts up to {LONGEST_WATCH / 60:.0f} minutes")

    def limit(text: str) -> int:
        return parse_count(text, 1, MOST_SUMMARIES)

    if any("\ud800" <= one <= "\udfff" for one in parsed.request + parsed.model + watch):
        raise ConfigError("names and ids of requests are UTF-8; this one is not")
    return TraceQuery(
        id=parsed.request.strip(),
        limit=MOST_SUMMARIES if watch else value_of("--limit", limit, parsed.limit),
        model=watch or parsed.model,
        errors=parsed.errors,
        slow=parsed.slow,
        longer_than=value_of("--over", parse_duration, parsed.over) if parsed.over else 0.0,
        watch=watch,
        watch_seconds=seconds if watch else 0.0,
        changes=parsed.changes,
    )


def _watched(text: str) -> str:
    if not text:
        return ""
    key, _, name = text.partition("=")
    if key != "model" or not name:
        raise ConfigError(f"--watch: {text!r} names no model; write --watch model=NAME")
    return name


# ---------------------------------------------------------------------- output


def _show(reply: TraceReply, query: TraceQuery, parsed: argparse.Namespace) -> int:
    _warn(reply, query)
    if query.id:
        return _show_one(reply, query.id, parsed)
    if parsed.json:
        print(json.dumps(reply_as_json(reply), indent=2))
    elif reply.summaries:
        print("\n".join(trace_list(reply.summaries, _width(), _now())))
    else:
        chosen = query.model or query.errors or query.slow or query.longer_than
        why = _WHY_NO_CHANGES if query.changes else _WHY_FEW
        print(f"No trace {'fits' if chosen else 'is kept yet'}.\n{why}")
    return exit_codes.OK


def _show_one(reply: TraceReply, wanted: str, parsed: argparse.Namespace) -> int:
    trace = reply.trace
    if trace is None:
        raise Unavailable(f"no trace of {printable(wanted)!r} is kept. {_WHY_FEW}")
    requests = {one.request_id for one in reply.summaries}
    if len(requests) > 1 and not is_id_of(reply.summaries[0], wanted):
        print(f"several requests begin with {printable(wanted)}:", file=sys.stderr)
        print("\n".join(trace_list(reply.summaries, _width(), _now())))
        return exit_codes.FAILED
    if parsed.json:
        print(json.dumps(trace_as_json(trace), indent=2))
        return exit_codes.OK
    print("\n".join(waterfall(trace, _width(), ascii_only=parsed.ascii or not _speaks_utf8())))
    older = [one.trace_id.hex() for one in reply.summaries if one.trace_id != trace.trace_id]
    if older:
        print(f"\nThis is the newest of {len(reply.summaries)}; older ones: {', '.join(older[:3])}")
    return exit_codes.OK


def _warn(reply: TraceReply, query: TraceQuery) -> None:
    """Names the nodes whose traces are missing. Errors: `Unavailable` if there is none."""
    for node, why in sorted(reply.silent.items()):
        print(printable(f"{node} did not answer: {why}"), file=sys.stderr)
    if not reply.frontends and query.changes:
        raise Unavailable("no planner and no worker answers: only they have traces of changes")
    if not reply.frontends:
        raise Unavailable("no frontend answers: only frontends have traces of requests")


def _width() -> int:
    if sys.stdout is None or not sys.stdout.isatty():
        return _WIDTH
    return max(MIN_WIDTH, min(shutil.get_terminal_size((_WIDTH, 24)).columns, MAX_WIDTH))


def _speaks_utf8() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


# ---------------------------------------------------------------------- watching


async def _watch(visitor: AdminClient, query: TraceQuery, *, as_json: bool) -> int:
    """Begin a watch everywhere and print what ends, until its time is over."""
    first = await visitor.traces(replace(query, limit=0))
    _warn(first, query)
    until = time.monotonic() + query.watch_seconds + _TAIL
    columns = (_ID, max(len("MODEL"), min(len(query.watch), _MODEL)))
    if not as_json:
        name = printable(query.watch)
        print(f"watching {name} for {query.watch_seconds:g} s; Ctrl-C ends it", file=sys.stderr)
        print(trace_list_head(columns), flush=True)
    try:
        following = _Following(visitor, query, first.numbers)
        async for summary in following.ended(until):
            line = json.dumps(summary_as_json(summary))
            if not as_json:
                line = cut(summary_line(summary, _now(), columns), _width())
            print(line, flush=True)
    except asyncio.CancelledError:
        with suppress(PdserveError):
            await visitor.traces(replace(query, watch_seconds=_AT_ONCE))
        raise
    if following.missed:
        print(
            f"up to {following.missed} traces were forgotten before they could be shown: each "
            f"frontend remembers {MOST_TRACES}",
            file=sys.stderr,
        )
    return exit_codes.OK


class _Following:
    """Asks again and again for the traces that came to be meanwhile."""

    def __init__(self, visitor: AdminClient, query: TraceQuery, numbers: dict[str, int]) -> None:
        """Args: `numbers` says which traces are old."""
        self._visitor = visitor
        self._query = replace(query, watch="", watch_seconds=0.0)
        self._seen = dict(numbers)
        self.missed = 0
        """Most traces that may have come and gone between two questions."""

    async def ended(self, until: Seconds) -> AsyncIterator[TraceSummary]:
        """The traces that come to be until a time."""
        pause = _PAUSE
        while time.monotonic() < until:
            await asyncio.sleep(pause)
            # Without any entry it would be no following; no frontend has an empty name.
            after = {"": 0, **self._seen}
            reply = await self._visitor.traces(replace(self._query, after=after))
            self._note(reply)
            for summary in reply.summaries:
                yield summary
            pause = _PAUSE if len(reply.summaries) < _HURRY else _PAUSE / 10

    def _note(self, reply: TraceReply) -> None:
        shown: defaultdict[str, list[int]] = defaultdict(list)
        for summary in reply.summaries:
            shown[summary.node].append(summary.number)
        for node, newest in reply.numbers.items():
            seen = self._seen.get(node, newest)
            if newest < seen:
                self._seen[node] = 0  # it has been restarted, and is asked for all of them
                continue
            self.missed += max(0, newest - seen - MOST_TRACES)
            # A reply that is not full has all that the frontend remembers.
            full = len(shown[node]) >= self._query.limit
            self._seen[node] = max(shown[node]) if full else newest
