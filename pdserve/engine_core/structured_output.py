"""Computes which tokens may come next under a grammar or a reasoning budget (structured output).

A `GrammarState` depends only on one sequence's tokens. So it can be rebuilt after a preemption, a
remote prefill or a migration, and for each of several choices. Grammars are compiled by llguidance
in a thread of the `StructuredOutputManager` and kept for later sequences.

An executor owns one `StructuredOutputManager` and asks it, in the core's thread, before it samples.
It knows nothing of logits. A mask has one bit per token, the lowest bit of each byte first.
"""

from __future__ import annotations

import enum
import functools
import time
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.messages.grammar_limits import PARSER_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Bytes, Seconds, SequenceKey, TokenId
    from pdserve.messages.request import SamplingParams, Thinking

__all__ = [
    "GrammarError",
    "GrammarState",
    "StructuredOutputManager",
    "make_tokenizer",
    "pick_allowed_token",
    "read_tokenizer",
    "structured_output_features",
    "uses_structured_output",
]

T = TypeVar("T")

COMPILE_TIMEOUT: Final[Seconds] = 30.0
"""Seconds that a sequence waits for its grammar, other grammars in the queue before it included."""
MAX_COMPILED: Final = 256
MAX_PREFETCHED: Final = 64
"""Grammars in the compile queue above which a new one is not prefetched; it is compiled when its
prompt is done."""
MAX_PENDING: Final = 128
"""Most grammars in the compile queue; aborted sequences leave theirs in it."""
MAX_COMPILED_BYTES: Final[Bytes] = 256 << 20
"""Most bytes of all kept grammars, as estimated by `_Made`."""
_PER_SECOND: Final[Bytes] = 50 << 20
"""Estimated bytes left by a second of compiling: an upper bound, measured with large divisors."""
_PER_CHAR: Final[Bytes] = 32
"""Estimated bytes per character of a grammar that compiles in no time."""


class GrammarError(Exception):
    """A sequence cannot be continued; the message says why."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        """`lasting`: the request would fail on any worker."""
        super().__init__(message)
        self.lasting = lasting


class _Phase(enum.Enum):
    OPENING = "opening"
    """Either reasoning or the answer may begin here."""
    INSIDE = "inside"
    """Within the reasoning."""
    ANSWER = "answer"


class GrammarState:
    """Follows one sequence through reasoning and grammar, token by token."""

    __slots__ = (
        "_ended",
        "_ends",
        "_enough",
        "_inside",
        "_matcher",
        "_pending",
        "_phase",
        "_recent",
        "_size",
        "_thinking",
        "forced",
    )

    def __init__(
        self, sampling: SamplingParams, matcher: LLMatcher | None, vocab_size: int
    ) -> None:
        """`matcher` must be at its start and used by nothing else; None: there is no grammar.
        Raises `GrammarError`."""
        thinking = self._thinking = sampling.thinking
        if thinking is not None and not _is_known(thinking, vocab_size):
            raise GrammarError("the model has no tokens for the marks of reasoning", lasting=True)
        self._matcher = matcher
        self._size = vocab_size
        self._ends = tuple(end for end in sampling.eos_token_ids if end < vocab_size)
        stops = (end for end in sampling.stop_token_ids if end < vocab_size)
        self._enough = (*self._ends, *stops)
        """Tokens that `min_tokens` forbids."""
        self.forced = False
        """Whether the last mask of `allowed` leaves only the end of the output or of the reasoning,
        so that the request's other constraints do not apply."""
        self._ended = False
        """The grammar is complete and an end token has come."""
        self._pending: list[TokenId] = []
        """First tokens that may begin either the reasoning's start or the answer."""
        self._inside = 0
        """Number of reasoning tokens, those of its end included."""
        self._recent: list[TokenId] = []
        """The last tokens, as many as the longest sequence that ends the reasoning."""
        self._phase = _Phase.ANSWER
        if thinking is not None:
            self._phase = _Phase.INSIDE if thinking.begun else _Phase.OPENING

    # ------------------------------------------------------------------ tokens

    def take_all(self, tokens: Iterable[TokenId]) -> None:
        """Take the sequence's next tokens. Raises `GrammarError`."""
        for token in tokens:
            self.take(token)

    def take(self, token: TokenId) -> None:
        """Take the next token. Raises `GrammarError`."""
        if self._phase is _Phase.ANSWER:
            self._answer(token)
        elif self._phase is _Phase.INSIDE:
            self._reason(token)
        else:
            self._open(token)

    def _open(self, token: TokenId) -> None:
        assert self._thinking is not None
        start = self._thinking.start
        self._pending.append(token)
        if tuple(self._pending) == start:
            self._pending.clear()
            self._phase = _Phase.INSIDE
        elif start[: len(self._pending)] != tuple(self._pending):
            pending, self._pending = self._pending, []
            self._phase = _Phase.ANSWER
            for each in pending:
                self._answer(each)

    def _reason(self, token: TokenId) -> None:
        assert self._thinking is not None
        end, call = self._thinking.end, self._thinking.call
        self._inside += 1
        self._recent = [*self._recent, token][-max(len(end), len(call)) :]
        if _ends_with(self._recent, end):
            self._phase = _Phase.ANSWER
        elif call and _ends_with(self._recent, call):
            self._phase = _Phase.ANSWER
            self._begin_call(call)

    def _begin_call(self, call: tuple[TokenId, ...]) -> None:
        """The marker of a tool call ends the reasoning and belongs to the answer. A grammar without
        the marker (of calls known by their first character) begins after it."""
        matcher = self._matcher
        if matcher is None:
            return
        taken = matcher.try_consume_tokens(list(call))
        if taken < len(call):
            matcher.rollback(taken)

    def _answer(self, token: TokenId) -> None:
        matcher = self._matcher
        if matcher is None or self._ended:
            return
        if token in self._ends and matcher.is_accepting():
            self._ended = True
        elif not matcher.consume_token(token):
            why = f"the output does not fit its grammar: {matcher.get_error()}"
            # The error is lasting, because the output moves with the request.
            raise GrammarError(why, lasting=True)

    # ------------------------------------------------------------------ masks

    def allowed(self) -> bytes | None:
        """The mask of tokens that may come next; None: all. Raises `GrammarError`, also if no token
        is allowed."""
        self.forced = False
        mask = self._allowed()
        if mask is not None and not self.forced:
            self.forced = _without(mask, self._enough) == _nothing(self._size)
        return mask

    def _allowed(self) -> bytes | None:
        if self._phase is _Phase.INSIDE:
            return self._allowed_inside()
        if self._matcher is None:
            return None
        if self._phase is _Phase.OPENING:
            return self._allowed_first(self._matcher)
        return self._allowed_answer(self._matcher)

    def _allowed_inside(self) -> bytes | None:
        """Within the reasoning: with a grammar the output must not end before the answer."""
        assert self._thinking is not None
        budget, end = self._thinking.budget, self._thinking.end
        begun = self._begun_end(end)
        if budget is not None and self._inside - begun >= budget:
            self.forced = True
            return self._only((end[begun],))
        if self._matcher is None:
            return None
        return bytes(_without(_everything(self._size), self._ends))

    def _begun_end(self, end: tuple[TokenId, ...]) -> int:
        """How many of the last tokens are the beginning of the reasoning's end."""
        recent = tuple(self._recent)
        counts = range(min(len(end) - 1, len(recent)), 0, -1)
        return next((count for count in counts if recent[-count:] == end[:count]), 0)

    def _allowed_first(self, matcher: LLMatcher) -> bytes:
        """First tokens of the answer, or of the reasoning's start."""
        assert self._thinking is not None
        begin = (self._thinking.start[len(self._pending)],)
        if self._pending:
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(self._pending) < len(self._pending):
                return self._only(begin)
        return bytes(_with(self._allowed_answer(matcher), begin))

    def _allowed_answer(self, matcher: LLMatcher) -> bytes:
        """The grammar's mask with the request's end tokens; llguidance's own are not used."""
        if self._ended or (matcher.is_stopped() and not matcher.is_error()):
            mask = bytearray(_nothing(self._size))
        else:
            mask = self._cut(matcher.compute_bitmask())
        if matcher.is_error():
            raise GrammarError(f"its grammar allows no token: {matcher.get_error()}", lasting=True)
        over = self._ended or matcher.is_accepting()
        mask = _with(mask, self._ends) if over else mask
        if mask == _nothing(self._size):
            said = "is at its end and the model has no end token" if over else "allows no token"
            raise GrammarError(f"its grammar {said}", lasting=True)
        return bytes(mask)

    def _cut(self, mask: bytes) -> bytearray:
        """The mask cut to the vocabulary's size (llguidance rounds up), without end tokens."""
        whole, rest = divmod(self._size, 8)
        size = whole + bool(rest)
        cut = _without(mask[:size].ljust(size, b"\0"), self._ends)
        if rest:
            cut[whole] &= (1 << rest) - 1
        return cut

    def _only(self, tokens: Iterable[TokenId]) -> bytes:
        return bytes(_with(_nothing(self._size), tokens))


def _is_known(thinking: Thinking, vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in (*thinking.start, *thinking.end))


def _ends_with(tokens: list[TokenId], last: tuple[TokenId, ...]) -> bool:
    return tuple(tokens[-len(last) :]) == last


# Masks are changed byte by byte and compared as a whole, because converting a mask to an int and
# back takes longer than the grammar itself.


@functools.lru_cache(maxsize=8)
def _nothing(size: int) -> bytes:
    """A mask that allows no token of a vocabulary of `size`."""
    return bytes(-(-size // 8))


@functools.lru_cache(maxsize=8)
def _everything(size: int) -> bytes:
    return ((1 << size) - 1).to_bytes(-(-size // 8), "little")


def _with(mask: bytes | bytearray, tokens: Iterable[TokenId]) -> bytearray:
    changed = bytearray(mask)
    for token in tokens:
        changed[token >> 3] |= 1 << (token & 7)
    return changed


def _without(mask: bytes | bytearray, tokens: Iterable[TokenId]) -> bytearray:
    changed = bytearray(mask)
    for token in tokens:
        changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return changed


class _Followed:
    """A grammar state and the number of output tokens it has taken."""

    __slots__ = ("seen", "state")

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.seen = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """A compiled grammar. Its size is not known and is estimated from its compile time."""

    matcher: LLMatcher
    held: Bytes


@dataclass(slots=True)
class _Compiling:
    """A grammar, and the time at which it was first wanted."""

    future: Future[_Made]
    since: Seconds

    @property
    def held(self) -> Bytes:
        """Estimated bytes of a grammar that is compiled."""
        return 0 if self.future.exception() is not None else self.future.result().held


class StructuredOutputManager:
    """Compiles grammars and follows all sequences of one executor. Used in the core's thread."""

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_token_ids: Seq[TokenId] = (),
        *,
        inline: bool = False,
        patience: Seconds = COMPILE_TIMEOUT,
        now: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """`eos_token_ids`: end tokens that no grammar may use as text. `inline`: compile in the
        caller's thread, for simulated time. `patience`: seconds that a sequence waits for its
        grammar."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        self._patience = patience
        self._now = now
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        self._threads = None if inline else ThreadPoolExecutor(1, "pdserve-grammar")
        self._compiled: OrderedDict[str, _Compiling] = OrderedDict()
        """Compiled grammars by their text, least recently used first. Each sequence uses a copy."""
        self._followed: dict[SequenceKey, _Followed] = {}

    def __len__(self) -> int:
        """Number of sequences that are followed."""
        return len(self._followed)

    @property
    def compiled(self) -> int:
        """Number of grammars that are kept."""
        return len(self._compiled)

    def warm(self) -> None:
        """Read the vocabulary before the first grammar comes; returns at once."""
        if self._threads is not None:
            self._threads.submit(self._vocabulary)

    def expect(self, sampling: SamplingParams) -> None:
        """Start to compile the grammar of a request that may come; returns at once."""
        grammar = sampling.grammar
        if grammar and (grammar in self._compiled or len(self._pending()) < MAX_PREFETCHED):
            self._compile(grammar)

    def ready(self, sequence: Sequence) -> bool:
        """Return whether `allowed` returns without a wait. After `patience` this is True too, and
        `allowed` raises."""
        grammar = sequence.sampling.grammar
        if not grammar or sequence.key in self._followed:
            return True
        if grammar not in self._compiled and len(self._pending()) >= MAX_PENDING:
            return False
        compiling = self._compile(grammar)
        return compiling.future.done() or self._left(compiling) == 0.0

    def wait_ready(self, seconds: Seconds) -> None:
        """Wait until another sequence may be `ready`, at most `seconds`."""
        wait(self._pending(), seconds, FIRST_COMPLETED)

    def allowed(self, sequence: Sequence) -> bytes | None:
        """The mask of tokens that may come next; None: all.

        Waits for the grammar unless `ready` was True, until `patience` has passed since it was
        first wanted. Raises `GrammarError`, which concerns this sequence only.
        """
        followed = self._follow(sequence)
        if followed is None:
            return None
        return _guarded(followed.state.allowed)

    def forced(self, sequence: Sequence) -> bool:
        """Return whether the last mask leaves only the end of the output or of the reasoning."""
        followed = self._followed.get(sequence.key)
        return followed is not None and followed.state.forced

    def release(self, key: SequenceKey) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._followed.pop(key, None)

    def close(self) -> None:
        """Drop all grammars; returns at once, while one may still compile. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._followed.clear()
        self._compiled.clear()

    # ------------------------------------------------------------------ sequences

    def _follow(self, sequence: Sequence) -> _Followed | None:
        sampling = sequence.sampling
        if not uses_structured_output(sampling):
            return None
        followed = self._followed.get(sequence.key)
        if followed is None or followed.seen > sequence.num_output:
            matcher = self._matcher(sampling.grammar) if sampling.grammar else None
            followed = _Followed(GrammarState(sampling, matcher, self._vocab_size))
            self._followed[sequence.key] = followed
        fresh = sequence.tokens[sequence.prompt_len + followed.seen :]
        if fresh:
            _guarded(partial(followed.state.take_all, fresh))
            followed.seen += len(fresh)
        return followed

    # ------------------------------------------------------------------ grammars

    def _matcher(self, grammar: str) -> LLMatcher:
        compiling = self._compile(grammar)
        try:
            pristine = compiling.future.result(self._left(compiling))
        except TimeoutError:
            raise GrammarError(
                f"its grammar was not compiled within {self._patience:g} s"
            ) from None
        return pristine.matcher.deep_copy()

    def _left(self, compiling: _Compiling) -> Seconds:
        return max(0.0, compiling.since + self._patience - self._now())

    def _pending(self) -> list[Future[_Made]]:
        every = (compiling.future for compiling in self._compiled.values())
        return [future for future in every if not future.done()]

    def _compile(self, grammar: str) -> _Compiling:
        found = self._compiled.get(grammar)
        if found is not None:
            self._compiled.move_to_end(grammar)
            return found
        compiling = self._compiled[grammar] = _Compiling(self._begin(grammar), self._now())
        self._drop_old()
        return compiling

    def _begin(self, grammar: str) -> Future[_Made]:
        if self._threads is not None:
            return self._threads.submit(self._make, grammar)
        future: Future[_Made] = Future()
        try:
            future.set_result(self._make(grammar))
        except GrammarError as fault:
            future.set_exception(fault)
        return future

    def _drop_old(self) -> None:
        """Drop the compiled grammars, oldest first; sequences wait for the others."""
        done = {
            grammar: each.held for grammar, each in self._compiled.items() if each.future.done()
        }
        held = sum(done.values())
        for grammar, size in done.items():
            if len(self._compiled) <= MAX_COMPILED and held <= MAX_COMPILED_BYTES:
                return
            del self._compiled[grammar]
            held -= size

    def _make(self, grammar: str) -> _Made:
        vocabulary = _guarded(self._vocabulary)
        begun = time.thread_time()
        matcher = _guarded(lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits))
        if matcher.is_error():
            raise GrammarError(f"its grammar cannot be compiled: {matcher.get_error()}")
        took = time.thread_time() - begun
        return _Made(matcher, len(grammar) * _PER_CHAR + int(took * _PER_SECOND))

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            text = self._tokenizer_json.decode()
            self._tokenizer = make_tokenizer(text, self._vocab_size, self._ends)
            self._tokenizer_json = b""
        return self._tokenizer


def read_tokenizer(directory: Path) -> bytes:
    """Read a checkpoint's `tokenizer.json`; empty if it cannot be read."""
    try:
        return (directory / "tokenizer.json").read_bytes()
    except OSError:
        return b""


def structured_output_features(directory: Path) -> tuple[str, ...]:
    """The `ModelCard.features` of an engine that uses a `StructuredOutputManager`."""
    return ("thinking", "grammar") if (directory / "tokenizer.json").is_file() else ("thinking",)


def uses_structured_output(sampling: SamplingParams) -> bool:
    """Return whether the tokens of a request with these parameters are constrained."""
    thinking = sampling.thinking
    return bool(sampling.grammar) or (thinking is not None and thinking.budget is not None)


def make_tokenizer(tokenizer_json: str, vocab_size: int, ends: Seq[TokenId]) -> LLTokenizer:
    """Build llguidance's tokenizer. Takes a second for the largest vocabularies.

    Raises `GrammarError`.
    """
    eos = list(ends) or None
    problem: Exception | None = None
    # llguidance refuses a size below the tokenizer's own, and a model may have fewer rows.
    for size in (vocab_size, None):
        try:
            return _guarded(partial(LLTokenizer, tokenizer_json, n_vocab=size, eos_token=eos))
        except ValueError as error:
            problem = problem or error
    raise GrammarError(f"grammars do not work with this tokenizer: {problem}")


def _guarded(function: Callable[[], T]) -> T:
    """Run `function`, with a panic of llguidance as a `GrammarError`: a panic is no `Exception`,
    and must end one sequence only."""
    try:
        return function()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError(f"the grammar engine failed: {error}") from None


# ---------------------------------------------------------------- engines that invent tokens

_PLAINEST = 4
"""How many allowed tokens of the lowest ids are used. Most vocabularies begin with single
characters, so what closes strings and lists is among them."""


def pick_allowed_token(
    mask: bytes,
    words: Seq[TokenId],
    number: int,
    ends: Iterable[TokenId],
    without: Container[TokenId] = (),
) -> TokenId:
    """Choose one allowed token by `number`: an end token if one may come, else often one of
    `words`, and sometimes one that closes what was begun. It is not in `without` unless nothing
    else is allowed."""
    every = [
        byte << 3 | bit
        for byte, bits in enumerate(mask)
        if bits
        for bit in range(8)
        if bits >> bit & 1
    ]
    allowed = [token for token in every if token not in without] or every
    known = set(allowed)
    over = [end for end in ends if end in known]
    if over:
        return over[0]
    chosen = words[number % len(words)]
    if chosen in known and number // len(words) % 3:
        return chosen
    return allowed[number // 7 % min(len(allowed), _PLAINEST)]
