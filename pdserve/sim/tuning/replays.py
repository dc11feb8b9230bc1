"""Replays slices of a trace with other values of the knobs: what `search.propose` asks for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.messages.knobs import KNOBS
from pdserve.router.config import RouterConfig
from pdserve.sim.capacity.trial import seeded_trace
from pdserve.sim.replay.run import replay
from pdserve.sim.tuning.search import SLICES, TunedKnob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.messages.knobs import TuningKnob
    from pdserve.sim.capacity.trial import TrialPlan
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.workloads.transform import TraceTransform

__all__ = ["SliceReplays", "applied", "relevant_knobs", "slice_of", "today"]

_OF_RULE: Final = ("disagg-min-tokens", "disagg-max-queue")
"""Knobs that only `rule` reads."""
_ROUTER: Final = {"hold-work": "hold_work"}
"""Knobs that are fields of `RouterConfig`."""


def relevant_knobs(config: ReplayConfig) -> list[TuningKnob]:
    """The knobs that this cluster reads."""
    rule = bool(config.prefill) and config.disagg == "rule"
    return [knob for knob in KNOBS if rule or knob.name not in _OF_RULE]


def today(config: ReplayConfig, knob: TuningKnob) -> TunedKnob:
    """The knob with the value that `config` gives it."""
    if knob.name in _ROUTER:
        field = _ROUTER[knob.name]
        text = config.router_options.get(knob.name, config.router_options.get(field))
        value = float(RouterConfig().hold_work if text is None else text)
    else:
        value = float(getattr(config, knob.name.replace("-", "_")))
    values = knob.values(value)
    if knob.name == "max-batch-tokens":
        values = tuple(one for one in values if one >= config.max_sequences)
    return TunedKnob(knob, value, values or (value,))


def applied(config: ReplayConfig, values: dict[str, float]) -> ReplayConfig:
    """The config with these values of the knobs."""
    router = {_ROUTER[name]: f"{value:g}" for name, value in values.items() if name in _ROUTER}
    others = {
        name.replace("-", "_"): int(value) for name, value in values.items() if name not in _ROUTER
    }
    kept = {
        name: text
        for name, text in config.router_options.items()
        if name.replace("-", "_") not in router
    }
    return replace(config, router_options={**kept, **router}, **others)  # type: ignore[arg-type]


def slice_of(shape: TraceTransform, number: int) -> TraceTransform:
    """The slice of this number of what `shape` keeps, by time; a limit is shared out."""
    width = (shape.end - shape.begin) / SLICES
    begin = shape.begin + number * width
    end = shape.end if number == SLICES - 1 else begin + width
    limit = max(1, shape.limit // SLICES) if shape.limit else 0
    return replace(shape, begin=begin, end=end, limit=limit)


@dataclass(frozen=True, slots=True)
class SliceReplays:
    """Replays the slices of a plan's trace; implements `search.Replays`."""

    plan: TrialPlan
    names: Sequence[str]
    seeds: int
    on_replay: Callable[[], None] = lambda: None

    def good(self, values: Sequence[float], slice_: int) -> list[float]:
        """The share of good requests for each seed. Errors: `ConfigError` for an empty slice."""
        config = applied(self.plan.config, dict(zip(self.names, values, strict=True)))
        plan = replace(self.plan, transform=slice_of(self.plan.transform, slice_))
        return list(self._shares(plan, config, slice_))

    def _shares(self, plan: TrialPlan, config: ReplayConfig, number: int) -> Iterator[float]:
        for seed in range(self.seeds):
            result = replay(replace(config, seed=config.seed + seed), seeded_trace(plan, seed))
            if not result.records:
                raise ConfigError(
                    f"slice {number + 1} of {SLICES} of the trace has no request: give a longer "
                    "trace, or a longer --part of it"
                )
            self.on_replay()
            yield float(result.plain(requests=False)["summary"]["good"])
