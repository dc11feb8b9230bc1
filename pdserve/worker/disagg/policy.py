"""Where a prompt is prefilled: here, between the steps of running streams, or on a prefill worker.

    rule      elsewhere if many tokens are uncached here and few requests wait for a prefill worker
    predict   elsewhere if the first token comes sooner that way. A prefill here also delays every
              running stream by as long as it takes: that counts too, by a little less than a wait
              of one's own
    always    elsewhere whenever it is possible
    never     here

The coefficients of the prediction are learnt from what prefills took, from the first one on; until
then they are guesses. Every decision has a reason, one word, for metric, log and header.

Pure: numbers in, a decision out. Owned by the decode worker's driver.
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
"""What an observation still weighs when the next one comes: about the last fifty count."""
_PRIOR_WEIGHT: Final = 3.0
"""A guess counts like so many observations, until those have come."""
_HARM: Final = 0.6
"""A second that a running stream waits, in seconds of waiting for a first token. In simulation the
most requests are served well between 0.5 and 1; with less, streams stutter beside idle prefill
workers, with more, prompts wait for those without end (bench/results/disagg.md)."""
_LEAST_PATIENCE: Final[Seconds] = 1.0
_ALWAYS_PATIENCE: Final[Seconds] = 30.0
"""With `always`, who waits for a prefill worker has been asked to."""


class LinearFit:
    """`base + slope * x`, neither negative, fitted to what was seen lately.

    Least squares over sums that fade. While all observations have about the same `x`, nothing is
    said of the slope: the prior's shape stands, scaled to what was seen.
    """

    def __init__(self, base: Seconds, slope: Seconds, typical: float) -> None:
        """The prior, and the `x` that it is a guess for."""
        self.base, self.slope = base, slope
        self.observed = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for x in (0.5 * typical, 1.5 * typical):
            self._add(x, base + slope * x, _PRIOR_WEIGHT / 2)

    def __call__(self, x: float) -> Seconds:
        return self.base + self.slope * x

    def learn(self, x: float, seconds: Seconds) -> None:
        """One observation. Nonsense is passed over."""
        if not (x >= 0 and 0 <= seconds < 1e6):
            return
        self.observed += 1
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _FORGET)
        self._add(x, seconds, 1.0)
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
    """What prefills take, here and elsewhere."""

    def __init__(self) -> None:
        self.here = LinearFit(0.01, 1e-4, 2000)
        """Engine time of a prefill here, by uncached tokens."""
        self.there = LinearFit(0.01, 1e-4, 2000)
        """From the first step to the last at a prefill worker, by the tokens uncached there."""
        self.road = LinearFit(0.005, 5e-6, 2000)
        """What else passes between a claim and the first token: asking, sending, checking; by the
        tokens that are sent, and those that were already on their way here: they share this
        worker's network."""
        self.cached_share = 0.0
        """Of a prompt, what prefill workers had already, lately."""

    def local(self, uncached: int, seconds: Seconds) -> None:
        """A prefill here has taken so much of the engine's time."""
        self.here.learn(uncached, seconds)

    def remote(
        self, tokens: int, cached_there: int, sent: int, prefill: Seconds, whole: Seconds
    ) -> None:
        """A prompt came from elsewhere: `whole` from its claim to the first token,
        `prefill` of it at the prefill worker's engine; `sent` counts what came before it
        too."""
        cached_there = min(cached_there, tokens)
        self.there.learn(tokens - cached_there, prefill)
        self.road.learn(sent, max(0.0, whole - prefill))
        share = cached_there / tokens if tokens else 0.0
        self.cached_share += 0.05 * (share - self.cached_share)

    def overdue(self, tokens: int, so_far: Seconds) -> None:
        """A prompt that had not come after `so_far` seconds was given up: it takes longer. Without
        this, who never succeeds would never learn that prefills elsewhere are slow."""
        uncached = tokens * (1 - self.cached_share)
        if so_far > self.there(uncached):
            self.there.learn(uncached, so_far)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggInputs:
    """What is known of a request and its surroundings when it is decided."""

    tokens: int
    """That must be in KV: the prompt, and output of earlier attempts."""
    cached: int = 0
    """Leading ones that are in the pool here."""
    obstacle: str = ""
    """Why it cannot be elsewhere, one word; empty: it can."""
    streams: int = 0
    """That run here and would wait for a prefill."""
    backlog: int = 0
    """Prompt tokens that the engine here has to compute before."""
    queue: QueueState | None = None
    """None: there is no queue, or no prefill worker."""
    coming: int = 0
    """Prompt tokens of other requests that are still to come from prefill workers."""
    late: float = 1.0
    """How many times as long as predicted one of those takes already; 1: none is late."""

    @property
    def uncached(self) -> int:
        return max(1, self.tokens - self.cached)


@dataclass(frozen=True, slots=True)
class DisaggDecision:
    """Where, and why."""

    remote: bool
    reason: str
    here: Seconds = 0.0
    """Predicted until the first token, the harm to running streams included."""
    there: Seconds = 0.0
    """The same for a prefill elsewhere."""
    fill: Seconds = 0.0
    """Of that, from the claim on."""

    @property
    def advantage(self) -> Seconds:
        """What is to be gained by going elsewhere."""
        return max(0.0, self.here - self.there)


class DisaggPolicy:
    """Decides by the mode in force."""

    def __init__(self, mode: Disagg, *, min_tokens: int = 512, max_queue: int = 10) -> None:
        self.mode: Disagg = mode
        """How it is decided from now on."""
        self.min_tokens = min_tokens
        self.max_queue = max_queue
        self.learnt = PrefillCosts()

    def decide(self, prospect: DisaggInputs) -> DisaggDecision:
        """Where this request's prompt is prefilled."""
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
        """Seconds until the first token here, harm to others included, and elsewhere."""
        here, wait, fill = self._predict(prospect)
        return here, wait + fill * prospect.late

    def _predict(self, prospect: DisaggInputs) -> tuple[Seconds, Seconds, Seconds]:
        """Here; elsewhere until the claim, and from there on. Who is late teaches nothing before it
        has come; that others will be late too is to be expected at once."""
        learnt = self.learnt
        work = learnt.here(prospect.uncached)
        here = learnt.here.slope * prospect.backlog + work * (1 + _HARM * prospect.streams)
        uncached_there = prospect.tokens * (1 - learnt.cached_share)
        prefill = learnt.there(uncached_there)
        road = learnt.road(prospect.uncached + prospect.coming)
        return here, self._wait(prospect.queue), prefill + road

    def _wait(self, queue: QueueState | None) -> Seconds:
        """For a prefill worker: work before this one, over all workers; none if one is idle."""
        if queue is None or not queue.workers:
            return 0.0
        ahead = queue.uncomputed_tokens
        if queue.credits <= queue.waiting:
            ahead += queue.waiting_tokens
        items = queue.waiting if queue.credits <= queue.waiting else 0
        there = self.learnt.there
        return (there.slope * ahead + there.base * items) / queue.workers

    def patience(self, decision: DisaggDecision, rest: Seconds | None) -> Seconds:
        """How long nobody may take it, with `rest` seconds until its deadline."""
        return patience(decision.advantage, rest, always=self.mode == "always")


def patience(advantage: Seconds, rest: Seconds | None, *, always: bool = False) -> Seconds:
    """Twice what is to be gained, but neither less than a moment nor more than a third of the time
    that is left."""
    least = _ALWAYS_PATIENCE if always else _LEAST_PATIENCE
    wanted = max(least, 2 * advantage)
    return wanted if rest is None else max(0.0, min(wanted, rest / 3))
