"""Joins the replies of several frontends to one trace query. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.messages.trace import TraceReply
from pdserve.tracing.ring import MOST_SUMMARIES, is_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.messages.trace import TraceQuery, TraceSummary

__all__ = ["merge_trace_replies"]


def merge_trace_replies(query: TraceQuery, answers: Mapping[str, TraceReply | str]) -> TraceReply:
    """One reply from those of all frontends, by node; a text says why there is none."""
    replies = {node: one for node, one in answers.items() if isinstance(one, TraceReply)}
    summaries = _in_order(query, [one for r in replies.values() for one in r.summaries])
    trace = None
    if query.id and summaries:
        trace = replies[summaries[0].node].trace
    return TraceReply(
        summaries=tuple(summaries),
        trace=trace,
        silent={node: why for node, why in answers.items() if isinstance(why, str)},
        frontends=tuple(sorted(replies)),
        numbers={node: number for r in replies.values() for node, number in r.numbers.items()},
    )


def _in_order(query: TraceQuery, found: list[TraceSummary]) -> list[TraceSummary]:
    exact = [one for one in found if query.id and is_id_of(one, query.id)]
    ordered = sorted(exact or found, key=_ended)
    if query.after:
        # Nothing is cut off: who follows would take what is missing for seen.
        return ordered
    ordered.reverse()
    return ordered[: max(0, min(query.limit, MOST_SUMMARIES))]


def _ended(summary: TraceSummary) -> int:
    return summary.began + round(summary.duration * 1e9)
