"""Has workers forget KV: of a tenant, what is old, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.cli.outputs import printable
from pdserve.cli.parser import value_of
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config.units import parse_duration
from pdserve.messages.tiers import DropOrder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from pdserve.cli.console.reach import Reach
    from pdserve.messages.kv_events import Tier
    from pdserve.messages.status import ClusterStatus, MemberStatus

__all__ = ["drop", "order_of", "workers_named"]


def order_of(parsed: argparse.Namespace) -> DropOrder:
    """What the command line asks for. Errors: `ConfigError`."""
    owners = [f"tenant:{name}" for name in parsed.tenant] + [f"salt:{text}" for text in parsed.salt]
    if parsed.all and owners:
        raise ConfigError("--all names everything, --tenant and --salt a part: give one of them")
    if not (parsed.all or owners or parsed.older):
        raise ConfigError(
            "say what is to be forgotten: --all, --tenant NAME, --salt TEXT or --older TIME"
        )
    return DropOrder(tuple(owners) or None, _older(parsed.older))


def _older(text: str) -> float:
    if not text:
        return 0.0
    seconds = value_of("--older", parse_duration, text)
    if not seconds:
        raise ConfigError("--older 0 is everything: say --all")
    return seconds


def workers_named(status: ClusterStatus, names: Sequence[str]) -> list[MemberStatus]:
    """The workers that are meant; all without names. Errors: `ConfigError`."""
    found = {member.node: member for member in status.members if member.role == "worker"}
    if not found:
        raise ConfigError("there is no worker in this cluster")
    for name in names:
        if name not in found:
            raise ConfigError(f"{name!r} is no worker; there are {', '.join(found)}")
    return [member for name, member in found.items() if not names or name in names]


async def drop(reach: Reach, order: DropOrder, names: Sequence[str]) -> int:
    """Sends the order to each worker and prints what each has forgotten; the exit status is 0 if
    all have followed it."""
    visitor, failed = reach.client(), False
    try:
        for worker in workers_named(await visitor.status(), names):
            try:
                report = await visitor.drop_kv(worker.address, worker.node, order)
            except PdserveError as error:
                failed = True
                print(printable(f"{worker.node}: {error.message}"))
            else:
                print(printable(f"{worker.node}: {_forgotten(report.blocks, order)}"))
    finally:
        await visitor.close()
    return exit_codes.FAILED if failed else exit_codes.OK


def _forgotten(blocks: Mapping[Tier, int], order: DropOrder) -> str:
    parts = [f"{count} on {tier}" for tier, count in blocks.items()]
    if parts:
        return f"forgot blocks: {', '.join(parts)}"
    # `--older` spares the device; engines that schedule by themselves do not count.
    return "has no tier below its device" if order.older else "forgot what was cached"
