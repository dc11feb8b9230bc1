"""Defines what proposes values to try, and the one that asks optuna.

A sampler sees indices into each knob's values and a score for each choice, nothing else. It asks
for one choice at a time and is told the score of each before the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Choice", "ChoiceSampler", "OptunaSampler", "check_optuna"]

Choice = tuple[int, ...]
"""For each knob, the index of its value."""


class ChoiceSampler(Protocol):
    """Proposes choices, and learns from their scores."""

    def ask(self) -> Choice:
        """The next choice to try; may repeat an earlier one."""
        ...

    def tell(self, score: float) -> None:
        """The score of the last choice; greater is better."""
        ...


def check_optuna() -> None:
    """Errors: `ConfigError`, with the remedy, if optuna is missing."""
    try:
        import optuna  # noqa: F401  this only tests whether it is installed
    except ImportError:
        raise ConfigError(
            "--tune needs optuna, which is not installed: pip install 'pdserve[tune]'"
        ) from None


class OptunaSampler:
    """Tree-structured Parzen estimators (TPE) over the indices, as whole numbers.

    The same seed and scores give the same choices, with one version of optuna.
    """

    def __init__(self, sizes: Mapping[str, int], first: Choice, seed: int) -> None:
        """`sizes`: number of values of each knob. `first` is asked for first. Errors: `ConfigError`
        without optuna."""
        check_optuna()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._ranges: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.IntDistribution(0, size - 1) for name, size in sizes.items()
        }
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self._study.enqueue_trial(dict(zip(sizes, first, strict=True)))
        self._trial: Any = None

    def ask(self) -> Choice:
        self._trial = self._study.ask(self._ranges)
        return tuple(self._trial.params[name] for name in self._ranges)

    def tell(self, score: float) -> None:
        self._study.tell(self._trial, score)
