"""Serves `POST /route`: explains where a request would be routed now, and why.

The request takes the normal path up to the router, but nothing is sent to a worker or booked.
It counts as a request of its API key, but its tokens do not count. Owned by the service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.request_kinds import CHAT_KIND, COMPLETION_KIND
from pdserve.frontend.http.http_response import HttpResponse
from pdserve.protocols.completion_responses import RouteCandidate, RouteExplanation, RouteSource

if TYPE_CHECKING:
    from pdserve.frontend.active_requests import ActiveRequest, ActiveRequests
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.frontend.generation import GenerationHandler, RequestKind
    from pdserve.frontend.http.body_reader import RequestBody
    from pdserve.frontend.http.http_request import HttpRequest
    from pdserve.frontend.plan import RequestPlan
    from pdserve.ids import NodeId
    from pdserve.messages.routing import Candidate, RoutingPreview
    from pdserve.messages.tiers import KvSource

__all__ = ["RouteExplainer"]

_encode = msgspec.json.Encoder().encode


class _Kind(msgspec.Struct):
    """How one kind of body is decoded and planned."""

    messages: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decode_kind = msgspec.json.Decoder(_Kind).decode


class RouteExplainer:
    """Asks routers for explanations. Used on the event loop's thread."""

    def __init__(
        self,
        backend: Backend,
        active_requests: ActiveRequests,
        generations: GenerationHandler,
    ) -> None:
        self._backend = backend
        self._active_requests = active_requests
        self._generations = generations

    async def route(self, call: HttpRequest) -> HttpResponse:
        """`POST /route`"""
        return await self._active_requests.run(call, self._explain)

    async def _explain(self, body: RequestBody, active: ActiveRequest) -> HttpResponse:
        images = self._generations.images.intake(active.call.key)
        try:
            kind = await body.look(_kind)
            plan = await self._generations.plan(kind, body, active, images)
            return await self._explained(plan, active)
        finally:
            images.release()

    async def _explained(self, plan: RequestPlan, active: ActiveRequest) -> HttpResponse:
        if len(plan.requests) != 1:
            raise InvalidRequest("'/route' explains one prompt at a time", param="prompt")
        active.stage = "waiting for a router's explanation"
        router, explained = await self._backend.explain(plan.requests[0], active.hints)
        answer = explanation(plan, router, explained)
        return HttpResponse(200, _encode(answer), headers=active.call.headers)


def _kind(body: bytes) -> RequestKind[Any]:
    """Chat or completion. The decoder finds all other errors in the body.

    Errors: `InvalidRequest`.
    """
    try:
        kind = _decode_kind(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return CHAT_KIND
    chat, completion = (bytes(part).strip() != b"null" for part in (kind.messages, kind.prompt))
    if chat == completion:
        raise InvalidRequest("give exactly one of 'prompt' and 'messages'", param="prompt")
    return CHAT_KIND if chat else COMPLETION_KIND


def explanation(plan: RequestPlan, router: NodeId, explained: RoutingPreview) -> RouteExplanation:
    """The explanation for clients: in tokens instead of blocks, milliseconds instead of seconds."""
    predicted = explained.predicted_ttft
    block_size = plan.model.card.block_size
    return RouteExplanation(
        model=plan.model_name,
        router=router,
        policy=explained.policy,
        worker=explained.worker,
        refusal=explained.refusal or None,
        held=explained.held,
        predicted_ttft_ms=None if predicted is None else round(1000 * predicted, 1),
        prompt_tokens=plan.prompt_tokens,
        candidates=[_candidate(one, block_size) for one in explained.candidates],
        kv_sources=[_source(one, block_size) for one in explained.kv_sources],
    )


def _candidate(one: Candidate, block_size: int) -> RouteCandidate:
    return RouteCandidate(
        worker=one.worker,
        standing=one.standing,
        chosen=one.chosen,
        overlap_tokens=one.overlap_blocks * block_size,
        terms=one.terms,
        reused_tokens={name: blocks * block_size for name, blocks in one.sources.items()},
    )


def _source(one: KvSource, block_size: int) -> RouteSource:
    return RouteSource(
        worker=one.node,
        tokens=one.blocks * block_size,
        device_tokens=one.device_blocks * block_size,
        kept=one.retain,
    )
