"""Traces HTTP requests: begins their records, decides at the end, and describes the root span.

Only requests that generate, embed or score have a record. A trace is built after the answer, and
only if it is kept. Names of attributes are those of OpenTelemetry's conventions for HTTP servers
and for generative AI, written out here because the latter still change. Text of prompts and
answers is in a trace only if the operator and the request's API key allow it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.edge.hosts import host_name
from pdserve.frontend.placement import TRACE_ID_HEADER, cached_tokens
from pdserve.frontend.request_metrics import request_itl
from pdserve.observe import logs
from pdserve.tracing.keep import RequestFacts
from pdserve.tracing.tree import MAX_ATTRIBUTE, TraceRoot

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frontend.active_requests import ActiveRequest
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.frontend.output.response_builder import ResponseBuilder
    from pdserve.frontend.plan import RequestPlan
    from pdserve.ids import Seconds
    from pdserve.messages.trace import AttributeValue
    from pdserve.observe.slo import Objectives, SloTable
    from pdserve.tracing.phases import RequestPhases
    from pdserve.tracing.tracer import Tracer

__all__ = ["RequestTraces"]

_log = logging.getLogger(__name__)

_PROVIDER: Final = "pdserve"
_MOST_TEXT: Final = 4096
"""Most characters of a prompt or an answer."""
_MOST_TOKENS: Final = 1024
"""Most tokens that are made text for it: they take the event loop's time."""
_SAY_EVERY: Final = 60.0
"""Seconds between two lines about traces that cannot be made."""
_MOST_TEXTS: Final = 4
"""Most prompts and answers whose text is in a trace."""

_PORT_DIGITS: Final = 5

Attributes = dict[str, "AttributeValue"]


class RequestTraces:
    """Traces the requests of one frontend."""

    def __init__(
        self,
        tracer: Tracer,
        slos: SloTable,
        later: Callable[[Callable[[], None]], object],
        *,
        content: bool = False,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`slos` has the models' objectives; `later` runs a callback in a later turn of the event
        loop. `content`: traces may have text. `on_lost` is called for each trace that a defect has
        cost."""
        self.tracer = tracer
        self._content = content
        self._slos = slos
        self._objectives: dict[str, Objectives] = {}
        self._later = later
        self._on_lost = on_lost
        self._say_at: Seconds = 0.0
        """No defect is logged before this time."""

    def begin(self, call: HttpRequest) -> None:
        """Begins the record of a request that has arrived."""
        headers = call.http.headers
        parent = headers.get("traceparent")
        if parent is not None and len(headers.getall("traceparent")) > 1:
            parent = None  # nobody knows which is right
        state = None if parent is None else ",".join(headers.getall("tracestate", ()))
        call.phases = phases = self.tracer.begin(parent, state)
        if phases is not None and phases.trace_id:
            trace_id = phases.trace_id.hex()
            call.trace_line = b"%s: %s\r\n" % (TRACE_ID_HEADER, trace_id.encode())
            # Each task has a context of its own, so this needs no reset.
            logs.trace_ids.set((trace_id, phases.root_id.to_bytes(8, "big").hex()))

    def note(self, phases: RequestPhases, active: ActiveRequest) -> None:
        """Notes how an admitted request ended."""
        if active.error is not None:
            phases.fail(active.error)
        phases.owner = active

    def end(self, call: HttpRequest, status: int) -> None:
        """Ends the record of a request that was answered with this status; 499: it was not. It does
        not raise: a defect in what watches requests must not cost an answer."""
        phases, call.phases = call.phases, None
        if phases is None:
            return
        active, phases.owner = phases.owner, None
        try:
            root = self._root(call, status, phases, active)
        except Exception:
            self._lose()
            return
        finally:
            if active is not None:
                active.release()
        if root is not None:
            self._later(lambda: self._emit(phases, root))

    def _root(
        self, call: HttpRequest, status: int, phases: RequestPhases, active: ActiveRequest | None
    ) -> TraceRoot | None:
        """The root of the request's trace; None: it is not kept."""
        now = phases.time()
        failed = status >= 500 or (status == 200 and phases.error_type not in ("", "Cancelled"))
        answer = None if active is None else active.answer
        model = "" if active is None else active.model
        objectives = self._objectives.get(model)
        if objectives is None:
            # There are as many entries as served models.
            objectives = self._objectives[model] = self._slos.of(model)
        facts = request_facts(phases, answer, objectives, failed=failed)
        if not self.tracer.end(phases, facts, model):
            return None
        if answer is not None:
            _copy_times(phases, answer)
        attributes = root_attributes(call, status, phases, active)
        if active is not None and active.plan is not None and self._may_tell(call):
            attributes |= content_attributes(active.plan, answer)
        return TraceRoot(
            end=now,
            request_id=call.request_id,
            model=model,
            name=f"{call.http.method} {call.route}",
            attributes=attributes,
            error=phases.error if failed else "",
        )

    def _emit(self, phases: RequestPhases, root: TraceRoot) -> None:
        try:
            self.tracer.emit(phases, root)
        except Exception:
            self._lose()

    def _lose(self) -> None:
        """Counts a trace that is lost by the exception under way, and logs it once a minute."""
        self._on_lost()
        now = self.tracer.time()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            _log.exception("the trace of a request could not be made")

    def _may_tell(self, call: HttpRequest) -> bool:
        """Whether the trace of this request may have its text."""
        return self._content and (call.key is None or call.key.trace_content)


def request_facts(
    phases: RequestPhases,
    answer: ResponseBuilder | None,
    objectives: Objectives,
    *,
    failed: bool,
) -> RequestFacts:
    """What decides whether the trace is kept. A client's own limit for its first token does not:
    it is for routing."""
    moves = preemptions = attempts = 0
    prefill_failed = False
    for prompt in phases.prompts:
        attempts = max(attempts, len(prompt.attempts))
        moves += len(prompt.moves)
        preemptions += prompt.preemptions
        prefill_failed = prefill_failed or prompt.prefill_failed
    return RequestFacts(
        failed=failed,
        ttft=_ttft(answer),
        itl=None if answer is None or objectives.itl is None else request_itl(answer),
        slo_ttft=objectives.ttft,
        slo_itl=objectives.itl,
        moves=moves,
        preemptions=preemptions,
        attempts=attempts,
        prefill_failed=prefill_failed,
    )


def _ttft(answer: ResponseBuilder | None) -> Seconds | None:
    if answer is None or answer.first_token is None:
        return None
    return answer.first_token - answer.arrival


def _copy_times(phases: RequestPhases, answer: ResponseBuilder) -> None:
    phases.first_token = answer.first_token or 0.0
    phases.stop_string = answer.stop_string or 0.0
    phases.client_slow = answer.client_slow or 0.0


def root_attributes(
    call: HttpRequest, status: int, phases: RequestPhases, active: ActiveRequest | None
) -> Attributes:
    """Attributes of the root span."""
    http = call.http
    found: Attributes = {
        "http.request.method": http.method,
        "http.route": call.route,
        "url.path": http.rel_url.path[:MAX_ATTRIBUTE],
        "http.response.status_code": status,
    }
    if host := http.headers.get("Host"):
        found |= _server(host)
    if phases.error_type:
        found["error.type"] = phases.error_type
    if call.key is not None:
        found["pdserve.tenant"] = call.key.tenant[:MAX_ATTRIBUTE]
    if active is not None and active.plan is not None:
        found |= _asked(active.plan)
        if active.answer is not None:
            found |= _answered(active.plan, active.answer, phases)
    return found


def _server(host: str) -> Attributes:
    """The server by the name and port that the client's `Host` header gives it."""
    found: Attributes = {"server.address": host_name(host)[:MAX_ATTRIBUTE]}
    port = host.rpartition("]")[2].partition(":")[2]
    if port.isascii() and port.isdecimal() and len(port) <= _PORT_DIGITS:
        found["server.port"] = int(port)
    return found


def _asked(plan: RequestPlan) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": _operation(plan),
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": plan.model_name[:MAX_ATTRIBUTE],
    }
    if plan.vectors is not None:
        return found
    found["gen_ai.request.stream"] = plan.stream
    sampling = plan.requests[0].sampling
    found["gen_ai.request.max_tokens"] = sampling.max_tokens
    found["gen_ai.request.temperature"] = sampling.temperature
    found["gen_ai.request.seed"] = sampling.seed
    optional: dict[str, tuple[AttributeValue, AttributeValue]] = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, 0),
        "frequency_penalty": (sampling.frequency_penalty, 0.0),
        "presence_penalty": (sampling.presence_penalty, 0.0),
        "choice.count": (plan.n, 1),
    }
    for name, (value, usual) in optional.items():
        if value != usual:
            found[f"gen_ai.request.{name}"] = value
    return found


def _operation(plan: RequestPlan) -> str:
    if plan.scores is not None:
        return "score"
    if plan.vectors is not None:
        return "embeddings"
    return "chat" if plan.chat else "text_completion"


def _answered(plan: RequestPlan, answer: ResponseBuilder, phases: RequestPhases) -> Attributes:
    found: Attributes = {
        "gen_ai.response.id": plan.answer_id,
        "gen_ai.response.model": plan.model.card.name[:MAX_ATTRIBUTE],
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": answer.completion_tokens,
    }
    cached = cached_tokens([sink.course for sink in answer.sinks])
    if cached is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = cached
    if plan.reasons:
        thought = sum(choice.reasoning_tokens for choice in answer.choices)
        found["gen_ai.usage.reasoning.output_tokens"] = thought
    if answer.first_token is not None:
        first = answer.first_token - phases.arrival
        found["gen_ai.response.time_to_first_chunk"] = first
    reasons = dict.fromkeys(c.finish_reason for c in answer.choices if c.done and c.finish_reason)
    if reasons:
        found["gen_ai.response.finish_reasons"] = tuple(reasons)
    return found


def content_attributes(plan: RequestPlan, answer: ResponseBuilder | None) -> Attributes:
    """The first prompts as the model saw them, and their first answers as it wrote them."""
    decode = plan.model.tokenizer.decode
    prompts = [
        decode(prompt.tokens[:_MOST_TOKENS])[:_MOST_TEXT] for prompt in plan.prompts[:_MOST_TEXTS]
    ]
    found: Attributes = {"pdserve.content.prompt": tuple(prompts)}
    if answer is not None and plan.vectors is None:
        outputs = [sink.output(0)[:_MOST_TOKENS] for sink in answer.sinks[:_MOST_TEXTS]]
        found["pdserve.content.output"] = tuple(decode(each)[:_MOST_TEXT] for each in outputs)
    return found
