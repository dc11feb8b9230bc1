"""All that a router knows and does, without its sockets: the pool, the ledger and the policy.

The service turns what arrives into calls here, and what comes back into answers and publications.
News of members and load goes through the desk, because both the pool and the ledger must hear it;
what workers and other routers say of single bookings goes to `bookings` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import Overloaded
from pdserve.router.bookings import Bookings, Life
from pdserve.router.decide import Refusal, decide
from pdserve.router.index.view import PrefixIndex
from pdserve.router.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Seconds
    from pdserve.messages.routing import Route, WorkerLoad
    from pdserve.router.bookings import Booking, End
    from pdserve.router.config import RouterConfig
    from pdserve.router.policies.base import Policy
    from pdserve.router.pool import Facts

__all__ = ["Desk"]


class Desk:
    """One router's. Every call takes the time, and none waits."""

    def __init__(
        self,
        config: RouterConfig,
        policy: Policy,
        random: Random,
        on_end: Callable[[Booking, End], None] = lambda booking, why: None,
    ) -> None:
        """`on_end` hears of each booking that `route` made, once, when it ends."""
        self._config = config
        self._policy = policy
        self._random = random
        self.bookings = Bookings(config, random, on_end)
        self.pool = Pool(config, self.bookings)
        self.index = PrefixIndex(config, remember=getattr(policy, "needs_routed", False))

    def worker(self, now: Seconds, facts: Facts) -> None:
        """A worker appeared, or something about it changed."""
        self.bookings.worker_up(facts.worker)
        self.pool.put(now, facts)

    def gone(self, now: Seconds, life: Life) -> None:
        """A member's life is over, whatever its role."""
        self.bookings.worker_gone(life)
        self.index.worker_gone(life)
        self.bookings.asker_gone(life)
        self.bookings.peer_gone(life)
        self.pool.gone(now, life)

    def load(self, worker: Life, load: WorkerLoad | None) -> None:
        """A worker's newest report; None: its reports no longer arrive."""
        self.pool.report(worker, load)
        if load is None:
            self.bookings.report_lost(worker)
        else:
            self.bookings.reported(worker)

    def route(self, now: Seconds, asker: Life, question: Route) -> Booking:
        """Decide, and charge the worker at once.

        Errors: `ModelNotFound`, `NotReady`, `NoWorker`, `Overloaded`; what the policy raises.
        """
        chosen = decide(question, self.pool.view(now, question.model), self._policy, self._random)
        if isinstance(chosen, Refusal):
            raise chosen.error(self._config.retry_after)
        if self.bookings.full:
            raise Overloaded(
                f"this router has {len(self.bookings)} requests under way, as many as it may",
                retry_after=self._config.retry_after,
            )
        worker = Life(chosen.node, chosen.epoch)
        booking = self.bookings.place(now, worker, asker, question.n, question.prompt_tokens)
        self.pool.chosen(question.model, worker.node)
        return booking

    def sweep(self, now: Seconds) -> None:
        """Drop what ran out; every `RouterConfig.sweep_interval`."""
        self.bookings.expire(now)
        self.index.sweep(now)
        self.pool.forget(now)
