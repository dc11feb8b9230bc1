"""Has workers pull the blocks that another worker holds: a new one begins with a warm cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.cli.outputs import printable
from pdserve.cli.tier.drop import workers_named
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes
from pdserve.messages.kv_pull import WarmUp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.cli.console.reach import Reach
    from pdserve.messages.kv_pull import KvTaken

__all__ = ["warm_from"]


async def warm_from(reach: Reach, source: str, names: Sequence[str]) -> int:
    """Sends the order to each worker, all but the source without names; prints what each has
    pulled. The exit status is 0 if all could. Errors: `ConfigError`."""
    if source in names:
        raise ConfigError("--from and --worker name the same worker")
    visitor, failed = reach.client(), False
    try:
        status = await visitor.status()
        workers_named(status, [source])
        others = [one for one in workers_named(status, names) if one.node != source]
        if not others:
            raise ConfigError("there is no other worker to warm")
        for worker in others:
            try:
                taken = await visitor.warm(worker.address, worker.node, WarmUp(source=source))
            except PdserveError as error:
                failed = True
                print(printable(f"{worker.node}: {error.message}"))
            else:
                failed |= taken.refused in _FAILED
                print(printable(f"{worker.node}: {_pulled(taken)}"))
    finally:
        await visitor.close()
    return exit_codes.FAILED if failed else exit_codes.OK


_FAILED: Final = frozenset({"busy", "closed", "epoch", "gone", "misfit", "unready"})
"""Reasons for which nothing, or not what was possible, came."""
_WORDS: Final = {
    "absent": "the rest was evicted meanwhile",
    "busy": "one of the two workers is busy",
    "deadline": "the time was over",
    "full": "no more fits beside its own blocks",
    "gone": "the other worker cannot be reached",
    "misfit": "its model or hash secret is another",
}


def _pulled(taken: KvTaken) -> str:
    text = f"pulled {taken.blocks} blocks"
    return f"{text}: {_WORDS.get(taken.refused, taken.refused)}" if taken.refused else text
