"""Counts what vLLM's steps compute, for statistics and for the work of each prompt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdserve.ids import Seconds
    from pdserve_engines.vllm.choices import VllmChoice
    from pdserve_engines.vllm.image_reader import ReadPrompt

__all__ = ["StepCounts", "StepPart"]

_RECENT = 0.2
"""Weight of the newest step in the average time between tokens."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """The tokens of one choice that a step has computed."""

    start: int
    count: int


class StepCounts:
    """Counters of one engine; they only grow."""

    def __init__(self) -> None:
        self.inexact = 0
        """Continued requests that vLLM repeats only nearly (`params.inexact`)."""
        self._images = 0
        self._images_unexpected = 0
        self._steps = 0
        self._step_seconds: Seconds = 0.0
        self._computed = 0
        self._cached = 0
        self._preemptions = 0
        self._itl: Seconds = 0.0

    def note_step(
        self,
        took: Seconds,
        choices: Iterable[VllmChoice],
        progress: Callable[[str], tuple[int, int] | None],
    ) -> list[StepPart]:
        """Count a step. `progress` tells how many tokens of a choice vLLM has by now, and how many
        of them were cached; each choice gets its share of the step's time, by its part of the
        step's tokens. Returns the parts."""
        self._steps += 1
        self._step_seconds += took
        parts = [(choice, self._advance(choice, progress(choice.id))) for choice in choices]
        total = sum(part for _, part in parts)
        self._computed += total
        if total:
            for choice, part in parts:
                choice.work += took * part / total
        if any(choice.first is not None and part for choice, part in parts):
            self._itl = took if not self._itl else self._itl + _RECENT * (took - self._itl)
        return [StepPart(choice.computed - part, part) for choice, part in parts if part]

    def _advance(self, choice: VllmChoice, now: tuple[int, int] | None) -> int:
        """Tokens of a choice that this step has computed."""
        before = choice.computed
        if now is None:  # vLLM has ended it with this step
            choice.computed = choice.total if choice.first is None else before + 1
        else:
            choice.computed = now[0]
            choice.skipped = choice.skipped or now[1]
            choice.cached = choice.cached or min(now[1], len(choice.request.prompt))
        if choice.computed < before:  # it lost its blocks and begins again
            self._preemptions += 1
            return 0
        skipped = choice.skipped if before == 0 else 0
        return max(0, choice.computed - before - skipped)

    def note_images(self, read: ReadPrompt) -> None:
        """Count the images of a request."""
        self._images += len(read.tokens)
        self._images_unexpected += read.unexpected

    def note_start(self, choice: VllmChoice) -> None:
        """Count a choice that has its first token."""
        self._cached += choice.cached - choice.loaded

    def note_frames(self, tokens: int) -> None:
        """Count prompt tokens that came from frames together with what another worker has sent:
        to vLLM all of them are that worker's."""
        self._cached += tokens

    def fields(self) -> dict[str, Any]:
        """Fields of `EngineStats`."""
        return {
            "steps": self._steps,
            "step_seconds": self._step_seconds,
            "computed_tokens": self._computed,
            "cached_tokens": self._cached,
            "preemptions": self._preemptions,
            "itl": self._itl,
            "inexact_continuations": self.inexact,
            "images": self._images,
            "images_unexpected": self._images_unexpected,
        }
