"""`POST /route`: what would be done with a request now, and why. Nothing is sent to a worker,
nothing counts against a key's limits, and nothing is booked.

It goes the request's own way up to the question to a router, so that what is explained is what
would happen. Owned by the service.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import DeadlineExceeded, InvalidRequest
from pdserve.frontend.generation import Route
from pdserve.frontend.prompts import plan_chat, plan_completion
from pdserve.frontend.replies import Reply
from pdserve.openai.decode import CHAT, COMPLETION
from pdserve.openai.responses import RouteCandidate, RouteExplanation

if TYPE_CHECKING:
    from pdserve.frontend.backend import Backend
    from pdserve.frontend.bodies import BodyReader
    from pdserve.frontend.call import Call
    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.generation import Generations
    from pdserve.frontend.plan import Plan
    from pdserve.ids import NodeId
    from pdserve.messages.routing import Candidate, Explained

__all__ = ["Explanations"]

_encode = msgspec.json.Encoder().encode
_CHAT = Route(CHAT, plan_chat)
_COMPLETION = Route(COMPLETION, plan_completion)


class _Kind(msgspec.Struct):
    """What tells one kind of body from the other."""

    messages: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decode_kind = msgspec.json.Decoder(_Kind).decode


class Explanations:
    """Asks routers why. Used on the event loop's thread."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        bodies: BodyReader,
        generations: Generations,
    ) -> None:
        self._config = config
        self._backend = backend
        self._bodies = bodies
        self._generations = generations

    async def route(self, call: Call) -> Reply:
        """`POST /route`"""
        body = await self._bodies.read(call.http)
        limit = self._config.request_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._explain(body, call)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took longer than {limit:g} s; it was being explained"
            ) from None

    async def _explain(self, body: bytes, call: Call) -> Reply:
        exchange = self._generations.exchange(call)
        plan = await self._generations.plan(_kind(body), body, exchange)
        if len(plan.requests) != 1:
            raise InvalidRequest("'/route' explains one prompt at a time", param="prompt")
        router, explained = await self._backend.explain(plan.requests[0], exchange.hints)
        answer = explanation(plan, router, explained)
        return Reply(200, _encode(answer), headers=call.headers)


def _kind(body: bytes) -> Route[Any]:
    """Chat or completion. Whatever else is wrong with the body is found by its decoder.

    Errors: `InvalidRequest`.
    """
    try:
        kind = _decode_kind(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _CHAT
    chat, completion = (bytes(part).strip() != b"null" for part in (kind.messages, kind.prompt))
    if chat == completion:
        raise InvalidRequest("give exactly one of 'prompt' and 'messages'", param="prompt")
    return _CHAT if chat else _COMPLETION


def explanation(plan: Plan, router: NodeId, explained: Explained) -> RouteExplanation:
    """As clients read it: tokens instead of blocks, milliseconds instead of seconds."""
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
    )


def _candidate(one: Candidate, block_size: int) -> RouteCandidate:
    return RouteCandidate(
        worker=one.worker,
        standing=one.standing,
        chosen=one.chosen,
        overlap_tokens=one.overlap_blocks * block_size,
        terms=one.terms,
    )
