"""Random lives of a core: whatever comes in whatever order, the books balance and nobody is lost.

After every step the pool checks itself and the plan is checked against the rules of scheduling; at
the end every submission has ended in exactly one way, with the tokens it would get alone, and no
block is held.
"""

from __future__ import annotations

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

from pdserve.blocks.hashing import block_hashes, hash_secret_id, prompt_root
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.errors import DeadlineExceeded, InvalidRequest, Overloaded, StepFailed
from pdserve.messages.engine import ClearCache, EngineSpec, SetHashSecret
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ENGINE, ScriptedExecutor, reference_tokens, reference_vector
from pdserve.token_ids import TokenIds, token_ids
from tests.support.pools import hash_of
from tests.support.random_lives import run_lives
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.engine_core.executor import StepPlan
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import Pooling
    from pdserve.testing.output_checker import OutputChecker

MAX_LEN = 48
BLOCK = 4
MODEL = "scripted"
SECRETS = (b"one", b"two", b"three")
POISON = 5

tokens = st.integers(3, 12)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=30),
    st.builds(lambda t, n: [t] * n, st.integers(6, 7), st.integers(1, 46)),  # shared prefixes
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    given = st.lists(tokens.filter(lambda t: t != POISON), max_size=6)
    pooling: Pooling = draw(st.sampled_from(["", "", "", "", "mean", "last"]))
    if pooling:
        return GenerateRequest(
            request_id=f"r{draw(st.integers(0, 10**6))}",
            model="m",
            prompt=draw(prompts),
            cache_salt=draw(st.sampled_from(["", "", "other"])),
            priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
            deadline=draw(st.sampled_from([None, None, 2.0, 10.0])),
            sampling=SamplingParams(max_tokens=1),
            pooling=pooling,
        )
    return GenerateRequest(
        request_id=f"r{draw(st.integers(0, 10**6))}",
        model="m",
        prompt=draw(prompts),
        n=n,
        output=draw(st.one_of(st.just([]), st.lists(given, min_size=n, max_size=n))),
        ended=draw(st.one_of(st.just(()), st.tuples(st.integers(0, n - 1)))),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
        priority=draw(st.sampled_from([0, 0, 0, 1, -1])),
        deadline=draw(st.sampled_from([None, None, 2.0, 10.0])),
        sampling=SamplingParams(
            max_tokens=draw(st.integers(1, 30)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            eos_token_ids=draw(st.sampled_from([(), (2,), (2, 7)])),
            stop_token_ids=draw(st.sampled_from([(), (9,), (2, 9, 30, 31)])),
            ignore_eos=draw(st.booleans()),
            min_tokens=draw(st.sampled_from([0, 0, 3])),
            logprobs=draw(st.sampled_from([None, None, 0, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        ),
    )


def reference_names(tokens: TokenIds, secret: bytes, salt: str) -> list[bytes]:
    """The names of the full blocks."""
    return [*block_hashes(tokens, BLOCK, parent=prompt_root(secret, MODEL, salt), secret=secret)]


class CoreMachine(RuleBasedStateMachine):
    """An `EngineCore` around the scripted executor, under a clock that only rules move."""

    visited: ClassVar[Counter[str]] = Counter()

    @initialize(
        blocks=st.integers(12, 40),
        batch=st.integers(6, 40),
        cache=st.booleans(),
        sequences=st.integers(1, 6),
        waiting=st.sampled_from([2, 100]),
        patience=st.sampled_from([0, 0, 1, 7]),
    )
    def start(
        self, blocks: int, batch: int, cache: bool, sequences: int, waiting: int, patience: int
    ) -> None:
        """`patience`: so many steps pass before a token of a sequence can be chosen."""
        self.spec = EngineSpec(
            engine=ENGINE,
            model="",
            block_size=BLOCK,
            max_batch_tokens=batch,
            max_sequences=sequences,
            max_waiting=waiting,
            max_model_len=MAX_LEN,
            prefix_cache=cache,
            hash_secret=SECRETS[0],
            options={"blocks": str(blocks), "raise_on": str(POISON), "vocab": "40"},
        )
        self.clock = ManualClock()
        self.violation: AssertionError | None = None
        self.executor = ScriptedExecutor(self.watch)
        self.core = EngineCore(self.executor, self.clock)
        self.prepare()
        self.engine = InlineEngine(self.core, self.spec)
        self.asked: Counter[tuple[int, int, int]] = Counter()
        if patience:
            self.core.scheduler.steerable = lambda sequence: self.is_steerable(sequence, patience)
            self.executor.wait_ready = lambda seconds: None  # type: ignore[attr-defined]
        self.index: set[bytes] = set()
        self.secret = SECRETS[0]

    def prepare(self) -> None:
        """Change the core or its spec before it loads; for derived machines."""

    # ------------------------------------------------------------------ what happens

    @rule(request=requests(), copies=st.sampled_from([1, 1, 3]))
    def submit(self, request: GenerateRequest, copies: int) -> None:
        for _ in range(copies):
            self.engine.submit(request)

    @rule(request=requests(), secret=st.sampled_from(SECRETS), whole=st.booleans())
    def submit_named(self, request: GenerateRequest, secret: bytes, whole: bool) -> None:
        """With names from a frontend, which may know another secret, or make blocks of other
        sizes."""
        names = reference_names(request.prompt, secret, request.cache_salt)
        joined = b"".join(names if whole else names[1:])
        self.visited["named"] += bool(joined) and whole and secret == self.secret
        self.engine.submit(
            msgspec.structs.replace(request, block_names=joined, names_id=hash_secret_id(secret))
        )

    @rule(token=st.integers(6, 12), size=st.integers(2, 6), count=st.integers(8, 40))
    def crowd(self, token: int, size: int, count: int) -> None:
        """Short prompts that grow long together: this is what runs out of blocks."""
        for n in range(4):
            sampling = SamplingParams(max_tokens=42, ignore_eos=True, seed=n)
            prompt = [token + n] * size
            self.engine.submit(
                GenerateRequest(
                    request_id=f"c{n}", model="m", prompt=token_ids(prompt), sampling=sampling
                )
            )
        self.step(count)

    @rule(request=requests(), steps=st.integers(0, 3))
    def submit_and_be_late(self, request: GenerateRequest, steps: int) -> None:
        self.engine.submit(msgspec.structs.replace(request, deadline=1.0))
        self.step(steps)
        self.clock.advance(2.0)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()
            self.core.pool.check()

    @precondition(lambda self: self.engine.ledgers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(list(self.engine.ledgers.values()))))
        self.core.pool.check()

    @precondition(lambda self: self.engine.ledgers)
    @rule()
    def abort_everything(self) -> None:
        for ledger in self.engine.ledgers.values():
            self.engine.abort(ledger)
        assert self.core.pool.counts().used == self.fetching()

    def fetching(self) -> int:
        """Blocks that are held for fetches."""
        return 0

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def clear_cache(self) -> None:
        self.core.handle(ClearCache())

    @rule(secret=st.sampled_from(SECRETS))
    def rekey(self, secret: bytes) -> None:
        running = any(sequence.num_committed for sequence in self.core.scheduler.running)
        self.visited["renamed"] += running and secret != self.secret
        self.core.handle(SetHashSecret(hash_secret=secret))
        self.secret = secret

    def is_steerable(self, sequence: Sequence, patience: int) -> bool:
        """Anew after each preemption, and for each choice at another time."""
        key = (*sequence.key, sequence.preemptions)
        self.asked[key] += 1
        ready = self.asked[key] > patience + sequence.choice
        self.visited["unsteered"] += not ready
        return ready

    def one_step(self) -> None:
        self.engine.step()
        self.engine.failure = None
        # Three poisoned steps in a row break an executor; here it is as good as new.
        self.core._broken, self.core._failures = "", 0
        if self.violation is not None:
            raise self.violation

    # ------------------------------------------------------------------ what must hold

    def watch(self, plan: StepPlan) -> None:
        """The core takes an exception for the executor's failure: keep it for the test."""
        try:
            self.check_plan(plan)
        except AssertionError as error:
            self.violation = error

    def check_plan(self, plan: StepPlan) -> None:
        """The executor's view of every step."""
        spec, pool = self.spec, self.core.pool
        assert 0 < plan.num_tokens <= spec.max_batch_tokens
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(sequences) == len(set(map(id, sequences))) <= spec.max_sequences
        assert len(self.core.scheduler.running) <= spec.max_sequences
        written: set[int] = set()
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            assert chunk.start == sequence.num_computed
            assert (chunk.samples or chunk.vector) == (end == len(sequence.tokens))
            assert chunk.vector <= bool(sequence.request.pooling)
            assert end <= len(sequence.blocks) * 4
            mine = set(sequence.blocks[chunk.start // 4 : -(-end // 4)])
            assert not mine & written, "two sequences write one block"
            written |= mine
            for block in mine:
                sources = sum(source == block for source, _ in plan.copies)
                assert pool.references(block) == 1 + sources, "a shared block is written"
                assert hash_of(pool, block) is None, "a named block is written"
        self.visited["copied"] += len(plan.copies)
        for source, destination in plan.copies:
            assert pool.references(source) > 0
            assert pool.references(destination) == 1
            assert hash_of(pool, destination) is None
            assert destination != source
        if any(chunk.count > 1 for chunk in plan.chunks):
            decodes = [
                s for s in self.core.scheduler.running if len(s.tokens) - s.num_computed == 1
            ]
            left = {id(s) for s in decodes} - {id(s) for s in sequences}
            assert len(left) <= self.core.scheduler.unsteered, "a decode was left out"

    @invariant()
    def the_books_balance(self) -> None:
        self.core.pool.check()
        self.the_names_are_right()
        for event in self.engine.kv_events:
            if event.tier != "device":
                self.take_lower(event)
                continue
            match type(event).__name__:
                case "BlockStored":
                    self.index |= set(event.hashes)  # type: ignore[union-attr]
                case "BlockRemoved":
                    self.index -= set(event.hashes)  # type: ignore[union-attr]
                case _:
                    self.index.clear()
        self.engine.kv_events.clear()

    def take_lower(self, event: KvEvent) -> None:
        """An event of a lower tier."""
        raise AssertionError("there is no lower tier")

    def the_names_are_right(self) -> None:
        """Whoever made them, and whatever they were before."""
        for sequence in self.core.scheduler.running:
            count = sequence.num_committed
            if self.spec.prefix_cache and count:
                expected = reference_names(
                    sequence.tokens[: count * BLOCK], self.secret, sequence.request.cache_salt
                )
                names = [hash_of(self.core.pool, block) for block in sequence.blocks[:count]]
                assert names == expected

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.executor.close()

    def run_to_the_end(self) -> None:
        engine, core = self.engine, self.core
        for _ in range(20_000):
            if not core.has_work:
                at = self.next_wake()
                if at is None:
                    break
                self.clock.advance(max(0.0, at - self.clock.now()))
            self.one_step()
        else:
            raise AssertionError("the core makes no progress")
        self.the_books_balance()
        assert core.pool.counts().used == 0
        assert self.index == set(core.pool._by_hash)
        assert core.scheduler._submissions == {}
        assert core.scheduler._unstarted == 0
        assert core.scheduler.next_deadline() is None
        for ledger in engine.ledgers.values():
            self.check_ending(ledger)
        assert engine.close() == 0
        self.visited["preempted"] += core.scheduler.counters.preemptions
        self.visited["cached"] += core.scheduler.counters.cached_tokens

    def next_wake(self) -> float | None:
        """When the core has something to do next; None: never."""
        return self.core.wake_at()

    def check_ending(self, ledger: OutputChecker) -> None:
        assert ledger.done, "a submission was forgotten"
        request = ledger.request
        complete = ledger.error is None and not ledger.aborted
        if request.pooling:
            self.check_vector(ledger)
        else:
            self.check_tokens(ledger, complete=complete)
        self.visited["continued"] += complete and bool(request.output)
        self.visited["some had ended"] += complete and bool(request.ended)
        self.visited["completed"] += complete
        self.visited["aborted"] += ledger.aborted
        self.visited[type(ledger.error).__name__] += 1
        match ledger.error:
            case None | Overloaded() | DeadlineExceeded() | InvalidRequest():
                pass
            case StepFailed():
                assert "the script says" in ledger.error.message
            case _:
                raise AssertionError(f"unexpected: {ledger.error!r}")

    def check_vector(self, ledger: OutputChecker) -> None:
        """It is the one that the prompt has alone; a mean took nothing from the cache."""
        finish, request = ledger.finishes[0], ledger.request
        assert ledger.tokens == [[]]
        if finish is None:
            return
        assert finish.reason == "stop"
        assert finish.embedding == reference_vector(request)
        assert not (finish.cached_tokens and request.pooling == "mean")
        self.visited[f"{request.pooling} vector"] += 1
        self.visited["cached vector"] += finish.cached_tokens > 0
        self.visited["preempted vector"] += finish.preemptions > 0

    def check_tokens(self, ledger: OutputChecker, *, complete: bool) -> None:
        request = ledger.request
        for choice in range(request.n):
            if choice not in request.live:
                assert ledger.finishes[choice] is None
                continue
            expected = reference_tokens(request, choice, vocab=40, max_len=MAX_LEN)
            if complete:
                assert ledger.tokens[choice] == expected
            else:
                got = ledger.tokens[choice]
                assert got == expected[: len(got)]


CORNERS = {"preempted", "cached", "copied", "completed", "aborted", "continued"}
CORNERS |= {"named", "renamed", "some had ended", "mean vector", "last vector", "unsteered"}
CORNERS |= {Overloaded.__name__, DeadlineExceeded.__name__, StepFailed.__name__}
RARE = {"cached vector", "preempted vector"}
"""Not in every hundred lives; the tests of pooling show both."""


@pytest.mark.timeout(900)  # minutes in long mode
def test_random_lives_keep_every_rule_and_visit_every_corner():
    CoreMachine.visited = Counter()
    lives = settings(max_examples=1500 if is_long() else 100, stateful_step_count=30)
    run_lives(CoreMachine, lives, missed)


def missed() -> set[str]:
    corners = CORNERS | RARE if is_long() else CORNERS
    return {corner for corner in corners if not CoreMachine.visited[corner]}
