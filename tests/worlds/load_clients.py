"""The clients of one frontend, and an account of each request.

A client is to the backend what the frontend's HTTP side is: it opens a request with a sink, may
cancel it before or after, and must get exactly one end. Each token is checked as it comes: the
tokens are those of the engine, in order, none twice, none missing, whichever workers computed them.
`oracle.outcomes` judges the end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.frontend.routing_hints import NO_HINTS
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.output_checker import OutputChecker
from pdserve.testing.scripted import reference_tokens
from pdserve.token_ids import token_ids
from tests.worlds.faulty_engine import POISON_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.frontend.dispatch.backend import RequestHandle
    from pdserve.frontend.placement import Placement
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.request import TokenDelta
    from pdserve.tracing.phases import PromptPhases, RequestPhases
    from tests.worlds.roles import Frontend

__all__ = [
    "DEFAULT_PROFILE",
    "LONG_PROMPTS",
    "ClientProfile",
    "LoadClients",
    "TrackedRequest",
    "draw_request",
]

_MAX_LEN = 200
_GRACE: Final[Seconds] = 1.0
"""Time after a deadline in which the frontend ends the request itself, if no other process has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProfile:
    """What clients ask, and how patient they are."""

    lengths: tuple[int, ...] = (1, 7, 8, 9, 30, 60)
    """Lengths of the prompts."""
    answers: tuple[int, ...] = (1, 2, 10, 40, 90)
    """Their greatest lengths."""
    choices: tuple[int, ...] = (1, 1, 1, 2, 3)
    alike: float = 0.0
    """Share of prompts that begin as others do,"""
    beginnings: int = 1
    """in so many ways."""
    hurried: float = 0.1
    """Share of requests with a deadline,"""
    deadlines: tuple[Seconds, Seconds] = (0.5, 5.0)
    """between these."""
    fickle: float = 0.15
    """Share of clients that turn away, each at some time before one of these."""
    patience: tuple[Seconds, ...] = (0.0, 0.01, 0.2, 1.0)
    scored: float = 0.05
    """Share of requests that want logprobs; as many want those of their prompt."""
    enough: float = 0.1
    """Share of requests that the frontend ends itself, where text says so: a stop string."""
    poison: float = 0.0
    """Share of requests that break every engine that computes them."""


DEFAULT_PROFILE: Final = ClientProfile()

LONG_PROMPTS: Final = ClientProfile(
    lengths=(9, 30, 60, 100, 150),
    answers=(1, 2, 10, 40),
    alike=0.4,
    hurried=0.3,
    deadlines=(0.1, 4.0),
    fickle=0.3,
    patience=(0.2, 1.0, 3.0),
)
"""Much to hand over, and much that ends on its way."""


def draw_request(
    random: Random, name: str, model: str, habits: ClientProfile = DEFAULT_PROFILE
) -> GenerateRequest:
    """Small: what matters is its way, not its size."""
    length = random.choice(habits.lengths)
    prompt = [random.randrange(3, 97) for _ in range(length)]
    if habits.alike and random.random() < habits.alike:
        stem = random.choice((16, 40, 80))
        which = random.randrange(habits.beginnings) if habits.beginnings > 1 else 0
        prompt[:stem] = [3 + (7 * i + stem + 5 * which) % 94 for i in range(min(stem, length))]
    sampling = SamplingParams(
        max_tokens=random.choice(habits.answers),
        temperature=random.choice((0.0, 1.0)),
        ignore_eos=random.random() < 0.7,
        eos_token_ids=(2,),
        seed=random.getrandbits(63),
        logprobs=random.choice((0, 2)) if random.random() < habits.scored else None,
        prompt_logprobs=1 if random.random() < habits.scored else None,
    )
    deadline = random.uniform(*habits.deadlines) if random.random() < habits.hurried else None
    return GenerateRequest(
        request_id=name,
        model=model,
        prompt=token_ids(prompt),
        sampling=sampling,
        n=random.choice(habits.choices),
        deadline=deadline,
    )


def poisoned(request: GenerateRequest, random: Random) -> GenerateRequest:
    """The same, with a token somewhere in its prompt that no engine survives."""
    prompt = list(request.prompt)
    prompt[random.randrange(len(prompt))] = random.choice(POISON_TOKENS)
    return replace(request, prompt=prompt)


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker is asked to take a request."""

    worker: NodeId
    tokens: int
    """Received before."""
    at: Seconds


class TrackedRequest:
    """One request, from the call to its one end; the backend's sink."""

    def __init__(
        self,
        name: str,
        request: GenerateRequest,
        began: Seconds,
        complain: Callable[[str], None],
        *,
        enough: int | None = None,
    ) -> None:
        """`enough`: after so many tokens of a choice the frontend wants no more of it."""
        self.name = name
        self.request = request
        self.began = began
        self.enough = enough
        self.poison = not set(POISON_TOKENS).isdisjoint(request.prompt)
        self.outcome = ""
        """How it ended, in a word or two; empty while it has not."""
        self.error: PdserveError | None = None
        """With which it ended."""
        self.placed: list[Placed] = []
        """Placements of the request, in order."""
        self.overdue = False
        """True if only the frontend ended it when its deadline had passed."""
        self.left_at = ""
        """Where it was when its client turned away."""
        self.stage = "opening"
        self.stream: RequestHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        """The end of its patience."""
        self.alarm: asyncio.TimerHandle | None = None
        """The timer with which the frontend ends it."""
        self.on_end: Callable[[TrackedRequest], None] = lambda account: None
        self.first_token: Seconds | None = None
        """When its first token came."""
        self.frontend: Frontend | None = None
        """The frontend that serves it."""
        self.phases: RequestPhases | None = None
        """What that frontend records of it; None: nothing."""
        self.prompt: PromptPhases | None = None
        """The part of its prompt."""
        self._ledger = OutputChecker(request)
        self._complain = complain

    @property
    def tokens(self) -> int:
        """Received."""
        return sum(map(len, self._ledger.tokens))

    @property
    def steps(self) -> int:
        """About the number of steps of an otherwise idle engine: its prompt, then token by
        token."""
        choices = range(self.request.n)
        longest = max(len(reference_tokens(self.request, n, max_len=_MAX_LEN)) for n in choices)
        return 2 + longest

    def end(self, outcome: str) -> None:
        """Notes the request's end; a second end is a violation."""
        if self.outcome:
            self._complain(f"{self.name} ended twice: {self.outcome}, then {outcome}")
            return
        self.outcome = outcome
        for timer in (self.timer, self.alarm):
            if timer is not None:
                timer.cancel()
        self._check(complete=outcome == "completed" and self.enough is None)
        self.on_end(self)

    @property
    def accepted(self) -> bool:
        """A worker has taken it, as far as the frontend knows."""
        return self.stage in ("opened", "streaming")

    def on_delta(self, delta: TokenDelta) -> None:
        """See `engine.port.TokenSink`."""
        if self._has_enough and self.stream is None:
            return  # it was over before it was known to be open
        if self.outcome:
            self._complain(f"{self.name} hears of tokens after its end: {self.outcome}")
            return
        self.stage = "streaming"
        if self.first_token is None and self.frontend is not None:
            self.first_token = self.frontend.node.now()
        try:
            self._ledger.take(self._continued(delta))
        except AssertionError as error:
            self._complain(f"{self.name}: {error}")
        if self._ledger.done or self._has_enough:
            self.end("completed")
            if self.stream is not None and not self._ledger.done:
                self.stream.cancel()
        elif self.stream is not None and delta.finish is None and self._enough_of(delta.choice):
            self.stream.end_choice(delta.choice)

    def _continued(self, delta: TokenDelta) -> TokenDelta:
        """Another worker goes on with it, and says how that came about, as the first one did."""
        if delta.started is None or not delta.tokens or not self._ledger.starts[delta.choice]:
            return delta
        if len(self.placed) < 2:
            self._complain(f"{self.name} began twice at {self.placed}")
        self._ledger.starts[delta.choice] = delta.started
        return replace(delta, started=None)

    def on_error(self, error: PdserveError) -> None:
        """See `engine.port.TokenSink`."""
        self.error = error
        self.end(f"failed {type(error).__name__}")

    @property
    def _has_enough(self) -> bool:
        """True if each choice has all tokens that it needs."""
        choices = range(self.request.n)
        return self.enough is not None and all(map(self._enough_of, choices))

    def _enough_of(self, choice: int) -> bool:
        ledger, enough = self._ledger, self.enough
        if enough is None:
            return False
        return ledger.finishes[choice] is not None or len(ledger.tokens[choice]) >= enough

    def _check(self, *, complete: bool) -> None:
        for choice, tokens in enumerate(self._ledger.tokens):
            wanted = reference_tokens(self.request, choice, max_len=_MAX_LEN)
            if tokens != (wanted if complete else wanted[: len(tokens)]):
                self._complain(
                    f"{self.name} choice {choice} got {len(tokens)} tokens that are not the "
                    f"engine's {len(wanted)}: {tokens} instead of {wanted}"
                )


class LoadClients:
    """The clients of one frontend's process; lives in it and dies with it."""

    def __init__(
        self,
        frontend: Frontend,
        models: tuple[str, ...],
        name: str,
        random: Random,
        *,
        rate: float,
        habits: ClientProfile = DEFAULT_PROFILE,
        begin: Callable[[TrackedRequest], None],
        leaves: Callable[[TrackedRequest], None] = lambda account: None,
        complain: Callable[[str], None],
    ) -> None:
        """`rate`: requests per second; `begin` is called with each request, `leaves` before each
        cancellation."""
        self.rate = rate
        self.habits = habits
        self._leaves = leaves
        self._frontend = frontend
        self._models = models
        self._name = name
        self._random = random
        self._begin = begin
        self._complain = complain
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self) -> None:
        """Ask again and again, until the rate is 0."""
        task = self._loop.create_task(self._run(), name=f"callers of {self._name}")
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    async def _run(self) -> None:
        while self.rate:
            await asyncio.sleep(self._random.expovariate(self.rate))
            if self.rate:
                _ = self.ask()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    def ask(self) -> TrackedRequest:
        """One request, as clients are."""
        random, name = self._random, self._next_name()
        habits = self.habits
        request = draw_request(random, name, random.choice(self._models), habits)
        patience = random.choice(habits.patience) * random.random()
        enough = random.randint(1, 30) if random.random() < habits.enough else None
        if random.random() < habits.poison:
            request = poisoned(request, random)
        account = self._start(request, enough)
        if random.random() < habits.fickle:
            account.timer = self._loop.call_later(patience, self.turn_away, account)
        return account

    def ask_patiently(self, *, long: bool = False) -> TrackedRequest:
        """One request that can only end well; `long`: not soon."""
        name = self._next_name()
        request = draw_request(self._random, name, self._random.choice(self._models))
        request = replace(request, deadline=None)
        if long:
            sampling = replace(request.sampling, max_tokens=120, ignore_eos=True)
            request = replace(request, sampling=sampling, n=1)
        return self._start(request)

    def _next_name(self) -> str:
        self._number += 1
        return f"{self._name}.{self._number}"

    def _start(self, request: GenerateRequest, enough: int | None = None) -> TrackedRequest:
        name, now = request.request_id, self._loop.time()
        account = TrackedRequest(name, request, now, self._complain, enough=enough)
        self._record(account)
        self._begin(account)
        if request.deadline is not None:
            account.alarm = self._loop.call_later(request.deadline + _GRACE, self._expire, account)
        account.task = task = self._loop.create_task(self._open(account), name=name)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return account

    def _record(self, account: TrackedRequest) -> None:
        """One of four has a caller with a trace of its own, which is sampled or not."""
        account.frontend = self._frontend
        parent = None
        if self._number % 4 == 0:
            parent = f"00-{self._number:032x}-{self._number:016x}-{self._number // 4 % 2:02x}"
        account.phases = self._frontend.tracer.begin(parent)
        if account.phases is not None:
            account.prompt = account.phases.add_prompt()

    async def close(self) -> None:
        """Cuts off all open requests, since the process ends."""
        self.rate = 0.0
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _open(self, account: TrackedRequest) -> None:
        def on_placed(placement: Placement) -> None:
            now = self._loop.time()
            account.placed.append(Placed(placement.worker, account.tokens, now))

        try:
            stream = await self._frontend.open(
                account.request, account, NO_HINTS, on_placed, account.prompt
            )
        except PdserveError as error:
            if account.tokens:
                self._complain(f"{account.name} was refused after it had got tokens: {error}")
            account.error = error
            account.end(f"refused {type(error).__name__}")
        except asyncio.CancelledError:
            if not account.outcome:  # else its last token came in the same turn
                account.end("cancelled early")
            raise
        else:
            account.stream = stream
            if account.outcome:
                stream.cancel()  # it ended while it was opened: `PromptSink` says why
            elif account.stage == "opening":
                account.stage = "opened"

    def turn_away(self, account: TrackedRequest) -> None:
        """Its client is gone."""
        if account.outcome:
            return
        self._leaves(account)
        if account.stream is None:
            assert account.task is not None
            account.task.cancel()
        else:
            account.end("cancelled")
            account.stream.cancel()

    def _expire(self, account: TrackedRequest) -> None:
        """Ends the request after its deadline; see `frontend.generation`."""
        if account.outcome:
            return
        account.overdue = True
        account.on_error(DeadlineExceeded("the frontend's own limit"))
        if account.stream is not None:
            account.stream.cancel()
        elif account.task is not None:
            account.task.cancel()
