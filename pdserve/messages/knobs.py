"""Lists the settings that may be tuned, each with the range in which it does no harm.

It does not say what a value does to a workload: `pdserve simulate --tune` finds that by replays.
Settings that guard memory, name data or decide what bytes mean (block size, dtype, hash secret,
limits) are not here and are never tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KNOBS", "TuningKnob", "knob_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKnob:
    """One setting that may be tuned."""

    name: str
    """The flag, without its dashes."""
    owner: Literal["worker", "router"]
    """The role that has the setting."""
    unit: str
    """What its numbers count; `s` for seconds."""
    hard: tuple[float, float]
    """Least and greatest value that the role accepts or that makes sense; 0 often turns it off."""
    safe: tuple[float, float]
    """Least and greatest value that is ever proposed."""
    step: float = 1.25
    """Ratio of two neighbouring values."""
    live: bool
    """Whether the role can take another value while it serves; else at its next start."""
    whole: bool = True
    """Whether values are whole numbers."""
    trades: str
    """What a greater value buys, and what it costs."""

    def values(self, default: float) -> tuple[float, ...]:
        """The values to try, from the least to the greatest: the safe range in steps, and
        `default` if it is in there."""
        found = set(self._steps())
        if self.safe[0] <= default <= self.safe[1]:
            found.add(default)
        return tuple(sorted(found))

    def _steps(self) -> Iterator[float]:
        low, high = self.safe
        value = low
        while value < high:
            yield float(round(value)) if self.whole else round(value, 4)
            value *= self.step
        yield high

    def as_text(self, value: float) -> str:
        """The value as the flag takes it."""
        return f"{value * 1000:g}ms" if self.unit == "s" else f"{value:g}"


KNOBS: Final = (
    TuningKnob(
        name="disagg-min-tokens",
        owner="worker",
        unit="tokens",
        hard=(0, 1 << 20),
        safe=(128, 4096),
        live=False,
        trades="greater: fewer prompts wait for a transfer; more of them delay running streams",
    ),
    TuningKnob(
        name="disagg-max-queue",
        owner="worker",
        unit="requests",
        hard=(0, 1 << 16),
        safe=(2, 50),
        live=False,
        trades="greater: decode workers are spared in bursts; prompts wait longer in the queue",
    ),
    TuningKnob(
        name="hold-work",
        owner="router",
        unit="s",
        hard=(0, 10),
        safe=(0.03, 0.4),
        live=False,
        whole=False,
        trades="greater: engines never run dry; less can still be ordered or go elsewhere",
    ),
    TuningKnob(
        name="max-batch-tokens",
        owner="worker",
        unit="tokens",
        hard=(1, 1 << 20),
        safe=(256, 8192),
        live=False,
        trades="greater: prompts are computed sooner; each step delays running streams longer",
    ),
)
"""All of them."""


def knob_of(name: str) -> TuningKnob | None:
    """The knob of this name; None: there is none."""
    return next((knob for knob in KNOBS if knob.name == name), None)
