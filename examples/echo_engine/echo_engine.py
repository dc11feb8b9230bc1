"""An engine that answers with its prompt: `pdserve --engine echo`.

Output token k of every choice is token k of the prompt, over and over. A step gives one token to
every choice that runs; more than `--max-num-seqs` choices wait. It shows all that an engine with a
scheduler of its own needs; docs/engines.md explains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine_core.kit import (
    ChoiceOutput,
    RequestQueue,
    SelfSchedulingCore,
    capabilities_without_kv,
    check_options,
    read_model_limits,
)
from pdserve.messages.engine import LoadProgress
from pdserve.messages.request import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineCapabilities, EngineSpec
    from pdserve.messages.request import GenerateRequest


def create() -> EchoCore:
    """The factory behind the entry point; it must be cheap, loading happens in `open`."""
    return EchoCore(SystemClock())


class EchoCore(SelfSchedulingCore):
    """Echoes prompts, at most `max_sequences` choices at a time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._submitted: dict[int, Seconds] = {}
        self._running: dict[int, list[ChoiceOutput]] = {}

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Read the limits of the model; an engine with weights loads them here."""
        progress(LoadProgress(stage="reading config.json"))
        check_options("echo", spec.options, [])
        self._limits = read_model_limits(spec)
        self._max_sequences = spec.max_sequences
        self._queue = RequestQueue(spec.max_waiting)
        return capabilities_without_kv(spec, self._limits)

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Queue the request; a full queue rejects it."""
        self._queue.push(handle, request)
        self._submitted[handle] = self.clock.now()

    def drop(self, handle: int) -> None:
        """Forget a request that waits or runs."""
        self._submitted.pop(handle, None)
        if not self._queue.discard(handle):
            self._running.pop(handle, None)

    @property
    def busy(self) -> bool:
        """Something runs or may begin."""
        return bool(self._running or self._queue)

    @property
    def waiting(self) -> int:
        """Choices in the queue."""
        return self._queue.choices

    def advance(self, now: Seconds) -> None:
        """Begin what fits, then give one token to every choice that runs."""
        while self._queue and sum(map(len, self._running.values())) < self._max_sequences:
            self._begin(*self._queue.pop(), now)
        for handle, choices in list(self._running.items()):
            for choice in list(choices):
                token = _next_token(choice)
                delta = choice.take(token, now, logprob=_logprob(choice.request, token))
                self.deltas.append(delta)
                if delta.finish is not None:
                    choices.remove(choice)
            self._forget_if_ended(handle)

    def _begin(self, handle: int, request: GenerateRequest, now: Seconds) -> None:
        choices = self._running[handle] = []
        for number in request.live:
            choice = ChoiceOutput(
                handle, number, request, self._submitted[handle], self._limits.max_model_len
            )
            ended = choice.begin(now)
            if ended is None:
                choices.append(choice)
            else:
                self.deltas.append(ended)
        self._forget_if_ended(handle)

    def _forget_if_ended(self, handle: int) -> None:
        if not self._running[handle]:
            del self._running[handle], self._submitted[handle]


def _next_token(choice: ChoiceOutput) -> TokenId:
    prompt = choice.request.prompt
    return prompt[len(choice.tokens) % len(prompt)]


def _logprob(request: GenerateRequest, token: TokenId) -> TokenLogprob | None:
    """The token is certain; the alternatives asked for are the ids after it, all but impossible."""
    top = request.sampling.logprobs
    if top is None:
        return None
    others = [(token + i, -99.0) for i in range(1, top)]
    return TokenLogprob(token, 0.0, 1, [(token, 0.0), *others][:top])
