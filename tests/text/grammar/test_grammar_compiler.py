"""Grammars are compiled once, and a bad one costs its own tenant only."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.text.grammar.grammar_compiler import GrammarCache, GrammarCompiler
from pdserve.text.grammar.grammar_process import GrammarOutcome, vocabulary_id
from pdserve.text.grammar.grammar_source import GrammarSource

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 8


class Model:
    """As much of a tokenizer as is needed to tell models apart."""

    digest = b"m" * 16
    json = b"{}"


MODEL: Any = Model()


class Process:
    """A child that compiles by the text of a source: `bomb` is slow and kills it, `slow` is slow,
    `lost` is ended by somebody else, `bad` cannot be enforced."""

    def __init__(self, owner: Processes) -> None:
        self.owner = owner
        self.vocabulary = b""
        self.killed = 0
        self.ended = False
        self.closed = False

    def compile(
        self, tokenizer: Any, vocab_size: int, source: GrammarSource, slow: Callable[[], None]
    ) -> GrammarOutcome:
        self._start(tokenizer, vocab_size)
        self.owner.compiled.append(source.text)
        if source.text.startswith(("bomb", "slow")):
            slow()
            self.owner.meanwhile()
        if source.text.startswith("bomb"):
            self.killed += 1
            self.vocabulary = b""
            return GrammarOutcome("", "it takes too much time")
        if source.text.startswith("lost"):
            self.vocabulary = b""
            raise Unavailable("try again")
        if source.text.startswith("bad"):
            return GrammarOutcome("", "nothing fits it", ".properties.a")
        return GrammarOutcome(source.text.upper())

    def learn(self, tokenizer: Any, vocab_size: int) -> None:
        self._start(tokenizer, vocab_size)

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True
        self.owner.closed_beside.append([each.ended for each in self.owner.made])

    def _start(self, tokenizer: Any, vocab_size: int) -> None:
        if not self.vocabulary:
            self.owner.started.append(threading.get_ident())
        self.vocabulary = vocabulary_id(tokenizer, vocab_size)


class Processes:
    def __init__(self) -> None:
        self.made: list[Process] = []
        self.started: list[int] = []
        self.compiled: list[str] = []
        self.closed_beside: list[list[bool]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> Any:
        self.made.append(Process(self))
        return self.made[-1]

    @property
    def alive(self) -> int:
        return sum(not each.closed for each in self.made)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def processes():
    return Processes()


@pytest.fixture
def grammars(processes):
    made = GrammarCompiler(processes, Clock())
    yield made
    made.close()
    assert not processes.alive


def compile(grammars: GrammarCompiler, text: str, tenant: str = "") -> str:
    return grammars.compile(MODEL, SIZE, GrammarSource("schema", text, "x"), tenant)


def starts(processes: Processes, grammars: GrammarCompiler, text: str, tenant: str) -> int:
    """How many children were started for one grammar."""
    before = len(processes.started)
    with contextlib.suppress(InvalidRequest):
        compile(grammars, text, tenant)
    return len(processes.started) - before


def test_what_was_compiled_is_known(grammars, processes):
    assert grammars.known(MODEL, SIZE, GrammarSource("schema", "a", "x")) is None
    assert [compile(grammars, "a") for _ in range(3)] == ["A"] * 3
    assert grammars.known(MODEL, SIZE, GrammarSource("schema", "a", "x")) == "A"
    assert grammars.known(MODEL, SIZE + 1, GrammarSource("schema", "a", "x")) is None
    assert processes.compiled == ["a"]


def test_what_was_compiled_is_known_under_the_same_salt_only(grammars, processes):
    source = GrammarSource("schema", "a", "x")
    for salt in ("a", "b", "a"):
        assert grammars.compile(MODEL, SIZE, source, "", salt) == "A"
    assert processes.compiled == ["a", "a"]
    assert grammars.known(MODEL, SIZE, source, "b") == "A"
    assert grammars.known(MODEL, SIZE, source, "c") is None


def test_failures_are_known_too_and_name_the_request_that_asks(grammars, processes):
    for param in ("x", "y"):
        with pytest.raises(InvalidRequest) as caught:
            grammars.compile(MODEL, SIZE, GrammarSource("schema", "bad", param))
        assert caught.value.param == f"{param}.properties.a"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too much time"):
            compile(grammars, "bomb")
    assert processes.compiled == ["bad", "bomb"]


def test_what_somebody_else_ended_is_tried_again(grammars, processes):
    for _ in range(2):
        with pytest.raises(Unavailable):
            compile(grammars, "lost")
    assert processes.compiled == ["lost"] * 2
    assert grammars.killed == 0


def test_another_tenant_never_waits_for_a_process_after_a_bomb(grammars, processes):
    """Each bomb's own tenant starts what it costs, however often it sends one."""
    compile(grammars, "first", "other")
    for number in range(5):
        assert starts(processes, grammars, f"bomb {number}", "bad") > 0
        assert starts(processes, grammars, f"new {number}", "other") == 0
    assert grammars.killed == 5
    assert processes.alive <= 3


def test_a_process_stands_ready_while_a_slow_grammar_is_compiled(grammars, processes):
    ready = []
    processes.meanwhile = lambda: ready.append(len(grammars._idle))
    compile(grammars, "slow", "a")
    assert ready == [1]
    assert processes.alive == 2


def test_the_penalty_passes(grammars, processes):
    compile(grammars, "first", "a")
    starts(processes, grammars, "bomb", "a")
    assert starts(processes, grammars, "next", "a") == 1
    while len(grammars._idle) > 1:
        grammars._idle.pop().close()
    grammars._clock.now = 61.0
    assert starts(processes, grammars, "later", "a") == 0


def test_nothing_is_compiled_after_the_end(grammars):
    grammars.close()
    with pytest.raises(Draining):
        compile(grammars, "a")


def test_at_the_end_all_are_ended_before_any_is_waited_for(grammars, processes):
    """A thread that compiles in one process may wait in another that gets ready."""
    processes.meanwhile = grammars.close
    compile(grammars, "slow")
    assert len(processes.made) == 2
    assert processes.closed_beside[0] == [True, True]


def test_what_was_used_longest_ago_is_forgotten():
    kept = GrammarCache(most=3)
    for name in (b"a", b"b", b"c"):
        kept.keep(name, GrammarOutcome("x"))
    assert kept.get(b"a") is not None
    for number in range(2):
        kept.keep(b"%d" % number, GrammarOutcome("x"))
    assert kept.get(b"a") is not None
    assert kept.get(b"b") is None
    assert len(kept) == 3


def test_what_is_kept_is_bounded_in_text():
    kept = GrammarCache(most_text=10)
    kept.keep(b"a", GrammarOutcome("x" * 6))
    kept.keep(b"a", GrammarOutcome("x" * 6))
    assert kept.get(b"a") is not None
    kept.keep(b"b", GrammarOutcome("", "y" * 6))
    assert kept.get(b"a") is None
    assert kept.get(b"b") is not None
