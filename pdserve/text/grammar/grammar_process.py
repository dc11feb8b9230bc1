"""Compiles grammars from requests in a child process that can be killed.

llguidance bounds most of its work, not all: a large `multipleOf` takes minutes. A grammar that has
compiled here costs an engine no more time than it cost here. The module has both ends:
`GrammarProcess` in the parent, `main` in the child. `GrammarCompiler` owns several and caches their
results.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.messages.grammar_limits import MAX_GRAMMAR, PARSER_LIMITS
from pdserve.text.killable_process import KillableProcess, limit_cpu_time, receive_jobs, send_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llguidance import LLTokenizer

    from pdserve.ids import Bytes, Seconds
    from pdserve.text.grammar.grammar_source import GrammarSource
    from pdserve.text.tokenization.tokenizer import Tokenizer

__all__ = ["USUAL_SECONDS", "GrammarOutcome", "GrammarProcess", "vocabulary_id"]

SECONDS: Final[Seconds] = 2.0
"""Limit of processor time for one grammar; usual ones take milliseconds."""
_WALL: Final[Seconds] = 15.0
"""Limit of wall time for one grammar on a busy machine, vocabulary set-up included."""
MEMORY: Final[Bytes] = 1 << 30
"""Address space of the child; the largest vocabularies take a third of it."""
USUAL_SECONDS: Final[Seconds] = 0.25
"""Compile time above which a grammar is likely to reach the limit."""
_STARTUP: Final[Seconds] = 20.0
_STEPS_TRIED: Final = 8
"""Tokens for which a compiled grammar is tried: some fail or become slow only then."""
_STEP_SECONDS: Final[Seconds] = 0.25
"""Limit of processor time for one tried token: an engine step would wait that long."""
_MOST_TRIALS: Final = 256
"""Maximum number of compilations to find the faulty part of a schema."""


class _Vocabulary(msgspec.Struct, array_like=True, tag=1):
    """Replaces the child's vocabulary."""

    tokenizer_json: bytes
    vocab_size: int


class _Job(msgspec.Struct, array_like=True, tag=2):
    kind: Literal["schema", "grammar", "ready"]
    text: str


class GrammarOutcome(msgspec.Struct, array_like=True):
    """Result of compiling one grammar."""

    grammar: str
    """Grammar in the form that engines read; empty if it cannot be enforced."""
    error: str = ""
    where: str = ""
    """Path of the faulty part inside a schema, such as `.properties.a`."""


class GrammarProcess:
    """One child, started at its first use. One thread at a time compiles; any may `end` it."""

    def __init__(self, memory: Bytes = MEMORY) -> None:
        self._memory = memory
        self._turn = threading.Lock()
        self._child: KillableProcess | None = None
        self._closed = False
        self.vocabulary = b""
        """Id of the child's vocabulary; empty if it has none or there is no child."""
        self.killed = 0
        """Number of children that were killed."""

    def compile(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        source: GrammarSource,
        slow: Callable[[], None] = lambda: None,
    ) -> GrammarOutcome:
        """Compile `source`; takes a few seconds at most. `slow` is called meanwhile if it takes
        longer than `USUAL_SECONDS`.

        Errors: `Draining` after `close`, `Unavailable` when no child can be started or another
        process killed it, `InvalidRequest` for a vocabulary that cannot be used.
        """
        with self._turn:
            return self._ask(tokenizer, vocab_size, source, slow)

    def learn(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Start the child and send it a vocabulary before its first grammar. Errors as for
        `compile`."""
        with self._turn:
            self._ready_child(tokenizer, vocab_size)

    def end(self) -> None:
        """Kill the child: the running compilation fails, later ones are refused. Does not wait;
        `close` reaps the child."""
        self._closed = True
        child = self._child
        if child is not None:
            child.end()

    def close(self) -> None:
        """Kill the child and reap it once the compiling thread has left it. Idempotent."""
        self.end()
        with self._turn:
            self._drop()

    def _ask(
        self, tokenizer: Tokenizer, vocab_size: int, source: GrammarSource, slow: Callable[[], None]
    ) -> GrammarOutcome:
        job = msgspec.msgpack.encode(_Job(source.kind, source.text))
        try:
            child = self._ready_child(tokenizer, vocab_size)
            child.post(job, _WALL)
            if not child.answers_within(USUAL_SECONDS):
                slow()
            return msgspec.msgpack.decode(child.answer(), type=GrammarOutcome)
        except TimeoutError:
            pass
        except (OSError, EOFError, msgspec.MsgspecError):
            self._refuse_when_killed()
        except BaseException:
            # The answer stays unread in the child's socket, and the next job must not get it.
            self._drop()
            raise
        self._drop()
        self._refuse_when_closed()
        self.killed += 1
        return GrammarOutcome("", "it takes too much time or memory to compile; make it smaller")

    def _refuse_when_killed(self) -> None:
        """Raise `Unavailable` if another process killed the child: the grammar is not to blame."""
        self._refuse_when_closed()
        if self._child is not None and self._child.was_killed():
            self._drop()
            raise Unavailable("the process that compiles grammars was killed: try again")

    def _ready_child(self, tokenizer: Tokenizer, vocab_size: int) -> KillableProcess:
        # Another process may have killed the idle child.
        if self._child is not None and self._child.ended():
            self._drop()
        self._refuse_when_closed()
        wanted = vocabulary_id(tokenizer, vocab_size)
        try:
            if self._child is None:
                self._child = KillableProcess(__name__, self._memory)
                # `close` may have looked for a child before this one was started.
                self._refuse_when_closed()
                self._child.wait_ready(_STARTUP)
            if self.vocabulary != wanted:
                learn = _Vocabulary(tokenizer.json, vocab_size)
                reply = self._child.ask(msgspec.msgpack.encode(learn), _STARTUP)
                problem = msgspec.msgpack.decode(reply, type=GrammarOutcome).error
                if problem:
                    raise InvalidRequest(f"grammars cannot be followed by this model: {problem}")
                self.vocabulary = wanted
        except (OSError, EOFError) as error:
            self._drop()
            self._refuse_when_closed()
            raise Unavailable(f"no process for grammars: {error}") from None
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        self.vocabulary = b""
        if child is not None:
            child.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("grammars are no longer compiled: shutting down")


def vocabulary_id(tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """Return a digest of everything that a child must know about a model."""
    return tokenizer.digest + vocab_size.to_bytes(8, "little")


# -------------------------------------------------------------------- the child


def main() -> None:
    """Run the child: answer jobs until the parent closes the socket."""
    decoder = msgspec.msgpack.Decoder(_Vocabulary | _Job)
    tokenizer: Any = None
    for parent, frame in receive_jobs():
        job = decoder.decode(frame)
        if isinstance(job, _Vocabulary):
            limit_cpu_time(_STARTUP)
            tokenizer, outcome = _learned(job)
        else:
            limit_cpu_time(SECONDS)
            outcome = _outcome(job, tokenizer)
        send_answer(parent, msgspec.msgpack.encode(outcome))


def _learned(job: _Vocabulary) -> tuple[LLTokenizer | None, GrammarOutcome]:
    # Only the child needs llguidance, so the parent does not import it.
    from llguidance import LLTokenizer

    problem = ""
    # llguidance refuses a size below the tokenizer's own, and a model may have fewer rows.
    for size in (job.vocab_size, None):
        try:
            return LLTokenizer(job.tokenizer_json.decode(), n_vocab=size), GrammarOutcome("")
        except ValueError as error:
            problem = problem or str(error)
    return None, GrammarOutcome("", problem)


def _outcome(job: _Job, tokenizer: LLTokenizer) -> GrammarOutcome:
    try:
        grammar = _lark(job.text) if job.kind == "grammar" else job.text
        if len(grammar) > MAX_GRAMMAR:
            return GrammarOutcome("", f"its grammar has more than {MAX_GRAMMAR} characters")
        error = _trial(grammar, tokenizer)
        if not error:
            return GrammarOutcome(grammar)
        where = _where(grammar, error, tokenizer) if job.kind == "schema" else ""
        return GrammarOutcome("", _shortened(error), where)
    except (ValueError, RecursionError, MemoryError) as error:
        return GrammarOutcome("", _shortened(str(error) or "it is too large"))


def _lark(text: str) -> str:
    """Convert Lark or GBNF to Lark; the text is never read as llguidance's JSON."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:
        # The converter may raise any exception.
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def _trial(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return why engines cannot follow the grammar; empty if they can for some tokens."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
    if warnings:
        return "; ".join(warnings)
    for place in range(_STEPS_TRIED):
        if matcher.is_error() or matcher.is_stopped():
            break
        begun = time.process_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.process_time() - begun > _STEP_SECONDS:
            return (
                "it takes too much time to follow; make it smaller, counts of repetitions above all"
            )
        if not allowed:
            if place == 0 and not matcher.is_error():
                return "nothing fits it"
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    error = matcher.get_error()
    return "nothing fits it" if error.startswith("NoExtension") else error


def _where(grammar: str, error: str, tokenizer: LLTokenizer) -> str:
    """Return the path of the innermost part of the schema that fails alone with this error."""
    root = json.loads(grammar)["grammars"][0]["json_schema"]
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    shared["x-guidance"] = root["x-guidance"]
    place, schema, trials = "", root, 0
    found = True
    while found:
        found = False
        for name, part in _parts(schema):
            trials += 1
            if trials > _MOST_TRIALS:
                return place
            alone = {"grammars": [{"json_schema": {**shared, **part}}]}
            if _trial(json.dumps(alone), tokenizer) == error:
                place, schema, found = f"{place}.{name}", part, True
                break
    return place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the direct subschemas of a schema with their paths."""
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, dict):
            yield from ((f"{key}.{name}", p) for name, p in inner.items() if isinstance(p, dict))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in ("prefixItems", "anyOf", "oneOf", "allOf", "items"):
        inner = schema.get(key)
        if isinstance(inner, list):
            yield from ((f"{key}[{i}]", p) for i, p in enumerate(inner) if isinstance(p, dict))


def _shortened(error: str) -> str:
    # llguidance adds this tag to an error of which it has a longer form.
    error = error.removesuffix("\n<non-verbose/>")
    return error if len(error) <= 400 else error[:400] + " …"


if __name__ == "__main__":
    main()
