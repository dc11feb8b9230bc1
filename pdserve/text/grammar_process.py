"""Compiles grammars that requests bring along, in a process that can be killed.

llguidance bounds most of what it does, not all: a large `multipleOf` takes minutes. Whatever has
passed here costs an engine no more than it did here. The answer is kept, so that a schema that
comes with every request is compiled once.

The module is both ends, see `child.py`. Any thread may call; calls take turns.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.messages.grammar import MAX_GRAMMAR, PARSER_LIMITS
from pdserve.text.child import Child, allow_processor_time, jobs, send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLTokenizer

    from pdserve.ids import Bytes, Seconds
    from pdserve.text.structured import Source
    from pdserve.text.tokenizer import Tokenizer

__all__ = ["GrammarProcess"]

SECONDS: Final[Seconds] = 2.0
"""Of processor time for one grammar; usual ones take milliseconds."""
_WALL: Final[Seconds] = 15.0
"""The same on a busy machine, looking at the vocabulary included."""
MEMORY: Final[Bytes] = 1 << 30
"""Address space of the child: the largest vocabularies take a third."""
_STARTUP: Final[Seconds] = 20.0
_MOST_KEPT: Final = 1024
_MOST_KEPT_TEXT: Final[Bytes] = 16 << 20
_STEPS_TRIED: Final = 8
"""Tokens that a grammar is followed for: some fail, or become slow, only then."""
_STEP_SECONDS: Final[Seconds] = 0.25
"""Of processor time for one of them: whatever else an engine computes would wait so long."""
_MOST_TRIALS: Final = 256
"""Compilations to find out what place of a schema is meant."""


class _Vocabulary(msgspec.Struct, array_like=True, tag=1):
    """Forget the one before."""

    tokenizer_json: bytes
    vocab_size: int


class _Job(msgspec.Struct, array_like=True, tag=2):
    kind: Literal["schema", "grammar", "ready"]
    text: str


class _Outcome(msgspec.Struct, array_like=True):
    grammar: str
    error: str = ""
    where: str = ""
    """Inside of a schema: `.properties.a`."""


class GrammarProcess:
    """At most one child, started when first needed."""

    def __init__(self, memory: Bytes = MEMORY, seconds: Seconds = SECONDS) -> None:
        self._memory = memory
        self._seconds = seconds
        self._turn = threading.Lock()
        self._child: Child | None = None
        self._vocabulary = b""
        """Whose vocabulary the child knows."""
        self._closed = False
        self._kept: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._kept_text = 0
        self.killed = 0
        """Children that had to be killed."""

    def known(self, tokenizer: Tokenizer, vocab_size: int, source: Source) -> str | None:
        """What `compile` returns, if that needs no compiling; it raises the same."""
        outcome = self._kept.get(_key(tokenizer, vocab_size, source))
        return None if outcome is None else _said(outcome, source)

    def compile(self, tokenizer: Tokenizer, vocab_size: int, source: Source) -> str:
        """The grammar of `source`, as engines read it. Takes seconds at most, once it is its turn.

        Errors: `InvalidRequest` that says where, `Draining` after `close`, `Unavailable` when no
        child can be started.
        """
        key = _key(tokenizer, vocab_size, source)
        with self._turn:
            outcome = self._kept.get(key)
            if outcome is None:
                outcome = self._ask(tokenizer, vocab_size, source)
                self._keep(key, outcome)
        return _said(outcome, source)

    def close(self) -> None:
        """Kill the child and collect it; what is being compiled fails. Idempotent."""
        self._closed = True
        child = self._child
        if child is not None:
            child.end()
        with self._turn:
            self._drop()

    def _keep(self, key: bytes, outcome: _Outcome) -> None:
        self._kept[key] = outcome
        self._kept_text += len(outcome.grammar) + len(outcome.error)
        while len(self._kept) > _MOST_KEPT or self._kept_text > _MOST_KEPT_TEXT:
            _, old = self._kept.popitem(last=False)
            self._kept_text -= len(old.grammar) + len(old.error)

    def _ask(self, tokenizer: Tokenizer, vocab_size: int, source: Source) -> _Outcome:
        job = msgspec.msgpack.encode(_Job(source.kind, source.text))
        try:
            child = self._ready_child(tokenizer, vocab_size)
            return msgspec.msgpack.decode(child.ask(job, _WALL), type=_Outcome)
        except TimeoutError:
            pass
        except (OSError, EOFError, msgspec.MsgspecError):
            self._refuse_when_killed()
        except BaseException:  # nobody will read the answer, so the next job must not find it
            self._drop()
            raise
        self._drop()
        self._refuse_when_closed()
        self.killed += 1
        return _Outcome("", "it takes too much time or memory to compile; make it smaller")

    def _refuse_when_killed(self) -> None:
        """By somebody else: that says nothing of the grammar, and is not kept as its fault."""
        self._refuse_when_closed()
        if self._child is not None and self._child.was_killed():
            self._drop()
            raise Unavailable("the process that compiles grammars was killed: try again")

    def _ready_child(self, tokenizer: Tokenizer, vocab_size: int) -> Child:
        if self._child is not None and self._child.ended():  # by someone else, while idle
            self._drop()
        self._refuse_when_closed()
        wanted = tokenizer.digest + vocab_size.to_bytes(8, "little")
        try:
            if self._child is None:
                self._child = Child(__name__, self._memory)
                self._refuse_when_closed()  # `close` may have looked before there was a child
                self._child.wait_ready(_STARTUP)
            if self._vocabulary != wanted:
                learn = _Vocabulary(tokenizer.json, vocab_size)
                reply = self._child.ask(msgspec.msgpack.encode(learn), _STARTUP)
                problem = msgspec.msgpack.decode(reply, type=_Outcome).error
                if problem:
                    raise InvalidRequest(f"grammars cannot be followed by this model: {problem}")
                self._vocabulary = wanted
        except (OSError, EOFError) as error:
            self._drop()
            self._refuse_when_closed()
            raise Unavailable(f"no process for grammars: {error}") from None
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        self._vocabulary = b""
        if child is not None:
            child.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("grammars are no longer compiled: shutting down")


def _key(tokenizer: Tokenizer, vocab_size: int, source: Source) -> bytes:
    state = hashlib.blake2b(tokenizer.digest, digest_size=16)
    state.update(f"{vocab_size} {source.kind} ".encode())
    state.update(source.text.encode())
    return state.digest()


def _said(outcome: _Outcome, source: Source) -> str:
    if outcome.error:
        param = source.param + outcome.where
        raise InvalidRequest(f"'{param}' cannot be enforced: {outcome.error}", param=param)
    return outcome.grammar


# -------------------------------------------------------------------- the child


def main() -> None:
    """Answer jobs until there are no more."""
    decoder = msgspec.msgpack.Decoder(_Vocabulary | _Job)
    tokenizer: Any = None
    for parent, frame in jobs():
        job = decoder.decode(frame)
        if isinstance(job, _Vocabulary):
            allow_processor_time(_STARTUP)
            tokenizer, outcome = _learned(job)
        else:
            allow_processor_time(SECONDS)
            outcome = _outcome(job, tokenizer)
        send(parent, msgspec.msgpack.encode(outcome))


def _learned(job: _Vocabulary) -> tuple[LLTokenizer | None, _Outcome]:
    from llguidance import LLTokenizer  # in the child only: the parent never needs it

    problem = ""
    for size in (job.vocab_size, None):  # a model may have fewer rows than that has tokens
        try:
            return LLTokenizer(job.tokenizer_json.decode(), n_vocab=size), _Outcome("")
        except ValueError as error:
            problem = problem or str(error)
    return None, _Outcome("", problem)


def _outcome(job: _Job, tokenizer: LLTokenizer) -> _Outcome:
    try:
        grammar = _lark(job.text) if job.kind == "grammar" else job.text
        if len(grammar) > MAX_GRAMMAR:
            return _Outcome("", f"its grammar has more than {MAX_GRAMMAR} characters")
        error = _trial(grammar, tokenizer)
        if not error:
            return _Outcome(grammar)
        where = _where(grammar, error, tokenizer) if job.kind == "schema" else ""
        return _Outcome("", _shortened(error), where)
    except (ValueError, RecursionError, MemoryError) as error:
        return _Outcome("", _shortened(str(error) or "it is too large"))


def _lark(text: str) -> str:
    """Of Lark or GBNF; never taken for llguidance's JSON, whatever it begins with."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = any_to_lark(text)
    except Exception as error:  # the converter raises what it likes
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def _trial(grammar: str, tokenizer: LLTokenizer) -> str:
    """Why engines could not follow it; empty: they can, at least for some tokens."""
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
    """The innermost part of the schema that alone is as wrong as the whole."""
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
    """The schemas inside of one."""
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
    error = error.removesuffix("\n<non-verbose/>")  # says that it could say more
    return error if len(error) <= 400 else error[:400] + " …"


if __name__ == "__main__":
    main()
