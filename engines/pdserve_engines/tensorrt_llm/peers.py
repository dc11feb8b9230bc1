"""The core that hands prompts over: prefill for a peer, and decode what a peer has prefilled.

TensorRT-LLM moves the KV by itself, so an attempt opens at once, holds no blocks here, and its
ticket only names it. When the handoff comes, the engine gets a generation-only request and fetches
the KV; until its first token, a failure is the attempt's and not the request's. The prefill
worker's engine keeps the blocks until they are fetched or its own deadline passes. Its interface
does not say when, so `PrefillSent` follows the prefill at once: pdserve holds nothing any more.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.kit import check_request
from pdserve.errors import Overloaded, PathLost, PdserveError, StepFailed, TransferRefused
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    OpenAttemptBlocks,
    PeerGone,
    Prefilled,
    PrefillForPeer,
    PrefillLocally,
    PrefillSent,
    Submit,
    SubmitRemote,
)
from pdserve.messages.engine_errors import rejected_event
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve_engines.tensorrt_llm.core import TensorRtLlmCore
from pdserve_engines.tensorrt_llm.handoff import (
    BACKEND,
    attempt_id,
    context_arguments,
    context_state,
    generation_arguments,
    make_ticket,
    read_state,
)
from pdserve_engines.tensorrt_llm.package import load_package

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.clock import Clock
    from pdserve.messages.engine import (
        Command,
        EngineCapabilities,
        EngineSpec,
        EngineStats,
        Event,
        LoadProgress,
    )
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve_engines.tensorrt_llm.choices import Choice
    from pdserve_engines.tensorrt_llm.package import Package

__all__ = ["PeerCore"]


@dataclass(slots=True)
class _Remote:
    """A request here whose prompt a peer prefills."""

    request: GenerateRequest
    attempt: int | None = None
    """The open attempt."""
    peer: tuple[str, int] = ("", 0)
    """Node and epoch that may fill it."""
    run: int = 0
    """The engine's run that has the handoff and has no token yet; 0: none."""


@dataclass(slots=True)
class _Prefill:
    """A prompt that is computed for a peer."""

    request: GenerateRequest
    id: int
    peer: tuple[str, int]


class PeerCore(TensorRtLlmCore):
    """A core that takes part in disaggregated prefill."""

    def __init__(self, clock: Clock, load: Callable[[], Package] = load_package) -> None:
        super().__init__(clock, load)
        self._life = secrets.randbits(62)
        self._remote: dict[int, _Remote] = {}
        """Requests that wait for a peer, or for the engine's first token after one."""
        self._adding: int | None = None
        """The handle that `add` shall keep for a peer."""
        self._prefills: dict[int, _Prefill] = {}
        self._runs = 0
        self._accepted: dict[int, int] = {}
        """Handle -> the run whose output is the request's: its KV has come."""
        self._told: deque[tuple[Choice, TokenDelta | PdserveError | None]] = deque()
        """What the loop's thread reports: output of runs with a peer's KV, failures, and prefilled
        choices. Which of them still counts is decided in the core's thread."""

    # ------------------------------------------------------------------ life

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Build `LLM` with its transceiver."""
        return replace(super().open(spec, progress), transfers=(BACKEND,))

    # ------------------------------------------------------------------ commands

    def handle(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case SubmitRemote():
                self._submit_remote(command)
            case OpenAttemptBlocks():
                self._open_attempt(command)
            case Activate():
                self._activate(command)
            case AbortAttempt():
                self._abort_attempt(command)
            case PrefillLocally():
                self._prefill_locally(command.handle)
            case PrefillForPeer():
                self._prefill(command)
            case Abort() if command.handle in self._prefills:
                self._withdraw(command.handle)
                self.on_freed(command.handle, "prefilling")
            case PeerGone():
                self._lose_peer((command.node, command.epoch))
            case _:
                super().handle(command)

    # ------------------------------------------------------------------ decode worker

    def _submit_remote(self, command: SubmitRemote) -> None:
        handle = command.handle
        self._adding = handle
        super().handle(Submit(handle=handle, request=command.request))
        self._adding = None
        if handle in self._remote:
            self._events.append(Admitted(handle=handle, cached_tokens=0))

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Compute a request, or keep it until a peer has prefilled it."""
        if handle == self._adding:
            self._check(request)
            self._remote[handle] = _Remote(request)
        else:
            super().add(handle, request)

    def drop(self, handle: int) -> None:
        """Forget a request, wherever it is."""
        self._remote.pop(handle, None)
        self._accepted.pop(handle, None)
        super().drop(handle)

    def _open_attempt(self, command: OpenAttemptBlocks) -> None:
        remote = self._remote.get(command.handle)
        if remote is None:
            return
        self._stop_fetching(command.handle, remote)
        if len(remote.request.live) > 1:
            error = TransferRefused("TensorRT-LLM hands over one choice; the request has several")
            self._lose(command.handle, command.attempt, error)
            return
        remote.attempt, remote.peer = command.attempt, (command.node, command.epoch)
        tokens = len(remote.request.prompt) + len(remote.request.given)
        ticket = make_ticket(command.handle, command.attempt, self._life, command.epoch, tokens)
        self._events.append(
            AttemptBlocksOpened(handle=command.handle, attempt=command.attempt, ticket=ticket)
        )

    def _activate(self, command: Activate) -> None:
        handle, handoff = command.handle, command.handoff
        remote = self._remote.get(handle)
        if remote is None or remote.attempt != command.attempt or remote.run:
            return
        try:
            state = read_state(handoff.opaque)
            if len(handoff.first) != 1:
                raise TransferRefused(f"the handoff has {len(handoff.first)} first tokens")
            arguments = generation_arguments(state, self._package.disaggregated_fields)
        except PdserveError as error:
            remote.attempt = None
            self._lose(handle, command.attempt, error)
            return
        self._runs += 1
        remote.run = self._runs
        self._begin(
            handle,
            remote.request,
            arguments,
            run=remote.run,
            received=handoff.tokens,
            first=handoff.first[0],
        )

    def _abort_attempt(self, command: AbortAttempt) -> None:
        remote = self._remote.get(command.handle)
        if remote is not None and remote.attempt == command.attempt:
            self._stop_fetching(command.handle, remote)

    def _stop_fetching(self, handle: int, remote: _Remote) -> None:
        if remote.run:
            super().drop(handle)
        remote.attempt, remote.run = None, 0

    def _prefill_locally(self, handle: int) -> None:
        remote = self._remote.pop(handle, None)
        if remote is not None:
            self._stop_fetching(handle, remote)
            self._begin(handle, remote.request)

    def _lose(self, handle: int, attempt: int, error: PdserveError) -> None:
        event = AttemptLost(
            handle=handle, attempt=attempt, kind=type(error).__name__, message=error.message
        )
        self._events.append(event)

    # ------------------------------------------------------------------ prefill worker

    def _prefill(self, command: PrefillForPeer) -> None:
        handle, request = command.handle, command.request
        try:
            limits = self._capabilities
            check_request(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
            if len(request.live) > 1:
                raise TransferRefused("TensorRT-LLM hands over one choice at a time")
            if len(self._prefills) >= self._limit:
                raise Overloaded(f"{len(self._prefills)} prompts are prefilled", retry_after=1.0)
            number = attempt_id(command.ticket)
            self._check(request)
        except PdserveError as error:
            self._events.append(rejected_event(handle, error))
            return
        self._prefills[handle] = _Prefill(request, number, (command.node, command.epoch))
        arguments = context_arguments(number, self._package.disaggregated_fields)
        self._begin(handle, request, arguments, for_peer=True)

    def _withdraw(self, handle: int, error: PdserveError | None = None) -> None:
        del self._prefills[handle]
        super().drop(handle)
        kind, message = ("", "") if error is None else (type(error).__name__, error.message)
        self._events.append(PrefillSent(handle=handle, kind=kind, message=message))

    def _handed_over(self, choice: Choice) -> Event | None:
        prefill = self._prefills.get(choice.handle)
        if prefill is None:
            return None
        if not choice.chunk:
            error = StepFailed("TensorRT-LLM has ended a prompt without its first token")
            return rejected_event(choice.handle, error)
        delta = choice.chunk[0]
        token, logprobs = delta.tokens[0], delta.logprobs
        params = choice.result.outputs[0].disaggregated_params
        assert delta.started is not None
        handoff = Handoff(
            tokens=len(prefill.request.prompt) + len(prefill.request.given),
            parts=0,
            first=(FirstToken(token, logprobs[0] if logprobs else None),),
            cached_tokens=delta.started.cached_tokens,
            started=delta.started,
            opaque=context_state(prefill.id, token, params),
        )
        return Prefilled(handle=choice.handle, handoff=handoff)

    # ------------------------------------------------------------------ both

    def _lose_peer(self, peer: tuple[str, int]) -> None:
        """A node's life is over."""
        error = PathLost(f"node {peer[0]} is gone")
        for handle, remote in list(self._remote.items()):
            if remote.peer == peer and (attempt := remote.attempt) is not None:
                self._stop_fetching(handle, remote)
                self._lose(handle, attempt, error)
        for handle, prefill in list(self._prefills.items()):
            if prefill.peer == peer:
                self._withdraw(handle, error)

    @property
    def busy(self) -> bool:
        """There is something that the loop's thread has told, or KV events."""
        return bool(self._told) or super().busy

    def advance(self, now: float) -> None:
        """Take in what the loop's thread has told."""
        while self._told:
            choice, said = self._told.popleft()
            if said is None:
                self._note_prefilled(choice)
            elif isinstance(said, PdserveError):
                self._note_failure(choice, said)
            else:
                self._note_output(choice, said)
        super().advance(now)

    def _note_output(self, choice: Choice, delta: TokenDelta) -> None:
        """Take output of a run, unless it was given up before its first token."""
        handle, remote = choice.handle, self._remote.get(choice.handle)
        if remote is not None and remote.run == choice.run:
            del self._remote[handle]
            self._accepted[handle] = choice.run
        if self._accepted.get(handle) == choice.run:
            self.deltas.append(delta)
            if delta.finish is not None:
                del self._accepted[handle]

    def _note_prefilled(self, choice: Choice) -> None:
        event = self._handed_over(choice)
        if event is not None:
            del self._prefills[choice.handle]
            self._events.append(event)
            if isinstance(event, Prefilled):
                self._events.append(PrefillSent(handle=choice.handle))

    def _note_failure(self, choice: Choice, error: PdserveError) -> None:
        handle, remote = choice.handle, self._remote.get(choice.handle)
        if handle in self._prefills:
            del self._prefills[handle]
            self._events.append(rejected_event(handle, error))
        elif not choice.run or self._accepted.pop(handle, None) == choice.run:
            self.reject(handle, error)
        elif remote is not None and remote.run == choice.run and remote.attempt is not None:
            attempt, remote.attempt, remote.run = remote.attempt, None, 0
            self._lose(handle, attempt, error)

    # ------------------------------------------------------------------ in the loop's thread

    def _report_delta(self, choice: Choice, delta: TokenDelta) -> None:
        if choice.run:
            self._tell(choice, delta)
        else:
            super()._report_delta(choice, delta)

    def _report_error(self, choice: Choice, error: PdserveError) -> None:
        self._tell(choice, error)

    def _report_prefilled(self, choice: Choice) -> None:
        self._tell(choice, None)

    def _tell(self, choice: Choice, said: TokenDelta | PdserveError | None) -> None:
        self._told.append((choice, said))
        self.wake()

    def stats(self) -> EngineStats:
        """With the requests that wait for a peer."""
        return replace(super().stats(), remote=len(self._remote), sending=len(self._prefills))
