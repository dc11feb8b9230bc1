"""Runs `pdserve disagg HOW`: changes the disaggregation mode of decode workers until they restart.

It asks one node for the members and sends the change to each decode worker. It joins nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import closest_match
from pdserve.worker.config import DISAGG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.cli.console.reach import Reach
    from pdserve.launch.cluster.admin_client import AdminClient
    from pdserve.messages.handoff import Disagg
    from pdserve.messages.status import ClusterStatus, MemberStatus

__all__ = ["run"]

_MEANING: Final = """\
rule      elsewhere if it is long and few wait there (--disagg-min-tokens, --disagg-max-queue)
predict   wherever the first token is predicted sooner, harm to running streams counted
always    elsewhere whenever that is possible
never     where it is decoded"""


def run(arguments: list[str]) -> int:
    """Changes the mode and prints each previous one; the exit status is 0 if all workers
    confirmed."""
    parser = Parser(
        "pdserve disagg",
        f"Change where decode workers have prompts prefilled, until they restart:\n\n{_MEANING}",
    )
    parser.own.add_argument("how", metavar="HOW", help=f"One of {', '.join(DISAGG)}.")
    parser.own.add_argument(
        "--worker",
        metavar="NODE",
        action="append",
        default=[],
        help="Only this worker; may be repeated.",
    )
    add_reach(parser)
    parsed = parser.parse(arguments)
    how = _checked(parsed.how)
    return asyncio.run(_tell(reach_of(parsed), how, parsed.worker))


def _checked(how: str) -> Disagg:
    if how not in DISAGG:
        close = closest_match(how, DISAGG)
        hint = f", did you mean {close!r}?" if close else f": use one of {', '.join(DISAGG)}"
        raise ConfigError(f"{how!r} is unknown{hint}")
    return cast("Disagg", how)


async def _tell(reach: Reach, how: Disagg, only: list[str]) -> int:
    visitor = reach.client()
    try:
        workers = list(decode_workers(await visitor.status(), only))
        heard = [await _tell_one(visitor, worker, how) for worker in workers]
    finally:
        await visitor.close()
    return exit_codes.OK if all(heard) else exit_codes.FAILED


def decode_workers(status: ClusterStatus, only: list[str]) -> Iterator[MemberStatus]:
    """The decode workers to change. Raises `ConfigError` if there is none, or none of a given
    name."""
    found = {
        member.node: member
        for member in status.members
        if member.report is not None
        and member.report.handoffs is not None
        and member.report.handoffs.mode == "decode"
    }
    if not found:
        raise ConfigError("no decode worker answers: start one with --role=worker --mode=decode")
    for name in only:
        if name not in found:
            raise ConfigError(f"{name!r} is no decode worker; there are {', '.join(found)}")
    return (member for name, member in found.items() if not only or name in only)


async def _tell_one(visitor: AdminClient, worker: MemberStatus, how: Disagg) -> bool:
    try:
        before = await visitor.set_disagg(worker.address, how)
    except PdserveError as error:
        print(printable(f"{worker.node}: {error.message}"))
        return False
    print(printable(f"{worker.node}: {how}, before {before}"))
    return True
