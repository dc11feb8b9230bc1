"""Runs `pdserve planner`: what the planners of a cluster see, decide and why; and tells them.

    pdserve planner                      state, forecast against observed, plan, what binds it
    pdserve planner explain [NUMBER]     one plan in full
    pdserve planner pause|resume [MODEL]
    pdserve planner pin MODEL prefill=2,decode=4 | unpin MODEL
    pdserve planner enable KIND          start a kind again that had failed too often
    pdserve planner check FILE           read a planner file

It asks one node for the members and joins nothing; `cli.planner_tables` writes the text.
"""

from __future__ import annotations

import asyncio
import getpass
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser, value_of
from pdserve.cli.planner_tables import explained, overview_of, plan_rows
from pdserve.cli.status_tables import as_json
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import closest_match
from pdserve.launch.config.units import parse_count, parse_duration, parse_pairs
from pdserve.messages.planner_orders import PlannerOrder
from pdserve.planner.config import MODES, MOST_WORKERS
from pdserve.planner.driver.wishes import LONGEST

if TYPE_CHECKING:
    import argparse

    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Seconds
    from pdserve.launch.cluster.admin_client import AdminClient
    from pdserve.messages.planner_orders import PlannerAnswer
    from pdserve.messages.status import ClusterStatus, MemberStatus
    from pdserve.planner.config import PoolConfig

__all__ = ["mix_of", "run"]

_VERBS: Final = ("show", "explain", "pause", "resume", "pin", "unpin", "enable", "check")
_HOLD: Final = "1h"
_MOST_PLANS: Final = 2**63 - 1
"""Greatest number that a message has room for."""
_DESCRIPTION: Final = """\
What the cluster's planners see, what they decide, and why. Without a verb: for each model the
workers that there are and that are wanted, the load and its forecast, what is being changed, and
what keeps the plan from being cheaper or better.

explain [NUMBER]         one plan in full; without a number the newest of each model
pause [MODEL]            change nothing for this model, or for all, until --for has passed
resume [MODEL]           end that
pin MODEL MODE=N[,…]     keep exactly so many workers of each mode, until --for has passed
unpin MODEL              end that
enable KIND              start a kind again that was given up because it failed too often
check FILE               read a planner file, and say what is wrong with it

Any planner may be asked; all of them learn of it, and one that takes over a model keeps to it. With
the last planner it is forgotten: what must last stands in the planner file."""


def run(arguments: list[str]) -> int:
    """Shows or tells; the exit status is 0 if there is a planner and it obeys."""
    parser = Parser("pdserve planner", _DESCRIPTION)
    parser.own.add_argument("verb", metavar="VERB", nargs="?", default="show", help="See above.")
    parser.own.add_argument("what", metavar="ARGUMENT", nargs="*", help="See above.")
    parser.own.add_argument(
        "--for",
        dest="hold",
        metavar="TIME",
        default=_HOLD,
        help=f"With pause and pin: how long it holds (default: {_HOLD}).",
    )
    parser.own.add_argument("--json", action="store_true", help="Write the records as JSON.")
    add_reach(parser)
    parsed = parser.parse(arguments)
    if parsed.verb not in _VERBS:
        close = closest_match(parsed.verb, _VERBS)
        hint = f", did you mean {close!r}?" if close else f": use one of {', '.join(_VERBS)}"
        raise ConfigError(f"{parsed.verb!r} is unknown{hint}")
    if parsed.verb == "check":
        return _check(_words(parsed, 1, "FILE")[0])
    if parsed.verb == "show":
        _words(parsed, 0)
        return asyncio.run(_show(reach_of(parsed), as_records=parsed.json))
    return asyncio.run(_tell(reach_of(parsed), _order(parsed), as_records=parsed.json))


def _words(parsed: argparse.Namespace, most: int, needed: str = "") -> list[str]:
    """The arguments of the verb. Errors: `ConfigError` for too many, or none where one is
    needed."""
    words: list[str] = parsed.what
    if needed and not words:
        raise ConfigError(f"pdserve planner {parsed.verb} needs {needed}")
    if len(words) > most:
        raise ConfigError(f"{words[most]!r} is too much for pdserve planner {parsed.verb}")
    if "" in words:  # a shell's variable that is not set must not mean all models
        raise ConfigError(f"an argument of pdserve planner {parsed.verb} is empty: leave it out")
    return words


def _order(parsed: argparse.Namespace) -> PlannerOrder:
    """What the planner is told. Errors: `ConfigError`."""
    verb, by = parsed.verb, getpass.getuser()
    seconds = value_of("--for", _hold, parsed.hold)
    if verb == "explain":
        words = _words(parsed, 1)
        number = value_of("NUMBER", _plan_number, words[0].removeprefix("#")) if words else 0
        return PlannerOrder(verb=verb, number=number, by=by)
    if verb == "enable":
        return PlannerOrder(verb=verb, kind=_words(parsed, 1, "a KIND")[0], by=by)
    if verb in ("pause", "resume"):
        words = _words(parsed, 1)
        return PlannerOrder(verb=verb, model=words[0] if words else "", seconds=seconds, by=by)
    if verb == "unpin":
        return PlannerOrder(verb=verb, model=_words(parsed, 1, "a MODEL")[0], by=by)
    words = _words(parsed, 2, "a MODEL, and workers such as prefill=2,decode=4")
    if len(words) == 1:
        raise ConfigError(f"say which workers {words[0]} is to have, such as prefill=2,decode=4")
    return PlannerOrder(verb=verb, model=words[0], mix=mix_of(words[1]), seconds=seconds, by=by)


def _plan_number(text: str) -> int:
    return parse_count(text, most=_MOST_PLANS)


def _hold(text: str) -> Seconds:
    seconds = parse_duration(text)
    if not 0 < seconds <= LONGEST:
        raise ValueError(
            f"{text!r} must be more than 0 and at most {LONGEST / 86400:.0f}d: resume and unpin "
            "end a pause and a pin, and what must last stands in the planner file"
        )
    return seconds


def mix_of(text: str) -> dict[str, int]:
    """Reads `prefill=2,decode=4`. Errors: `ConfigError`, with the nearest mode."""
    pairs = value_of("pin", lambda given: parse_pairs(given.split(",")), text)
    for mode in pairs:
        if mode not in MODES:
            close = closest_match(mode, MODES)
            hint = f", did you mean {close!r}?" if close else f": use one of {', '.join(MODES)}"
            raise ConfigError(f"mode {mode!r} is unknown{hint}")
    if len(pairs) < len(text.split(",")):
        raise ConfigError(f"pin: {text!r} names a mode twice: give each mode one number")
    return {mode: value_of(mode, _workers, number) for mode, number in pairs.items()}


def _workers(text: str) -> int:
    return parse_count(text, most=MOST_WORKERS)


def _check(name: str) -> int:
    from pdserve.launch.config.planner_file import read_planner_file

    config, actuators = read_planner_file(Path(name))
    several = bool(actuators) and len(config.pools) > 1
    models = ", ".join(_in_words(pool, several=several) for pool in config.pools)
    print(printable(f"{name}: fine: {models}; ways to start workers: {len(actuators)}"))
    return exit_codes.OK


def _in_words(pool: PoolConfig, *, several: bool) -> str:
    """`several`: workers can be started, and there are other pools."""
    aimless = pool.ttft is None and pool.itl is None
    load = ", whatever the load: it has no objective" if aimless else ""
    idle = "; nothing is started for it: it names no kinds" if several and not pool.kinds else ""
    return f"{pool.model} ({pool.min} to {pool.max}{load}{idle})"


async def _show(reach: Reach, *, as_records: bool) -> int:
    visitor = reach.client()
    try:
        status = await visitor.status()
    finally:
        await visitor.close()
    planners = _planners(status)
    if as_records:
        found = {member.node: as_json(_report(member)) for member in planners}
        print(json.dumps(found, indent=2))
    else:
        print(printable(overview_of(status, planners)))
    return exit_codes.OK if planners else exit_codes.FAILED


def _planners(status: ClusterStatus) -> list[MemberStatus]:
    return [member for member in status.members if member.role == "planner"]


def _report(member: MemberStatus) -> object:
    return None if member.report is None else member.report.planner


async def _tell(reach: Reach, order: PlannerOrder, *, as_records: bool) -> int:
    visitor = reach.client()
    try:
        planners = _planners(await visitor.status())
        if not planners:
            raise ConfigError("there is no planner in the cluster: pdserve --role=planner is one")
        answers = await _answers(visitor, planners, order)
    finally:
        await visitor.close()
    good = [one for one in answers if not one.refused]
    if not good:
        print(printable(answers[0].refused))
        return exit_codes.FAILED
    if as_records:
        print(json.dumps([as_json(one) for one in good], indent=2))
    elif order.verb == "explain":
        print(printable("\n\n".join(explained(one) for one in good if one.plans) or _NO_PLAN))
    else:
        print(printable(plan_rows(order, good[0])))
    return exit_codes.OK


async def _answers(
    visitor: AdminClient, planners: list[MemberStatus], order: PlannerOrder
) -> list[PlannerAnswer]:
    """The answers that are needed: of all planners for `explain` and `enable`, else of one that
    answers. Errors: of the last planner, if none answers."""
    found: list[PlannerAnswer] = []
    failure: PdserveError | None = None
    for member in planners:
        try:
            found.append(await visitor.tell_planner(member.address, member.node, order))
        except PdserveError as error:
            failure = error
            continue
        if order.verb not in ("explain", "enable"):
            break
    if not found:
        assert failure is not None
        raise failure
    return found


_NO_PLAN: Final = "no plan has been made yet"
