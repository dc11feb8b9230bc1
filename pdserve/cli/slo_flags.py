"""Reads service level objectives in one grammar, for `pdserve bench`, `simulate` and `dashboards`.

SLO    name=LIMIT, with commas between them: ttft=500ms,itl=50ms@p95
LIMIT  a time, perhaps with the share of the requests that must keep it: 500ms@p95
TIME   `launch.config.units.parse_limit`; in --slo a number alone is milliseconds
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.errors import ConfigError
from pdserve.launch.config import units
from pdserve.sim.capacity.objective import SloLimit

if TYPE_CHECKING:
    import argparse

__all__ = ["SloText", "add_slo_flags", "parse_limit", "parse_slo_text", "slo_of"]

_NAMES: Final = {
    "ttft": "time to first token",
    "itl": "mean gap between a request's tokens",
    "e2e": "time of the whole answer",
}


class SloText(NamedTuple):
    """An objective as it was written."""

    limits: dict[str, SloLimit]
    cold: float = 0.0
    """Times of the prompt on an idle worker that `ttft` is longer; 0: not given."""


def add_slo_flags(
    group: argparse._ArgumentGroup, names: tuple[str, ...], more: str, default: str
) -> None:
    """Adds `--slo`, and `--slo-NAME` for each name. `more` ends the help."""
    listed = ", ".join(f"{name} ({_NAMES[name]})" for name in names)
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        default="",
        help=f"A request is good within these limits, such as ttft=500ms,itl=50ms: {listed}. A "
        "number alone is milliseconds. With @p95 behind a limit 95%% of the requests must keep it, "
        f"whatever their other times. {more} [{default or 'none'}]",
    )
    for name in names:
        group.add_argument(
            f"--slo-{name}", metavar="TIME", help=f"The same as {name}=TIME in --slo: 500ms@p95."
        )


def slo_of(parsed: argparse.Namespace, names: tuple[str, ...], *, cold: bool = False) -> SloText:
    """The objective that the flags name. Errors: `ConfigError`."""
    single = {name: text for name in names if (text := getattr(parsed, f"slo_{name}")) is not None}
    try:
        slo = parse_slo_text(parsed.slo, names, cold=cold)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from None
    for name, text in single.items():
        if name in slo.limits:
            raise ConfigError(f"--slo-{name} and --slo both limit {name}: keep one of them")
        try:
            slo.limits[name] = parse_limit(text)
        except ValueError as error:
            raise ConfigError(f"--slo-{name}: {error}") from None
    return slo


def parse_slo_text(text: str, names: tuple[str, ...], *, cold: bool = False) -> SloText:
    """Reads `ttft=500ms,itl=50@p95,cold=2`. Errors: `ValueError`."""
    limits: dict[str, SloLimit] = {}
    factor = 0.0
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        known = (*names, "cold") if cold else names
        if name not in known or not equals:
            example = ",".join(f"{one}=500" for one in names)
            raise ValueError(f"{part!r} is not of the form {example} (milliseconds)")
        if name in limits or (name == "cold" and factor):
            raise ValueError(f"{name} is limited twice")
        try:
            if name == "cold":
                factor = _factor(value)
            else:
                limits[name] = parse_limit(value, unit="ms")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return SloText(limits, factor)


def parse_limit(text: str, unit: str = "") -> SloLimit:
    """As `launch.config.units.parse_limit`. Errors: `ValueError`."""
    return SloLimit(*units.parse_limit(text, unit))


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"{text!r} is no number above 0")
    return value
