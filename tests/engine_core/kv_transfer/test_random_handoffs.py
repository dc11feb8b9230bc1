"""Random lives of two cores that hand prompts over: whatever comes in whatever order, the books
balance on both sides, no block is used that a peer may write to, and everybody has one end.

After each step both pools check themselves, and free blocks are checked for late writes; at the end
every submission has ended in exactly one way, with the tokens it would get alone, every prefill has
had exactly one last word, and no block is held or in quarantine.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdserve.errors import DeadlineExceeded, EngineError, InvalidRequest, Overloaded
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    AttemptBlocksOpened,
    AttemptLost,
    ClearCache,
    EngineSpec,
    Prefilled,
    PrefillLocally,
    PrefillSent,
    Rejected,
    SetHashSecret,
    TransferSpec,
)
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens
from pdserve.token_ids import token_ids
from tests.support.disagg_pair import DisaggPair, make_pair
from tests.support.random_lives import run_lives
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.messages.engine import Event
    from pdserve.testing.output_checker import OutputChecker

MAX_LEN = 48
BLOCK = 4
POISON = 5
SECRETS = (b"one", b"two")

tokens = st.integers(3, 12)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.builds(lambda t, n: [t] * n, st.integers(6, 7), st.integers(1, 46)),  # shared prefixes
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    given = st.lists(tokens.filter(lambda t: t != POISON), min_size=1, max_size=6)
    return GenerateRequest(
        request_id=f"r{draw(st.integers(0, 10**6))}",
        model="m",
        prompt=draw(prompts),
        n=n,
        output=[draw(given)] if n == 1 and draw(st.booleans()) else [],
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        deadline=draw(st.sampled_from([None, None, 5.0, 20.0])),
        sampling=SamplingParams(
            max_tokens=draw(st.integers(1, 30)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            eos_token_ids=draw(st.sampled_from([(), (2,), (2, 7)])),
            stop_token_ids=draw(st.sampled_from([(), (2, 9, 30, 31)])),
            logprobs=draw(st.sampled_from([None, None, 1])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        ),
    )


class PairMachine(RuleBasedStateMachine):
    """What two nodes might say, and what the wire might do."""

    visited: ClassVar[Counter[str]] = Counter()

    @initialize(
        blocks=st.tuples(st.integers(12, 40), st.integers(12, 40)),
        batch=st.integers(6, 40),
        cache=st.booleans(),
        sequences=st.integers(1, 5),
        waiting=st.sampled_from([3, 100]),
        unfilled=st.sampled_from([0.1, 0.3, 1.0]),
        seed=st.integers(0, 1 << 32),
        stopped=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        blocks: tuple[int, int],
        batch: int,
        cache: bool,
        sequences: int,
        waiting: int,
        unfilled: float,
        seed: int,
        stopped: bool,
    ) -> None:
        self.stopped = stopped
        self.rng = random.Random(seed)
        spec = EngineSpec(
            engine=ENGINE,
            model="",
            block_size=BLOCK,
            max_batch_tokens=batch,
            max_sequences=sequences,
            max_waiting=waiting,
            max_model_len=MAX_LEN,
            prefix_cache=cache,
            hash_secret=SECRETS[0],
            transfer=TransferSpec(verify="all", unfilled=unfilled),
        )
        options = {"raise_on": str(POISON), "vocab": "40", "layers": "4"}
        p, d = ({"options": options | {"blocks": str(count)}} for count in blocks)
        self.executors = (ScriptedExecutor(), ScriptedExecutor())
        self.pair = make_pair(self.executors, spec, p=p, d=d)
        self.tickets: set[tuple[int, int]] = set()
        self.prefills: dict[int, Prefilled | None] = {}
        """P's handles: what came of them so far."""
        self.ended: set[int] = set()
        """Those that have had their last word."""
        self.withdrawn: set[int] = set()
        self.handles: list[int] = []
        self.over: set[tuple[int, int]] = set()
        """Attempts that were lost."""

    # ------------------------------------------------------------------ requests

    @rule(request=requests())
    def submit(self, request: GenerateRequest) -> None:
        self.pair.d.engine.submit(request)

    @rule(request=requests())
    def submit_to_p(self, request: GenerateRequest) -> None:
        self.pair.p.engine.submit(request)

    @rule(request=requests(), copies=st.sampled_from([1, 1, 3]))
    def submit_remote(self, request: GenerateRequest, copies: int) -> None:
        for _ in range(copies):
            self.handles.append(self.pair.submit(request)[0])
        self.step_d(1)

    @rule(token=st.integers(6, 12), count=st.integers(4, 30))
    def crowd(self, token: int, count: int) -> None:
        """What grows long takes the blocks that attempts wait for."""
        for n in range(3):
            sampling = SamplingParams(max_tokens=40, ignore_eos=True, seed=n)
            self.pair.d.engine.submit(
                GenerateRequest(
                    request_id=f"c{n}", model="m", prompt=token_ids([token + n]), sampling=sampling
                )
            )
        self.step_d(count)

    @rule(request=requests())
    def starve(self, request: GenerateRequest) -> None:
        """Running sequences grow into what was reserved, and the attempt comes too late."""
        handle, _ = self.pair.submit(request)
        self.handles.append(handle)
        self.step_d(1)
        self.crowd(8, 30)
        self.pair.open(handle)
        self.step_d(1)
        self.pair.d.clock.advance(2.5)
        self.step_d(1)

    @rule(
        request=requests(),
        rounds=st.integers(1, 30),
        fault=st.sampled_from(["", "", "late", "lost", "corrupt"]),
    )
    def whole_course(self, request: GenerateRequest, rounds: int, fault: str) -> None:
        """As nodes do it, but for one fault of the wire."""
        self.pair.net.faults = [fault]
        handle, _ = self.pair.submit(request)
        self.handles.append(handle)
        for _ in range(rounds):
            self.step_d(1)
            if handle in self.pair.admitted and not self.pair.attempts.get(handle):
                self.pair.open(handle)
            self.follow()
            self.pair.net.step(self.rng)
            self.step_p(1)
            for prefilled in self.prefills.values():
                if prefilled is not None and self.pair._of[prefilled.handle][0] == handle:
                    self.pair.activate(prefilled)

    @rule(request=requests(), copies=st.integers(1, 5), count=st.integers(20, 120))
    def crossing(self, request: GenerateRequest, copies: int, count: int) -> None:
        """Several courses at once, each of which may stop anywhere, over a wire with faults."""
        rng, pair = self.rng, self.pair
        for _ in range(copies):
            more = rng.choices(range(6, 12), k=rng.randrange(MAX_LEN // 2))
            longer = request.prompt + token_ids(more)
            changed = msgspec.structs.replace(request, prompt=longer[: MAX_LEN - 2])
            self.handles.append(pair.submit(changed)[0])
        for _ in range(count):
            match rng.randrange(12):
                case 0 | 1:
                    self.step_d(1)
                case 2 | 3:
                    self.step_p(1)
                case 4 | 5 | 6:
                    pair.net.step(rng)
                case 7:
                    again = rng.random() < 0.2
                    waiting = [h for h in pair.admitted if again or h not in pair.attempts]
                    if waiting:
                        pair.open(rng.choice(waiting))
                case 8 | 9:
                    self.follow()
                case 10:
                    self.activate("")
                case _:
                    pair.net.faults = [rng.choice(["", "", "", "lost", "late", "corrupt"])]

    def follow(self) -> None:
        for opened in list(self.pair.opened.values()):
            if (opened.handle, opened.attempt) not in self.tickets:
                self.tickets.add((opened.handle, opened.attempt))
                self.prefills[self.pair.prefill(opened)] = None

    # ------------------------------------------------------------------ what nodes say

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.pair.open(data.draw(st.sampled_from(self.handles)))

    @rule()
    def prefill(self) -> None:
        self.follow()

    @rule(wrong=st.sampled_from(["", "", "", "tokens", "parts", "first"]))
    def activate(self, wrong: str) -> None:
        """All that P has prefilled; what is over already is ignored."""
        for handle, prefilled in self.prefills.items():
            if prefilled is None:
                continue
            handoff = prefilled.handoff
            match wrong:
                case "tokens":
                    handoff = msgspec.structs.replace(handoff, tokens=handoff.tokens + 1)
                case "parts":
                    handoff = msgspec.structs.replace(handoff, parts=0)
                case "first":
                    handoff = msgspec.structs.replace(handoff, first=())
            request, attempt = self.pair._of[handle]
            self.pair.d.core.handle(Activate(request, attempt, handoff))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), what=st.sampled_from(["give up", "here", "abort", "abort at P"]))
    def change_of_mind(self, data: st.DataObject, what: str) -> None:
        handle = data.draw(st.sampled_from(self.handles))
        attempt = self.pair.attempts.get(handle, 0)
        core = self.pair.d.core
        match what:
            case "give up":
                core.handle(AbortAttempt(handle, attempt))
            case "here":
                core.handle(PrefillLocally(handle))
            case "abort":
                self.pair.d.engine.abort(self.pair.d.engine.ledgers[handle])
            case _:
                for mine, (request, _) in self.pair._of.items():
                    if request == handle and mine not in self.ended:
                        self.withdrawn.add(mine)
                        self.pair.p.core.handle(Abort(mine))
        core.pool.check()

    # ------------------------------------------------------------------ what the world does

    @rule(count=st.integers(1, 6))
    def step_d(self, count: int) -> None:
        for _ in range(count):
            self.note(self.pair.step_d())
            self.repair()

    @rule(count=st.integers(1, 6))
    def step_p(self, count: int) -> None:
        for _ in range(count):
            self.note(self.pair.step_p())
            self.repair()

    @rule(count=st.integers(1, 8))
    def move(self, count: int) -> None:
        for _ in range(count):
            self.pair.net.step(self.rng)

    @rule(faults=st.lists(st.sampled_from(["", "", "lost", "late", "corrupt"]), max_size=4))
    def go_wrong(self, faults: list[str]) -> None:
        self.pair.net.faults = faults

    @rule(seconds=st.sampled_from([0.5, 2.5, 10.0]))
    def wait(self, seconds: float) -> None:
        for end in (self.pair.p, self.pair.d):
            end.clock.advance(seconds)

    @rule(at_p=st.booleans())
    def clear_cache(self, at_p: bool) -> None:
        (self.pair.p if at_p else self.pair.d).core.handle(ClearCache())

    @rule(secret=st.sampled_from(SECRETS), at_p=st.booleans())
    def rekey(self, secret: bytes, at_p: bool) -> None:
        (self.pair.p if at_p else self.pair.d).core.handle(SetHashSecret(hash_secret=secret))

    @rule(why=st.sampled_from(["", "", "no path"]))
    def refuse_paths(self, why: str) -> None:
        self.pair.d.mover.refuse = why

    # ------------------------------------------------------------------ what must hold

    def repair(self) -> None:
        """Three poisoned steps in a row break an executor; here it is as good as new."""
        for end in (self.pair.p, self.pair.d):
            end.core._broken, end.core._failures = "", 0
            end.engine.failure = None

    def note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case AttemptLost():
                    self.visited[event.kind] += 1
                    over = (event.handle, event.attempt)
                    assert over not in self.over, "an attempt was lost twice"
                    self.over.add(over)
                case AttemptBlocksOpened():
                    assert (event.handle, event.attempt) not in self.over
                case Prefilled():
                    assert event.handle not in self.ended
                    self.prefills[event.handle] = event
                case PrefillSent() | Rejected() if event.handle in self.prefills:
                    assert event.handle not in self.ended, "two last words"
                    self.ended.add(event.handle)
                    self.visited[type(event).__name__] += 1

    @invariant()
    def the_books_balance(self) -> None:
        for end in (self.pair.p, self.pair.d):
            end.core.pool.check()
            reservations = end.core.scheduler.reservations
            assert (
                reservations.unfilled
                == sum(reservations._budgets.values())
                >= reservations.unbound
                >= 0
            )
            assert reservations.lacking <= set(reservations._budgets)

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        try:
            if self.stopped:
                self.break_off()
            else:
                self.run_to_the_end()
        finally:
            for executor in self.executors:
                executor.close()

    def break_off(self) -> None:
        """Both cores are stopped amid everything."""
        pair = self.pair
        if len(pair.d.core.scheduler.handles()) < self.rng.randrange(5):
            prompt = self.rng.choices(range(6, 12), k=MAX_LEN // 2)
            sampling = SamplingParams(max_tokens=3)
            request = GenerateRequest(
                request_id="r", model="m", prompt=token_ids(prompt), sampling=sampling
            )
            handle, _ = pair.submit(request)
            self.step_d(1)
            pair.open(handle)
            pair.net.run()
            self.step_d(1)
            self.follow()
            self.step_p(3)
            if self.rng.random() < 0.5:
                pair.d.core.handle(AbortAttempt(handle, pair.attempts[handle]))
        self.visited["closed with quarantine"] += pair.d.core.pool.counts().quarantined > 0
        outgoing = pair.p.core._outgoing
        assert outgoing is not None
        prefills = outgoing._prefills.values()
        self.visited["closed while sending"] += any(prefill.under_way for prefill in prefills)
        pair.close()

    def run_to_the_end(self) -> None:
        pair = self.pair
        pair.net.faults = []
        for handle in self.handles:
            pair.d.core.handle(PrefillLocally(handle))
        for _ in range(20_000):
            if not pair.busy:
                break
            self.step_d(1)
            pair.net.step(self.rng)
            self.step_p(1)
        else:
            raise AssertionError("the two make no progress")
        self.the_books_balance()
        for end in (pair.p, pair.d):
            counts = end.core.pool.counts()
            assert counts.used == counts.quarantined == 0
            assert end.core.scheduler._submissions == {}
            assert end.core.scheduler._unstarted == 0
            assert end.core.wake_at() is None
            for ledger in end.engine.ledgers.values():
                self.check_ending(ledger)
        assert set(self.prefills) == self.ended | self.withdrawn
        self.count(pair)
        pair.close()

    def check_ending(self, ledger: OutputChecker) -> None:
        assert ledger.done, "a submission was forgotten"
        request = ledger.request
        complete = ledger.error is None and not ledger.aborted
        for choice in range(request.n):
            expected = reference_tokens(request, choice, vocab=40, max_len=MAX_LEN)
            got = ledger.tokens[choice]
            if complete:
                assert got == expected
            else:
                assert got == expected[: len(got)] or len(expected) < len(got)
        start = ledger.starts[0]
        self.visited["received"] += bool(complete and start and start.received_tokens)
        self.visited["aborted"] += ledger.aborted
        match ledger.error:
            case None | Overloaded() | DeadlineExceeded() | InvalidRequest():
                pass
            case EngineError():
                assert "the script says" in ledger.error.message
            case _:
                raise AssertionError(f"unexpected: {ledger.error!r}")

    def count(self, pair: DisaggPair) -> None:
        stats = pair.d.stats
        self.visited["preempted"] += stats.preemptions
        self.visited["both"] += bool(stats.received_tokens and stats.cached_tokens)
        for name, count in pair.net.counts.items():
            self.visited[name] += count


CORNERS = {"received", "aborted", "preempted", "both", "copied", "landed_late", "refused"}
CORNERS |= {
    "PrefillSent",
    "Rejected",
    "TransferRefused",
    "TransferCorrupt",
    "PathLost",
    "Overloaded",
}
CORNERS |= {"closed with quarantine", "closed while sending"}
FREQUENT = {"copied", "preempted", "PrefillSent", "PathLost", "Overloaded"}
"""Corners that 60 lives visit; thousands meet the others, and `test_handoff` on purpose."""


@pytest.mark.timeout(900)  # minutes in long mode
def test_random_lives_keep_every_rule_and_visit_every_corner():
    PairMachine.visited = Counter()
    lives = settings(max_examples=1500 if is_long() else 60, stateful_step_count=30)
    run_lives(PairMachine, lives, missed)


def missed() -> set[str]:
    wanted = CORNERS if is_long() else FREQUENT
    return {corner for corner in wanted if not PairMachine.visited[corner]}
