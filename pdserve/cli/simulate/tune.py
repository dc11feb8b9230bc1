"""Runs `pdserve simulate --tune`: which values of the settings serve this trace better.

The search is `pdserve.sim.tuning`. It replays, and touches no live cluster.
"""

from __future__ import annotations

import difflib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.outputs import check_writable, columns, write
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.knobs import TuningKnob
    from pdserve.sim.capacity.trial import TrialPlan
    from pdserve.sim.replay.config import ReplayConfig
    from pdserve.sim.tuning.search import Gain, Proposal, TunedKnob

__all__ = ["TUNE_FLAGS", "add_tune_flags", "run_tune"]

TUNE_FLAGS: Final = ("--trials", "--knobs")
"""Flags that only --tune reads."""
_DRAW_EVERY: Final[Seconds] = 0.2


def add_tune_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of --tune, except --seeds, which it shares with --plan."""
    group.add_argument(
        "--tune",
        action="store_true",
        help="Propose values of settings that serve more requests within the SLO. Needs "
        "pdserve[tune].",
    )
    group.add_argument(
        "--trials", metavar="N", type=int, default=60, help="Choices of values to try. [60]"
    )
    group.add_argument(
        "--knobs",
        metavar="NAMES",
        default="",
        help="Tune only these, such as hold-work,max-batch-tokens. [all that the cluster reads and "
        "no flag sets]",
    )


def run_tune(parsed: argparse.Namespace, plan: TrialPlan, given: Sequence[str], source: str) -> int:
    """Searches, prints the proposed flags and writes the requested file.

    Args: `given` are the flags of the command line; what they set is not tuned, unless --knobs
    names it. `source` names the trace.
    """
    from pdserve.sim.tuning.replays import SliceReplays, today
    from pdserve.sim.tuning.sampler import OptunaSampler, check_optuna
    from pdserve.sim.tuning.search import propose

    _check(parsed)
    check_optuna()
    check_writable([Path(parsed.json)] if parsed.json else [])
    knobs = [today(plan.config, knob) for knob in _chosen(parsed.knobs, plan.config, given)]
    names = [one.knob.name for one in knobs]
    sampler = OptunaSampler(
        {one.knob.name: len(one.values) for one in knobs},
        tuple(one.first for one in knobs),
        parsed.seed,
    )
    progress = _TuneProgress()
    replays = SliceReplays(plan, names, parsed.seeds, progress.ended)
    proposal = propose(knobs, sampler, replays, parsed.trials)
    progress.close()
    print(_report(proposal, knobs, parsed, source))
    if parsed.json:
        write(Path(parsed.json), _as_json(proposal, knobs, parsed, source))
    return exit_codes.OK


def _check(parsed: argparse.Namespace) -> None:
    if parsed.plot:
        raise ConfigError("--plot has no effect beside --tune: leave it out")
    for flag, value in (("--trials", parsed.trials), ("--seeds", parsed.seeds)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1")


def _chosen(names: str, config: ReplayConfig, given: Sequence[str]) -> list[TuningKnob]:
    """The knobs to tune. Errors: `ConfigError`."""
    from pdserve.messages.knobs import KNOBS
    from pdserve.sim.tuning.replays import relevant_knobs

    relevant = {knob.name: knob for knob in relevant_knobs(config)}
    if names:
        wanted = [name.strip() for name in names.split(",")]
        known = [knob.name for knob in KNOBS]
        for name in wanted:
            if name not in known:
                raise ConfigError(f"--knobs: there is no {name!r}{_hint(name, known)}")
            if name not in relevant:
                raise ConfigError(
                    f"--knobs: {name} has no effect here: it needs --prefill and --disagg rule"
                )
        return [relevant[name] for name in dict.fromkeys(wanted)]
    fixed = {word.partition("=")[0].lstrip("-") for word in given}
    fixed |= {name.replace("_", "-") for name in config.router_options}
    found = [knob for knob in relevant.values() if knob.name not in fixed]
    if not found:
        raise ConfigError(
            "--tune: flags set every setting that could be tuned: name some in --knobs"
        )
    return found


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f": did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"


# ---------------------------------------------------------------- what it says


def _report(
    proposal: Proposal, knobs: Sequence[TunedKnob], parsed: argparse.Namespace, source: str
) -> str:
    lines = [
        f"{source}: {proposal.trials} choices, {proposal.replays} slices replayed with "
        f"{parsed.seeds} seeds each",
        "",
        *columns(
            [("SETTING", "TODAY", "PROPOSED", "TRIED", "A GREATER VALUE"), *_rows(proposal, knobs)]
        ),
        "",
        *_gains(proposal),
    ]
    if proposal.accepted:
        return "\n".join([*lines, f"proposed: {_flags(proposal, knobs)}"])
    return "\n".join([*lines, *(f"not proposed: {reason}" for reason in proposal.reasons)])


def _rows(proposal: Proposal, knobs: Sequence[TunedKnob]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in knobs:
        text = one.knob.as_text
        new = proposal.values.get(one.knob.name, one.today)
        tried = f"{text(one.values[0])} to {text(one.values[-1])}"
        shown = "-" if new == one.today else text(new)
        rows.append(
            (
                one.knob.name,
                text(one.today),
                shown,
                tried,
                one.knob.trades.removeprefix("greater: "),
            )
        )
    return rows


def _gains(proposal: Proposal) -> list[str]:
    named = (
        ("slices that proposed it", proposal.proposing),
        ("slices held out", proposal.held_out),
    )
    return [_gain(name, gain) for name, gain in named if gain is not None]


def _gain(name: str, gain: Gain) -> str:
    parts = ", ".join(f"{number + 1}: {value:+.1%}" for number, value in gain.slices.items())
    return f"good requests, {name}: {gain.mean:+.1%}, spread {gain.spread:.1%} ({parts})"


def _flags(proposal: Proposal, knobs: Sequence[TunedKnob]) -> str:
    texts = {one.knob.name: one.knob.as_text for one in knobs}
    return " ".join(f"--{name}={texts[name](value)}" for name, value in proposal.values.items())


def _as_json(
    proposal: Proposal, knobs: Sequence[TunedKnob], parsed: argparse.Namespace, source: str
) -> str:
    settings = {
        one.knob.name: {
            "owner": one.knob.owner,
            "unit": one.knob.unit,
            "today": one.today,
            "best": proposal.values.get(one.knob.name, one.today),
            "tried": [one.values[0], one.values[-1]],
        }
        for one in knobs
    }
    made: dict[str, Any] = {
        "trace": source,
        "seed": parsed.seed,
        "seeds": parsed.seeds,
        "trials": proposal.trials,
        "slices_replayed": proposal.replays,
        "accepted": proposal.accepted,
        "reasons": proposal.reasons,
        "flags": _flags(proposal, knobs) if proposal.accepted else "",
        "settings": settings,
        "proposing": _gain_json(proposal.proposing),
        "held_out": _gain_json(proposal.held_out),
    }
    return json.dumps(made, indent=1, sort_keys=True) + "\n"


def _gain_json(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    slices = {str(number + 1): value for number, value in gain.slices.items()}
    return {"mean": gain.mean, "spread": gain.spread, "slices": slices}


class _TuneProgress:
    """One progress line on a terminal's standard error; a line at the end elsewhere."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._shown = sys.stderr.isatty()
        self._next = 0.0
        self._count = 0

    def ended(self) -> None:
        """Counts one more replay."""
        self._count += 1
        if self._shown and (now := time.monotonic()) >= self._next:
            self._next = now + _DRAW_EVERY
            sys.stderr.write(f"\r{self._line()}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Prints the final state."""
        before = "\r\x1b[K" if self._shown else ""
        sys.stderr.write(f"{before}{self._line()}\n")

    def _line(self) -> str:
        return f"{self._count} replays in {time.monotonic() - self._begin:.0f} s"
