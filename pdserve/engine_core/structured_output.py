"""What may come next in sequences that follow a grammar or have an end to their reasoning.

A `GrammarState` follows one sequence's tokens and nothing else: whoever has the tokens has the
state. So a sequence that was preempted, handed over, moved or begun as one of several choices needs
no care. Grammars are compiled by llguidance, in a thread of `StructuredOutputManager`' own, and
kept for the next sequence.

An executor owns one `StructuredOutputManager` and asks it, in the core's thread, before it chooses
tokens. It knows nothing of logits. Masks have a bit per token, the lowest bit of each byte first.
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
"""How long a sequence waits for its grammar; those of others that are compiled before it count."""
MAX_COMPILED: Final = 256
MAX_PREFETCHED: Final = 64
"""That wait to be compiled, when another is expected; it is compiled when its prompt is done."""
MAX_PENDING: Final = 128
"""That wait at all: sequences that are aborted leave theirs behind."""
MAX_COMPILED_BYTES: Final[Bytes] = 256 << 20
"""Of all grammars that are kept, as far as is known: see `_Made`."""
_PER_SECOND: Final[Bytes] = 50 << 20
"""Memory that a second of compiling leaves behind, at most: measured with large divisors."""
_PER_CHAR: Final[Bytes] = 32
"""And what a character of a grammar does, where compiling takes no time."""


class GrammarError(Exception):
    """A sequence cannot go on; in words for whoever waits for it."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        """`lasting`: it would end the same way wherever it is tried."""
        super().__init__(message)
        self.lasting = lasting


class _Phase(enum.Enum):
    OPENING = "opening"
    """Reasoning may begin here, or the answer."""
    INSIDE = "inside"
    """Of the reasoning."""
    ANSWER = "answer"


class GrammarState:
    """One sequence's way through reasoning and grammar, token by token."""

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
        """`matcher`: at its beginning, and this state's own; None: there is no grammar.

        Errors: `GrammarError`.
        """
        thinking = self._thinking = sampling.thinking
        if thinking is not None and not _is_known(thinking, vocab_size):
            raise GrammarError("the model has no tokens for the marks of reasoning", lasting=True)
        self._matcher = matcher
        self._size = vocab_size
        self._ends = tuple(end for end in sampling.eos_token_ids if end < vocab_size)
        stops = (end for end in sampling.stop_token_ids if end < vocab_size)
        self._enough = (*self._ends, *stops)
        """What `min_tokens` would keep from coming."""
        self.forced = False
        """What `allowed` said last leaves no choice that a request could be asked about: it is the
        end of the output or of the reasoning, whatever else is wished."""
        self._ended = False
        """The grammar has come to its end and an end token has said so."""
        self._pending: list[TokenId] = []
        """A beginning of the reasoning's start, or of the answer: it is not known yet."""
        self._inside = 0
        """Tokens of the reasoning, its end's included."""
        self._recent: list[TokenId] = []
        """The last ones, as many as the longest of what ends it has."""
        self._phase = _Phase.ANSWER
        if thinking is not None:
            self._phase = _Phase.INSIDE if thinking.begun else _Phase.OPENING

    # ------------------------------------------------------------------ tokens

    def take_all(self, tokens: Iterable[TokenId]) -> None:
        """The sequence's next tokens. Errors: `GrammarError`."""
        for token in tokens:
            self.take(token)

    def take(self, token: TokenId) -> None:
        """The next one. Errors: `GrammarError`."""
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
        """The call's marker belongs to the answer. A grammar without the marker, such as that of
        calls which are known by their first character, begins behind it."""
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
            raise GrammarError(why, lasting=True)  # it goes wherever the request does

    # ------------------------------------------------------------------ masks

    def allowed(self) -> bytes | None:
        """What may come next; None: anything. Errors: `GrammarError`, also if nothing may."""
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
        """An answer that has to fit a grammar cannot be left out, so nothing ends before it."""
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
        """How many tokens of the reasoning's end the last ones are."""
        recent = tuple(self._recent)
        counts = range(min(len(end) - 1, len(recent)), 0, -1)
        return next((count for count in counts if recent[-count:] == end[:count]), 0)

    def _allowed_first(self, matcher: LLMatcher) -> bytes:
        """The answer's first tokens, or the reasoning's start."""
        assert self._thinking is not None
        begin = (self._thinking.start[len(self._pending)],)
        if self._pending:
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(self._pending) < len(self._pending):
                return self._only(begin)
        return bytes(_with(self._allowed_answer(matcher), begin))

    def _allowed_answer(self, matcher: LLMatcher) -> bytes:
        """llguidance knows some end tokens, the request says which they are."""
        if self._ended or (matcher.is_stopped() and not matcher.is_error()):
            mask = bytearray(_nothing(self._size))
        else:
            mask = self._cut(matcher.compute_bitmask())
        if matcher.is_error():
            raise GrammarError(f"its grammar leads nowhere: {matcher.get_error()}", lasting=True)
        over = self._ended or matcher.is_accepting()
        mask = _with(mask, self._ends) if over else mask
        if mask == _nothing(self._size):
            said = "is at its end and the model has no end token" if over else "allows no token"
            raise GrammarError(f"its grammar {said}", lasting=True)
        return bytes(mask)

    def _cut(self, mask: bytes) -> bytearray:
        """Of the vocabulary's size; llguidance rounds up, and its own idea of ends is dropped."""
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


# Masks are changed byte by byte and compared as a whole: turned into a large number and back, a
# mask takes longer than the grammar does.


@functools.lru_cache(maxsize=8)
def _nothing(size: int) -> bytes:
    """No token of a vocabulary of `size`."""
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
    """A grammar state and how many output tokens it has seen."""

    __slots__ = ("seen", "state")

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.seen = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """A compiled grammar. What it takes nobody tells; what it took to make it does, roughly."""

    matcher: LLMatcher
    held: Bytes


@dataclass(slots=True)
class _Compiling:
    """A grammar, and since when it has been wanted."""

    future: Future[_Made]
    since: Seconds

    @property
    def held(self) -> Bytes:
        """Of one that is done."""
        return 0 if self.future.exception() is not None else self.future.result().held


class StructuredOutputManager:
    """All sequences of one executor. See above for who calls."""

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
        """`eos_token_ids`: some ends that grammars should never go through. `inline`: compile in
        the caller's thread, where time is not to be real."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        self._patience = patience
        self._now = now
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        self._threads = None if inline else ThreadPoolExecutor(1, "pdserve-grammar")
        self._compiled: OrderedDict[str, _Compiling] = OrderedDict()
        """By grammar, least recently used first. Whoever wants to follow one takes a copy."""
        self._followed: dict[SequenceKey, _Followed] = {}

    def __len__(self) -> int:
        """Sequences that are followed."""
        return len(self._followed)

    @property
    def compiled(self) -> int:
        """Grammars that are kept."""
        return len(self._compiled)

    def warm(self) -> None:
        """Look at the vocabulary ahead of the first grammar; returns at once."""
        if self._threads is not None:
            self._threads.submit(self._vocabulary)

    def expect(self, sampling: SamplingParams) -> None:
        """A sequence with these parameters will be asked about; returns at once."""
        grammar = sampling.grammar
        if grammar and (grammar in self._compiled or len(self._pending()) < MAX_PREFETCHED):
            self._compile(grammar)

    def ready(self, sequence: Sequence) -> bool:
        """`allowed` would not wait. Who never is ready will be told so by `allowed`, in time."""
        grammar = sequence.sampling.grammar
        if not grammar or sequence.key in self._followed:
            return True
        if grammar not in self._compiled and len(self._pending()) >= MAX_PENDING:
            return False
        compiling = self._compile(grammar)
        return compiling.future.done() or self._left(compiling) == 0.0

    def wait_ready(self, seconds: Seconds) -> None:
        """Until somebody may be `ready` who was not; so long at most."""
        wait(self._pending(), seconds, FIRST_COMPLETED)

    def allowed(self, sequence: Sequence) -> bytes | None:
        """A mask of what may come next; None: anything.

        Waits for the grammar, unless `ready` has said that it is there; until `patience` has passed
        since it was first wanted. Errors: `GrammarError`; concerns this one only.
        """
        followed = self._follow(sequence)
        if followed is None:
            return None
        return _guarded(followed.state.allowed)

    def forced(self, sequence: Sequence) -> bool:
        """See `GrammarState.forced`."""
        followed = self._followed.get(sequence.key)
        return followed is not None and followed.state.forced

    def release(self, key: SequenceKey) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._followed.pop(key, None)

    def close(self) -> None:
        """What is compiling ends unheard. Idempotent."""
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
        """Those that are compiled, oldest first; somebody waits for the others."""
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
    """A checkpoint's `tokenizer.json`; empty if it has none that can be read."""
    try:
        return (directory / "tokenizer.json").read_bytes()
    except OSError:
        return b""


def structured_output_features(directory: Path) -> tuple[str, ...]:
    """Of `ModelCard.features`, what an engine has that asks `StructuredOutputManager`."""
    return ("thinking", "grammar") if (directory / "tokenizer.json").is_file() else ("thinking",)


def uses_structured_output(sampling: SamplingParams) -> bool:
    """A sequence with these parameters is followed."""
    thinking = sampling.thinking
    return bool(sampling.grammar) or (thinking is not None and thinking.budget is not None)


def make_tokenizer(tokenizer_json: str, vocab_size: int, ends: Seq[TokenId]) -> LLTokenizer:
    """The vocabulary as grammars see it. Takes a second for the largest.

    Errors: `GrammarError`.
    """
    eos = list(ends) or None
    problem: Exception | None = None
    for size in (vocab_size, None):  # a model may have fewer rows than that has tokens
        try:
            return _guarded(partial(LLTokenizer, tokenizer_json, n_vocab=size, eos_token=eos))
        except ValueError as error:
            problem = problem or error
    raise GrammarError(f"grammars cannot be followed with this tokenizer: {problem}")


def _guarded(function: Callable[[], T]) -> T:
    """A panic of the library is no `Exception`, and the end of one sequence only."""
    try:
        return function()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise GrammarError(f"the grammar cannot be followed: {error}") from None


# ---------------------------------------------------------------- engines that invent tokens

_PLAINEST = 4
"""Allowed tokens of the lowest ids: where vocabularies begin with single characters, as most do,
what closes strings and lists is among them."""


def pick_allowed_token(
    mask: bytes,
    words: Seq[TokenId],
    number: int,
    ends: Iterable[TokenId],
    without: Container[TokenId] = (),
) -> TokenId:
    """One allowed token, chosen by `number`: an end as soon as one may come, else often one of
    `words`, and now and then one that leads out of what has begun. None of `without`, if anything
    else is left."""
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
