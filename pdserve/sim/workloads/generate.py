"""Generates synthetic traces from a seed: the usual families, with lengths as options.

    shared-prefix   groups of prompts that share a long beginning (llm-d's and SGLang's benchmarks)
    multi-turn      conversations: each prompt is all that was said before, and a question
    agentic         programs: a common system prompt, their own context, steps that follow each
                    other after a tool call, now and then several calls at once
    unique          no two prompts share anything

A generator is a frozen dataclass whose fields are its options. Each iteration starts anew; its
memory does not grow with the trace.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final

from pdserve.errors import ConfigError
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.ids import Seconds

__all__ = ["KINDS", "Agentic", "Generator", "MultiTurn", "SharedPrefix", "Unique", "generator"]

_EVER: Final = 1 << 20
"""Contents that all prompts of a trace may share are below, those of single requests above."""


@dataclass(frozen=True, slots=True)
class Generator:
    """Base of all families."""

    kind: ClassVar[str] = ""
    seed: int = 0
    requests: int = 1000
    rate: float = 2.0
    """Requests per second, or conversations or programs per second for the families that have them;
    arrivals are a Poisson process."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value < 0:
                raise ValueError(f"{field.name} must not be negative")
        if not self.rate > 0:
            raise ValueError("rate must be positive")

    def __iter__(self) -> Iterator[TraceRequest]:
        raise NotImplementedError

    def _random(self) -> Random:
        return Random(f"{self.kind} {self.seed}")


@dataclass(frozen=True, slots=True)
class Unique(Generator):
    """Prompts without common prefixes."""

    kind: ClassVar[str] = "unique"
    input: int = 2000
    """Mean prompt length in tokens; lengths are exponential."""
    output: int = 200

    def __iter__(self) -> Iterator[TraceRequest]:
        random, at = self._random(), 0.0
        for number in range(self.requests):
            at += random.expovariate(self.rate)
            pieces = ((_EVER + number, _about(random, self.input)),)
            yield TraceRequest(number, at, pieces, _about(random, self.output))


@dataclass(frozen=True, slots=True)
class SharedPrefix(Generator):
    """Prompts of a group's prefix and a question of their own."""

    kind: ClassVar[str] = "shared-prefix"
    groups: int = 150
    prefix: int = 6000
    question: int = 1200
    output: int = 1000

    def __iter__(self) -> Iterator[TraceRequest]:
        random, at = self._random(), 0.0
        for number in range(self.requests):
            at += random.expovariate(self.rate)
            group = random.randrange(max(1, self.groups))
            pieces = ((group, max(1, self.prefix)), (_EVER + number, max(1, self.question)))
            yield TraceRequest(number, at, pieces, max(1, self.output))


@dataclass(frozen=True, slots=True)
class MultiTurn(Generator):
    """Conversations; `rate` counts conversations."""

    kind: ClassVar[str] = "multi-turn"
    rate: float = 0.5
    turns: int = 6
    """Mean number of turns; geometric."""
    system: int = 1000
    """Tokens of the system prompt, shared by all conversations."""
    question: int = 300
    output: int = 250
    pause: Seconds = 10.0
    """Mean seconds between an answer and the next question."""

    def __iter__(self) -> Iterator[TraceRequest]:
        random, at, number = self._random(), 0.0, 0
        while number < self.requests:
            at += random.expovariate(self.rate)
            session, after = f"c{number}", None
            while number < self.requests:
                own = (_EVER + number, _about(random, self.question))
                pieces = (own,) if after is not None else ((0, max(1, self.system)), own)
                pause = random.expovariate(1 / self.pause) if after is not None else 0.0
                output = _about(random, self.output)
                yield TraceRequest(number, at, pieces, output, session, after, pause)
                after, number = number, number + 1
                if random.random() * max(1, self.turns) < 1:
                    break


@dataclass(frozen=True, slots=True)
class Agentic(Generator):
    """Agent programs; `rate` counts programs."""

    kind: ClassVar[str] = "agentic"
    rate: float = 0.2
    steps: int = 10
    """Mean number of steps; geometric."""
    fan_out: int = 3
    """Number of calls of a step that has several: all continue the step before, and one of them is
    continued."""
    fans: float = 0.2
    """Share of the steps that have several calls."""
    system: int = 3000
    context: int = 6000
    """Mean tokens of each program's own context."""
    step_input: int = 1500
    output: int = 400
    pause: Seconds = 5.0
    """Mean seconds of a tool call."""

    def __iter__(self) -> Iterator[TraceRequest]:
        random, at, number = self._random(), 0.0, 0
        while number < self.requests:
            at += random.expovariate(self.rate)
            session, after = f"p{number}", None
            while number < self.requests:
                calls = max(1, self.fan_out) if random.random() < self.fans else 1
                calls = 1 if after is None else min(calls, self.requests - number)
                pause = random.expovariate(1 / self.pause) if after is not None else 0.0
                for call in range(number, number + calls):
                    pieces = self._pieces(random, call, first=after is None)
                    output = _about(random, self.output)
                    yield TraceRequest(call, at, pieces, output, session, after, pause)
                after, number = number, number + calls
                if random.random() * max(1, self.steps) < 1:
                    break

    def _pieces(self, random: Random, number: int, *, first: bool) -> tuple[tuple[int, int], ...]:
        own = _EVER + number
        if first:
            return ((0, max(1, self.system)), (own, _about(random, self.context)))
        return ((own, _about(random, self.step_input)),)


KINDS: Final[Mapping[str, type[Generator]]] = {
    kind.kind: kind for kind in (SharedPrefix, MultiTurn, Agentic, Unique)
}


def generator(kind: str, options: Mapping[str, str], *, seed: int = 0) -> Generator:
    """The family `kind`, with options as text. Errors: `ConfigError`."""
    made = KINDS.get(kind)
    if made is None:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"no trace {kind!r} can be generated{hint or '.'} Known: {', '.join(KINDS)}"
        )
    fields = {field.name: field for field in dataclasses.fields(made)}
    values: dict[str, float] = {"seed": seed}
    for name, text in options.items():
        field = fields.get(name.replace("-", "_"))
        if field is None:
            raise ConfigError(f"{kind} has no option {name!r}. Options: {', '.join(fields)}")
        try:
            values[field.name] = float(text) if isinstance(field.default, float) else int(text)
        except ValueError:
            raise ConfigError(f"{kind}: {name}={text!r} is no number of its kind") from None
    try:
        return made(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"{kind}: {error}") from None


def _about(random: Random, mean: int) -> int:
    """Exponential lengths, 1 to eight times the mean."""
    return max(1, min(round(random.expovariate(1 / max(1, mean))), 8 * mean))
