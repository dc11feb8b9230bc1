"""An engine that computes in a thread of its own, as bindings of other engines do.

It counts upwards from the prompt's last token.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock
from pdserve.engine_core.kit import (
    ChoiceOutput,
    SelfSchedulingCore,
    capabilities_without_kv,
    read_model_limits,
)
from pdserve.messages.engine import LoadProgress
from pdserve.messages.request import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.messages.engine import EngineCapabilities, EngineSpec
    from pdserve.messages.request import GenerateRequest

ENGINE = "tests.conformance.threaded_engine:create"


def create() -> ThreadedCore:
    return ThreadedCore(SystemClock())


class ThreadedCore(SelfSchedulingCore):
    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._inbox: queue.SimpleQueue[list[ChoiceOutput] | None] = queue.SimpleQueue()
        self._dropped: set[int] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        progress(LoadProgress(stage="starting a thread"))
        self._limits = read_model_limits(spec)
        self._thread.start()
        return capabilities_without_kv(spec, self._limits)

    def add(self, handle: int, request: GenerateRequest) -> None:
        now, limit = self.clock.now(), self._limits.max_model_len
        self._inbox.put([ChoiceOutput(handle, c, request, now, limit) for c in request.live])

    def drop(self, handle: int) -> None:
        self._dropped.add(handle)

    def shutdown(self) -> int:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        return 0

    def _run(self) -> None:
        while (choices := self._inbox.get()) is not None:
            for choice in choices:
                self._complete(choice)

    def _complete(self, choice: ChoiceOutput) -> None:
        delta = choice.begin(self.clock.now())
        request = choice.request
        while delta is None or delta.finish is None:
            if choice.handle in self._dropped:
                return
            if delta is not None:
                self.post(delta)
            token = (request.prompt[-1] + len(choice.tokens)) % self._limits.vocab_size
            top = request.sampling.logprobs
            logprob = None if top is None else TokenLogprob(token, 0.0, 1, [(token, 0.0)] * top)
            delta = choice.take(token, self.clock.now(), logprob=logprob)
        self.post(delta)
