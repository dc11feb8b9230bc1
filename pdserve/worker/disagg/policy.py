"""Decides where a prompt is prefilled: on this worker, or on a prefill worker.

    rule      remotely if many tokens are uncached here and few requests wait for a prefill worker
    predict   remotely if the first token is predicted to come sooner. A local prefill also delays
              every running stream while it lasts; this delay counts too, but somewhat less than
              a delay of the first token
    always    remotely whenever possible
    never     locally

The coefficients of the prediction are learnt from past prefills, starting with the first one; until
then they are guesses. That of the transfer comes from the paths (`first_guess`). Every decision has
a one-word reason, for metrics, log and header.

Pure. Owned by the decode handler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import Disagg, QueueState

__all__ = [
    "DisaggDecision",
    "DisaggInputs",
    "DisaggPolicy",
    "LinearFit",
    "PrefillCosts",
    "patience",
]

_FORGET: Final = 0.98
"""Factor by which an observation loses weight with each later one: about the last fifty count."""
_PRIOR_WEIGHT: Final = 3.0
"""Weight of the initial guess, in observations."""
_HARM: Final = 0.6
"""Cost of delaying one running stream by one second, in seconds of time to first token. In
simulation most requests meet their SLO with values between 0.5 and 1. With less, streams stutter
while prefill workers are idle; with more, prompts wait without limit for prefill workers
(bench/results/disagg.md)."""
_LEAST_PATIENCE: Final[Seconds] = 1.0
_ALWAYS_PATIENCE: Final[Seconds] = 30.0
"""With `always` the operator has accepted to wait this long for a prefill worker."""


class LinearFit:
    """`base + slope * x`, both non-negative, fitted to recent observations.

    Least squares over exponentially decaying sums. While all observations have about the same `x`
    the slope is unknown, so the prior is scaled to fit them.
    """

    def __init__(self, base: Seconds, slope: Seconds, typical: float) -> None:
        """The prior's coefficients, and the `x` around which it holds."""
        self.base, self.slope = base, slope
        self.observed = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._prior = base, slope
        self._points = 0.5 * typical, 1.5 * typical
        self._weight = _PRIOR_WEIGHT / 2
        """What each of the prior's points weighs now."""
        for x in self._points:
            self._add(x, base + slope * x, self._weight)

    def __call__(self, x: float) -> Seconds:
        return self.base + self.slope * x

    def learn(self, x: float, seconds: Seconds) -> None:
        """Adds one observation; ignores values that are negative, not finite or too large."""
        if not (x >= 0 and 0 <= seconds < 1e6):
            return
        self.observed += 1
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _FORGET)
        self._weight *= _FORGET
        self._add(x, seconds, 1.0)
        self._fit()

    def suppose(self, base: Seconds, slope: Seconds) -> None:
        """Takes another prior; it has the weight that the former one had left."""
        for x in self._points:
            more = base - self._prior[0] + (slope - self._prior[1]) * x
            self._y += self._weight * more
            self._xy += self._weight * x * more
        self._prior = base, slope
        self._fit()

    def _add(self, x: float, y: Seconds, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-4 * mean_x * mean_x:  # one length only
            known = self.base + self.slope * mean_x
            scale = mean_y / known if known > 0 else 1.0
            self.base, self.slope = self.base * scale, self.slope * scale
            return
        slope = (self._xy / self._n - mean_x * mean_y) / spread
        self.slope = max(0.0, min(slope, mean_y / mean_x if mean_x > 0 else 0.0))
        self.base = max(0.0, mean_y - self.slope * mean_x)


class PrefillCosts:
    """Learnt costs of local and remote prefills."""

    def __init__(self) -> None:
        self.here = LinearFit(0.01, 1e-4, 2000)
        """Engine seconds of a local prefill, by uncached tokens."""
        self.there = LinearFit(0.01, 1e-4, 2000)
        """Seconds from queueing to the end of the prefill at the prefill worker, by tokens uncached
        there."""
        self.transfer = LinearFit(0.005, 5e-6, 2000)
        """The other seconds between claim and first token (opening, transfer, check), by tokens to
        transfer. The tokens already on their way here count too: they share this worker's
        network."""
        self.cached_share = 0.0
        """Recent mean share of a prompt that prefill workers had cached."""

    def guess_transfer(self, token: Seconds) -> None:
        """Begins with so many transfer seconds per token, as a path's rate says. Ignored after the
        first remote prefill, which has told more: the rest of its time too."""
        if not self.transfer.observed:
            self.transfer = LinearFit(self.transfer.base, token, 2000)

    def local(self, uncached: int, seconds: Seconds) -> None:
        """Records a local prefill. Prefill workers serve the same model, so until they have shown
        what they take, they are taken for as fast as this one."""
        self.here.learn(uncached, seconds)
        self.there.suppose(self.here.base, self.here.slope)

    def remote(
        self, tokens: int, cached_there: int, sent: int, prefill: Seconds, whole: Seconds
    ) -> None:
        """Records a remote prefill. `whole`: seconds from claim to first token; `prefill`: the part
        of it in the prefill worker's engine; `sent`: tokens transferred, including those queued
        before this prompt."""
        cached_there = min(cached_there, tokens)
        self.there.learn(tokens - cached_there, prefill)
        self.transfer.learn(sent, max(0.0, whole - prefill))
        share = cached_there / tokens if tokens else 0.0
        self.cached_share += 0.05 * (share - self.cached_share)

    def overdue(self, tokens: int, so_far: Seconds) -> None:
        """Records a remote prefill that was given up after `so_far` seconds: it would have taken
        longer. Without this, a worker whose remote prefills never succeed would not learn that they
        are slow."""
        uncached = tokens * (1 - self.cached_share)
        if so_far > self.there(uncached):
            self.there.learn(uncached, so_far)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggInputs:
    """The inputs of one decision."""

    tokens: int
    """Tokens that must be in KV: the prompt, and output of earlier workers."""
    cached: int = 0
    """Leading tokens in the pool here."""
    obstacle: str = ""
    """The reason, in one word, why the prompt cannot be prefilled remotely; empty if it can."""
    streams: int = 0
    """Streams running here, which a local prefill would delay."""
    backlog: int = 0
    """Prompt tokens that the engine here has to compute first."""
    queue: QueueState | None = None
    """None: there is no queue, or no prefill worker."""
    coming: int = 0
    """Prompt tokens of other requests that prefill workers have still to deliver."""
    late: float = 1.0
    """The largest ratio of actual to predicted time among those; 1: none is late."""

    @property
    def uncached(self) -> int:
        return max(1, self.tokens - self.cached)


@dataclass(frozen=True, slots=True)
class DisaggDecision:
    """Where to prefill, and why."""

    remote: bool
    reason: str
    here: Seconds = 0.0
    """Predicted seconds until the first token if prefilled here, including the cost of delaying
    streams."""
    there: Seconds = 0.0
    """Predicted seconds until the first token if prefilled remotely."""
    fill: Seconds = 0.0
    """The part of a remote prefill after the claim, in seconds."""

    @property
    def advantage(self) -> Seconds:
        """Seconds gained by a remote prefill; 0 if none."""
        return max(0.0, self.here - self.there)


class DisaggPolicy:
    """Decides by the current mode."""

    def __init__(self, mode: Disagg, *, min_tokens: int = 512, max_queue: int = 10) -> None:
        self.mode: Disagg = mode
        """The mode of further decisions; may be changed at any time."""
        self.min_tokens = min_tokens
        self.max_queue = max_queue
        self.learnt = PrefillCosts()

    def decide(self, prospect: DisaggInputs) -> DisaggDecision:
        """Decides where this request's prompt is prefilled."""
        here, wait, fill = self._predict(prospect)
        there = wait + fill * prospect.late
        remote, reason = self._decide(prospect, here, there)
        return DisaggDecision(remote, reason, here, there, fill)

    def _decide(self, prospect: DisaggInputs, here: Seconds, there: Seconds) -> tuple[bool, str]:
        queue = prospect.queue
        if self.mode == "never":
            return False, "never"
        if prospect.obstacle:
            return False, prospect.obstacle
        if queue is None or not queue.workers:
            return False, "no_prefill_worker"
        if self.mode == "always":
            return True, "always"
        if self.mode == "predict":
            return (True, "predicted_remote") if there < here else (False, "predicted_local")
        # 0 means that no prompt is too short.
        if self.min_tokens and prospect.uncached <= self.min_tokens:
            return False, "short_prompt"
        if queue.waiting > self.max_queue:
            return False, "queue_full"
        return True, "rule"

    def predict(self, prospect: DisaggInputs) -> tuple[Seconds, Seconds]:
        """Predicted seconds until the first token: (here, with the cost to other streams;
        remotely)."""
        here, wait, fill = self._predict(prospect)
        return here, wait + fill * prospect.late

    def _predict(self, prospect: DisaggInputs) -> tuple[Seconds, Seconds, Seconds]:
        """Returns (local seconds, remote seconds until the claim, remote seconds after it). A late
        prompt has not trained the fit yet, so callers scale the last one by `late`."""
        learnt = self.learnt
        work = learnt.here(prospect.uncached)
        here = learnt.here.slope * prospect.backlog + work * (1 + _HARM * prospect.streams)
        uncached_there = prospect.tokens * (1 - learnt.cached_share)
        prefill = learnt.there(uncached_there)
        transfer = learnt.transfer(prospect.uncached + prospect.coming)
        return here, self._wait(prospect.queue), prefill + transfer

    def _wait(self, queue: QueueState | None) -> Seconds:
        """Expected seconds until a prefill worker claims the prompt: the work ahead of it, divided
        by the number of workers; 0 if a worker is idle."""
        if queue is None or not queue.workers:
            return 0.0
        ahead = queue.uncomputed_tokens
        if queue.credits <= queue.waiting:
            ahead += queue.waiting_tokens
        items = queue.waiting if queue.credits <= queue.waiting else 0
        there = self.learnt.there
        return (there.slope * ahead + there.base * items) / queue.workers

    def patience(self, decision: DisaggDecision, rest: Seconds | None) -> Seconds:
        """Seconds to wait for a prefill worker; `rest`: seconds until the request's deadline."""
        return patience(decision.advantage, rest, always=self.mode == "always")


def patience(advantage: Seconds, rest: Seconds | None, *, always: bool = False) -> Seconds:
    """Seconds to wait: twice the expected gain, at least `_LEAST_PATIENCE` (with `always`,
    `_ALWAYS_PATIENCE`), at most a third of the remaining time."""
    least = _ALWAYS_PATIENCE if always else _LEAST_PATIENCE
    wanted = max(least, 2 * advantage)
    return wanted if rest is None else max(0.0, min(wanted, rest / 3))
