"""Logs one wide line for each finished request: what it was, where it ran, where its time went.

The line answers most questions about one request without any trace. It never has text of a prompt
or an answer. Times are milliseconds. Owned by the API; without `--log-requests` there is none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import RequestError
from pdserve.observe.metrics import outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frontend.active_requests import ActiveRequest
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.frontend.output.response_builder import ResponseBuilder
    from pdserve.ids import Seconds

__all__ = ["RequestLog", "request_fields"]

_log = logging.getLogger("pdserve.requests")

_LONGEST_ERROR: Final = 200
_SERVED: Final = (
    *(
        "worker",
        "router",
        "policy",
        "attempts",
        "migrations",
        "overlap_tokens",
        "cached",
        "prefill",
    ),
    *("held_ms", "queue_ms", "prefill_ms", "predicted_ttft_ms", "ttft_ms"),
)
"""Fields of `Served` that the line has."""


class RequestLog:
    """Writes the lines of one frontend."""

    def __init__(self, time: Callable[[], Seconds]) -> None:
        self._time = time

    def begin(self, call: HttpRequest) -> None:
        """A request has arrived."""
        call.began = self._time()

    def end(self, call: HttpRequest, status: int) -> None:
        """A request was answered with this status; 499: it was not."""
        total = _ms(self._time() - call.began)
        method, route = call.http.method, call.route
        fields = {"method": method, "route": route, "status": status, "total_ms": total}
        if call.key is not None:
            fields["tenant"] = call.key.tenant
        fields |= call.log_fields or {}
        _log.info("%s %s: %d in %g ms", method, route, status, total, extra=fields)


def request_fields(active: ActiveRequest) -> dict[str, Any]:
    """What has come of a request with a body, as fields of its line. Unknown ones are absent."""
    answer, error, phases = active.answer, active.error, active.call.phases
    found: dict[str, Any] = {"model": active.model or None, "outcome": outcome_of(error)}
    if error is not None:
        found["error"] = type(error).__name__
        # The words of a client's mistake may quote the client.
        if isinstance(error, RequestError):
            found["param"] = error.param
        else:
            found["reason"] = str(error)[:_LONGEST_ERROR]
    if phases is not None:
        found["body_ms"] = _between(active.arrival, phases.body_read or None)
        found["tokenize_ms"] = _between(phases.planning or None, phases.planned or None)
    if answer is not None:
        found |= _answered(answer)
    return {name: value for name, value in found.items() if value is not None}


def _answered(answer: ResponseBuilder) -> dict[str, Any]:
    plan, served, first = answer.plan, answer.served(), answer.first_token
    reasons = dict.fromkeys(one.finish_reason for one in answer.choices if one.finish_reason)
    ends = [choice.last for choice in answer.choices if choice.last is not None]
    moved = sum(sink.moved for sink in answer.sinks)
    found: dict[str, Any] = {
        "stream": plan.stream,
        "prompts": len(plan.prompts) if len(plan.prompts) > 1 else None,
        "choices": plan.n if plan.n > 1 else None,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": None if served is None else served.cached_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish": ",".join(reasons) or None,
        "decode_ms": _between(first, max(ends, default=None)),
        "moved_ms": _ms(moved) if moved else None,
    }
    if served is not None:
        found |= {name: getattr(served, name) for name in _SERVED}
    return found


def _between(start: Seconds | None, end: Seconds | None) -> float | None:
    return None if start is None or end is None else _ms(end - start)


def _ms(seconds: Seconds) -> float:
    return round(1000 * seconds, 2)
