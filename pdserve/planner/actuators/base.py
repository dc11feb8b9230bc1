"""Defines the port through which the planner starts and stops workers.

An actuator knows how processes begin and end in one environment: agents of hosts, Slurm, systemd,
Kubernetes. It does not know why a worker is wanted, whether it serves well, or what a request is.
The planner drains a worker before it has it stopped.

What every actuator keeps, and `testing.actuators.suite` checks:

- A change id names at most one instance for ever. Asking again returns that instance as it is now,
  also one that has ended.
- The actuator remembers by means that outlive the planner. A new planner finds everything by
  `list`.
- The worker gets the id by `--change=ID`, and its card carries it.
- No call blocks the loop, and each ends within the actuator's deadline.

| error | meaning | what helps |
|---|---|---|
| `ActuatorTransient` | no answer, or a failure that passes | the same call again; `list` first |
| `ActuatorDenied` | permission, an unknown kind or mode | an operator |
| `ActuatorExhausted` | no room now; `retry_after` if it is known | another kind, or time |

The message of each is in the actuator's own words.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.ids import CHANGE_PATTERN
from pdserve.messages.planner import START_MODES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Instance, Kind

__all__ = [
    "DEADLINE",
    "KEEP_ENDED",
    "Actuator",
    "ActuatorDenied",
    "ActuatorError",
    "ActuatorExhausted",
    "ActuatorTransient",
    "check_order",
    "within",
]

DEADLINE: Final[Seconds] = 10.0
"""Longest that a call takes unless the actuator is given another time: two ticks of the planner."""
KEEP_ENDED: Final[Seconds] = 300.0
"""How long an instance that has ended stays in `list`, so that the planner reads why. Slurm forgets
jobs after the same time (`MinJobAge`)."""

_CHANGE: Final = re.compile(CHANGE_PATTERN)


class Actuator(Protocol):
    """One way to start and stop workers. All calls may run at the same time."""

    @property
    def name(self) -> str:
        """Its name in `Kind.actuator` and `Instance.actuator`, unique among a planner's."""
        ...

    async def kinds(self) -> Sequence[Kind]:
        """Returns the kinds of workers that it can start now. Errors: `ActuatorTransient`,
        `ActuatorDenied`."""
        ...

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """Has a worker started; returns when the order is taken, long before the worker serves.

        A repeat starts nothing; it returns the instance as it is. An order that was taken and then
        fails is an instance in state `failed` with its reason.

        Args: `mode` is one of `START_MODES`; `change` fits `CHANGE_PATTERN`.

        Errors: `ActuatorTransient`: the order may have been taken, and the same id may be asked for
        again. `ActuatorDenied`, `ActuatorExhausted`: nothing was started. Cancellation: as
        `ActuatorTransient`.
        """
        ...

    async def stop(self, change: str, grace: Seconds) -> None:
        """Has an instance ended; returns when the order is taken, not when the process is gone.

        The worker is asked to drain (SIGTERM); what still runs after `grace` seconds is killed. An
        instance that is still pending is withdrawn. An unknown or ended one is left alone. A repeat
        may shorten the grace and never lengthens it.

        Errors: `ActuatorTransient`, `ActuatorDenied`.
        """
        ...

    async def list(self) -> Sequence[Instance]:
        """Returns every instance that was started through this actuator, by any planner, and has
        not ended for more than about `KEEP_ENDED` seconds.

        An instance whose host does not answer has the state `unknown`: it may run. Only a process
        that is known to be gone is `ended` or `failed`. One that neither its host nor the cluster
        has seen for long may leave the list.

        It may finish what was ordered before, such as the end of an instance whose grace is over;
        for a planner that only advises it does not.

        Errors: `ActuatorTransient`, `ActuatorDenied`: nothing is known now. That is not an empty
        list.
        """
        ...

    async def close(self) -> None:
        """Releases what the actuator holds. Instances go on. Idempotent."""
        ...


def check_order(mode: str, change: str) -> None:
    """Refuses an order that no actuator may carry out. Errors: `ActuatorDenied`."""
    if mode not in START_MODES:
        raise ActuatorDenied(
            f"a worker does not start in mode {mode!r}: use one of {', '.join(START_MODES)}"
        )
    if not _CHANGE.fullmatch(change):
        raise ActuatorDenied(
            f"change id {change!r} is not 1 to 64 letters, digits, dots, dashes and underscores, "
            "the first a letter, a digit or an underscore"
        )


@asynccontextmanager
async def within(seconds: Seconds, what: str) -> AsyncIterator[None]:
    """Bounds the work in its block. Errors: `ActuatorTransient` after `seconds`, with `what` was
    not done."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ActuatorTransient(f"{what}: no answer within {seconds:g} s") from None
