"""Drives a core over the fake by hand: submits, steps, and keeps what comes."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from pdserve.clock import SystemClock
from pdserve.messages.engine import (
    Abort,
    CoreFailed,
    EngineSpec,
    KvEvents,
    Rejected,
    StepOutput,
    Submit,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve_engines.tensorrt_llm.core import TensorRtLlmCore
from pdserve_engines.tensorrt_llm.package import read_package
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, fake_modules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.clock import Clock
    from pdserve.messages.request import Finish, FirstTokenStats

LONG = 20.0
"""Seconds that no test reaches unless something hangs."""


class Driver:
    """A loaded core; leave it as a context manager."""

    def __init__(
        self,
        folder: Path,
        llm: type[FakeLlm] = FakeLlm,
        clock: Clock | None = None,
        kind: type[TensorRtLlmCore] = TensorRtLlmCore,
        **changes: Any,
    ) -> None:
        config = {"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 120}
        (folder / "config.json").write_text(json.dumps(config))
        self.core: Any = kind(clock or SystemClock(), lambda: read_package(fake_modules(llm)))
        self._woken = threading.Event()
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.finishes: dict[tuple[int, int], Finish] = {}
        self.starts: dict[tuple[int, int], FirstTokenStats] = {}
        self.errors: dict[int, Rejected] = {}
        self.kv_events: list[Any] = []
        self.failure: CoreFailed | None = None
        self.others: list[Any] = []
        """All other events."""
        self._handles = 0
        spec: dict[str, Any] = {
            "model": str(folder),
            "engine": "fake",
            "max_sequences": 8,
            "block_size": 8,
        }
        self.capabilities = self.core.load(EngineSpec(**(spec | changes)), lambda progress: None)
        self.core.wake = self._woken.set

    @property
    def llm(self) -> FakeLlm:
        llm: FakeLlm = self.core._llm
        return llm

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.core.close() == 0

    # ---------------------------------------------------------------- requests

    def request(self, **changes: Any) -> GenerateRequest:
        names = SamplingParams.__struct_fields__
        sampling = {name: changes.pop(name) for name in list(changes) if name in names}
        defaults = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        return GenerateRequest(
            request_id="r",
            model="m",
            prompt=changes.pop("prompt", [17, 42, 8]),
            sampling=SamplingParams(**(defaults | sampling)),
            **changes,
        )

    def submit(self, request: GenerateRequest) -> int:
        self._handles += 1
        self.core.handle(Submit(handle=self._handles, request=request))
        return self._handles

    def abort(self, handle: int) -> None:
        self.core.handle(Abort(handle=handle))

    def complete(self, **changes: Any) -> list[int]:
        """The tokens of a request's only choice; it must not fail."""
        handle = self.submit(self.request(**changes))
        self.until(lambda: (handle, 0) in self.finishes or handle in self.errors)
        assert handle not in self.errors, self.errors[handle]
        return self.tokens[handle, 0]

    def failed(self, handle: int) -> Rejected:
        self.until(lambda: handle in self.errors)
        return self.errors[handle]

    # ---------------------------------------------------------------- steps

    def until(self, met: Callable[[], bool]) -> None:
        """Step until it holds. Raises `AssertionError` if nothing happens any more."""
        while not met():
            if not self.core.has_work:
                assert self._woken.wait(LONG), "nothing happens"
            self._woken.clear()
            self.step()

    def step(self) -> None:
        for event in self.core.step():
            match event:
                case StepOutput(deltas=deltas):
                    for delta in deltas:
                        self._take(delta)
                case Rejected():
                    self.errors[event.handle] = event
                case KvEvents(events=events):
                    self.kv_events += events
                case CoreFailed():
                    self.failure = event
                case _:
                    self.others.append(event)

    def _take(self, delta: Any) -> None:
        key = delta.handle, delta.choice
        assert key not in self.finishes, "a delta after the end"
        assert delta.handle not in self.errors, "a delta after the error"
        self.tokens.setdefault(key, []).extend(delta.tokens)
        if delta.started is not None:
            assert key not in self.starts, "two first tokens"
            self.starts[key] = delta.started
        if delta.finish is not None:
            self.finishes[key] = delta.finish

    def in_loop(self, function: Callable[[], Any]) -> None:
        """Call something in the fake's thread, after what was handed to it before."""
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.core._loop.call_soon(call)
        assert done.wait(LONG)

    def hold(self) -> None:
        """Let the fake answer nothing until `go`."""
        self.in_loop(self.llm.gate.clear)

    def go(self) -> None:
        self.in_loop(self.llm.gate.set)

    def wait_for(self, met: Callable[[], bool]) -> None:
        """Wait until something holds in the fake's thread."""
        found: list[bool] = []
        for _ in range(100_000):
            self.in_loop(lambda: found.append(met()))
            if found[-1]:
                return
        raise AssertionError("it never happens")
