"""Runs `pdserve mode NODE MODE`: a worker changes its mode while it serves.

It asks one node for the members, sends the order to the worker, and can wait until the change has
happened or has not. It joins nothing. `worker.mode` implements the change in a worker.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.drain import members_named
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError, HandshakeRefused, PdserveError, WorkerLost
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import closest_match
from pdserve.messages.mode import ModeReport, SetMode
from pdserve.worker.mode.jobs import LIVE_MODES

if TYPE_CHECKING:
    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Seconds
    from pdserve.launch.cluster.admin_client import AdminClient
    from pdserve.messages.status import ClusterStatus, MemberStatus

__all__ = ["outcome", "run", "worker_named"]

_POLL: Final[Seconds] = 0.2
_MARGIN: Final[Seconds] = 15.0
"""Seconds beyond the change's own time-out, for its self-test and for that to be seen."""
_DESCRIPTION: Final = """\
Change what a worker does, while it serves. No request is lost, and its prefix cache stays:

aggregated  takes requests, and computes their prompts itself
decode      takes requests, and has long prompts computed by prefill workers
prefill     computes prompts for decode workers
both        as aggregated, and computes prompts for decode workers beside them

The worker takes no prompts of others for a moment. If one of the modes takes no requests, it takes
none meanwhile, and its streams move to other workers with their KV. Then it changes, computes one
token as a test, and serves on. If something is left after --timeout, or the test fails, it keeps
its mode; `pdserve status` says why. With --wait, an interrupt ends the waiting, not the change.
Its present mode cancels a change that has not happened yet. A restart brings back --mode.

A worker refuses if no other ready worker would do its job; --last changes it anyway."""


def run(arguments: list[str]) -> int:
    """Sends the order; the exit status is 0 if the worker obeys and, with waiting, has changed."""
    parser = Parser("pdserve mode", _DESCRIPTION)
    parser.own.add_argument("node", metavar="NODE", help="The worker's name, as in status.")
    parser.own.add_argument("mode", metavar="MODE", help=f"One of {', '.join(LIVE_MODES)}.")
    parser.own.add_argument(
        "--wait", action="store_true", help="Return when the worker has changed, or has not."
    )
    parser.own.add_argument(
        "--last", action="store_true", help="Even if no other ready worker would do its job."
    )
    parser.own.add_argument(
        "--share",
        metavar="SHARE",
        type=float,
        help="With both: the part of a step that other workers' prompts may fill; one that is "
        "longer comes alone (default: 0.5).",
    )
    parser.own.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="Seconds to hand over what cannot stay (default: 60).",
    )
    add_reach(parser)
    parsed = parser.parse(arguments)
    order = SetMode(
        mode=_checked(parsed.mode),
        last=parsed.last,
        share=_share(parsed.mode, parsed.share),
        timeout=_within("--timeout", parsed.timeout, 3600.0),
    )
    return asyncio.run(_change(reach_of(parsed), parsed.node, order, wait=parsed.wait))


def _checked(mode: str) -> str:
    if mode not in LIVE_MODES:
        close = closest_match(mode, LIVE_MODES)
        hint = f", did you mean {close!r}?" if close else f": use one of {', '.join(LIVE_MODES)}"
        raise ConfigError(f"mode {mode!r} is unknown{hint}")
    return mode


def _share(mode: str, share: float | None) -> float:
    if share is None:
        return 0.5
    if mode != "both":
        raise ConfigError(f"--share is for mode both, and a {mode} worker has none: leave it out")
    return _within("--share", share, 1.0)


def _within(flag: str, value: float, most: float) -> float:
    if not 0 < value <= most:
        raise ConfigError(f"{flag} {value:g}: it must be greater than 0, and {most:g} at most")
    return value


async def _change(reach: Reach, name: str, order: SetMode, *, wait: bool) -> int:
    visitor = reach.client()
    try:
        member, before = worker_named(await visitor.status(), name)
        seen = SetMode(
            mode=order.mode,
            last=order.last,
            generation=before.generation,
            share=order.share,
            timeout=order.timeout,
        )
        try:
            report = await visitor.set_mode(member.address, member.node, seen)
        except PdserveError as error:
            _say(name, error.message)
            return exit_codes.FAILED
        if report.refused:
            _say(name, f"it stays {report.mode}: {report.refused}")
            return exit_codes.FAILED
        done = outcome(report, order)
        _say(name, done or _progress(report))
        if wait and not done:
            report = await _wait(visitor, member, report, order.timeout + _MARGIN)
            _say(name, outcome(report, order) or f"{_progress(report)}, not done in time")
    finally:
        await visitor.close()
    changed = report.state == "serving" and _is(report, order)
    return exit_codes.OK if changed or not wait else exit_codes.FAILED


def worker_named(status: ClusterStatus, name: str) -> tuple[MemberStatus, ModeReport]:
    """The worker of this name and its mode. Raises `ConfigError` if it cannot change it."""
    (member,) = members_named(status, [name])
    if member.role != "worker":
        raise ConfigError(f"{name} has the role {member.role}: only workers have a mode")
    if member.report is None:
        raise ConfigError(printable(f"{name} does not answer: {member.silence}"))
    if member.report.mode is None:
        raise ConfigError(
            f"{name} cannot change its mode: its version of pdserve, {member.version}, is too old"
        )
    return member, member.report.mode


async def _wait(
    visitor: AdminClient, member: MemberStatus, report: ModeReport, patience: Seconds
) -> ModeReport:
    """Waits until the worker serves again; returns its last report. Errors: `WorkerLost`."""
    until = time.monotonic() + patience
    while report.state != "serving" and time.monotonic() < until:
        await asyncio.sleep(_POLL)
        try:
            status = await visitor.status()
        except HandshakeRefused:
            raise
        except PdserveError:
            continue  # whoever was asked is gone; another node is asked
        report = _latest(status, member) or report
    return report


def _latest(status: ClusterStatus, member: MemberStatus) -> ModeReport | None:
    """The worker's newest report; None: it did not answer in time. Errors: `WorkerLost`."""
    now = next((one for one in status.members if one.node == member.node), None)
    if now is None:
        raise WorkerLost(f"{member.node} has left the cluster")
    if now.epoch != member.epoch:
        raise WorkerLost(f"{member.node} was started anew, with its --mode")
    return None if now.report is None else now.report.mode


def _is(report: ModeReport, order: SetMode) -> bool:
    """True if the worker has the wanted mode."""
    return report.mode == order.mode and (order.mode != "both" or report.share == order.share)


def outcome(report: ModeReport, order: SetMode) -> str:
    """How a change ended, in words; empty: it has not."""
    if report.state != "serving":
        return ""
    mode = f"{report.mode} (share {report.share:g})" if report.share else report.mode
    if _is(report, order):
        return f"{mode}, generation {report.generation}"
    return f"still {mode}: {report.failed or 'the change was cancelled'}"


def _progress(report: ModeReport) -> str:
    if report.mode == report.target:
        return f"{report.state}, {report.mode} already"
    return (
        f"{report.state}, from {report.mode} to {report.target}: {report.left} requests and "
        f"prompts left, for {report.remaining:.0f} s at most"
    )


def _say(node: str, words: str) -> None:
    print(printable(f"{node}: {words}"), flush=True)
