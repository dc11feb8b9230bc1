"""Compiles grammars in child processes and caches the results, failures included (LRU).

Each child compiles one grammar at a time and is killed at the time limit. Only the tenant of that
grammar should pay: while a grammar takes longer than usual, its waiting thread prepares a spare
child, and a tenant with a recently killed grammar starts its own child instead of taking the last
idle one. Any thread may call. `text/text_pool.py` owns one and bounds the concurrent callers.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from pdserve.errors import Draining, InvalidRequest, PdserveError
from pdserve.text.grammar.grammar_process import GrammarOutcome, GrammarProcess, vocabulary_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Bytes, Seconds
    from pdserve.text.grammar.grammar_source import GrammarSource
    from pdserve.text.tokenization.tokenizer import Tokenizer

__all__ = ["GrammarCache", "GrammarCompiler"]

_MOST_KEPT: Final = 1024
_MOST_KEPT_TEXT: Final[Bytes] = 16 << 20
_MOST_IDLE: Final = 2
"""Maximum number of idle children; each takes memory in proportion to the vocabulary."""
_PENALTY: Final[Seconds] = 60.0
"""Time for which a tenant is remembered after its grammar was killed."""
_MOST_PENALTIES: Final = 1024


class GrammarCache:
    """LRU cache of compile results, bounded in number and text. Any thread may call."""

    def __init__(self, most: int = _MOST_KEPT, most_text: Bytes = _MOST_KEPT_TEXT) -> None:
        self._most = most
        self._most_text = most_text
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, GrammarOutcome] = OrderedDict()
        self._text: Bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> GrammarOutcome | None:
        """Return the cached result and mark it as used; None if there is none."""
        with self._lock:
            outcome = self._kept.get(key)
            if outcome is not None:
                self._kept.move_to_end(key)
            return outcome

    def keep(self, key: bytes, outcome: GrammarOutcome) -> None:
        """Store a result and evict the least recently used ones over the bounds."""
        with self._lock:
            self._text += _size(outcome) - _size(self._kept.pop(key, None))
            self._kept[key] = outcome
            while len(self._kept) > self._most or self._text > self._most_text:
                _, oldest = self._kept.popitem(last=False)
                self._text -= _size(oldest)


def _size(outcome: GrammarOutcome | None) -> Bytes:
    return 0 if outcome is None else len(outcome.grammar) + len(outcome.error)


class GrammarCompiler:
    """Compiles grammars in child processes and caches the results. Any thread may call."""

    def __init__(
        self,
        start: Callable[[], GrammarProcess] = GrammarProcess,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        """`start` creates a `GrammarProcess`, which starts its child at its first use."""
        self._start = start
        self._clock = clock
        self._kept = GrammarCache()
        self._lock = threading.Lock()
        self._idle: list[GrammarProcess] = []
        self._busy: set[GrammarProcess] = set()
        self._penalties: OrderedDict[str, Seconds] = OrderedDict()
        """Time of killed grammars by tenant."""
        self._closed = False
        self.killed = 0
        """Number of children that were killed."""

    def known(
        self, tokenizer: Tokenizer, vocab_size: int, source: GrammarSource, salt: str = ""
    ) -> str | None:
        """Return the cached result of `compile`, or None. Raises what `compile` would raise."""
        outcome = self._kept.get(_key(tokenizer, vocab_size, source, salt))
        return None if outcome is None else _said(outcome, source)

    def compile(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        source: GrammarSource,
        tenant: str = "",
        salt: str = "",
    ) -> str:
        """Compile `source` to the form that engines read. Takes a few seconds at most.

        `tenant` is charged for a killed child; the result is cached under `salt`.

        Errors: `InvalidRequest` that says where, `Draining` after `close`, `Unavailable` when no
        child can be started.
        """
        key = _key(tokenizer, vocab_size, source, salt)
        # An equal grammar may have been compiled while this job waited for a thread.
        outcome = self._kept.get(key)
        if outcome is None:
            outcome = self._compile(tokenizer, vocab_size, source, tenant)
            self._kept.keep(key, outcome)
        return _said(outcome, source)

    def close(self) -> None:
        """Kill and reap all children; running compilations fail. Idempotent."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._busy]
            self._idle.clear()
        # All children end first: a thread that uses one may wait until another is ready.
        for process in processes:
            process.end()
        for process in processes:
            process.close()

    # ------------------------------------------------------------------ inside

    def _compile(
        self, tokenizer: Tokenizer, vocab_size: int, source: GrammarSource, tenant: str
    ) -> GrammarOutcome:
        process = self._borrow(vocabulary_id(tokenizer, vocab_size), tenant)
        killed = process.killed
        try:
            return process.compile(
                tokenizer, vocab_size, source, lambda: self._prepare(tokenizer, vocab_size)
            )
        finally:
            if process.killed > killed:
                self._note_killed(tenant)
            self._give_back(process)

    def _borrow(self, vocabulary: bytes, tenant: str) -> GrammarProcess:
        """Return an idle child, preferably one that knows the vocabulary, or a new one."""
        with self._lock:
            if self._closed:
                raise Draining("grammars are no longer compiled: shutting down")
            ready = [each for each in self._idle if each.vocabulary == vocabulary]
            spare = ready or self._idle
            if spare and not (len(ready) < 2 and self._is_penalised(tenant)):
                process = spare[-1]
                self._idle.remove(process)
            else:
                process = self._start()
            self._busy.add(process)
            return process

    def _give_back(self, process: GrammarProcess) -> None:
        with self._lock:
            self._busy.discard(process)
            keep = not self._closed and process.vocabulary and len(self._idle) < _MOST_IDLE
            if keep:
                self._idle.append(process)
        if not keep:
            process.close()

    def _prepare(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Start a spare child unless one is idle."""
        wanted = vocabulary_id(tokenizer, vocab_size)
        with self._lock:
            if self._closed or any(each.vocabulary == wanted for each in self._idle):
                return
            process = self._start()
            self._busy.add(process)
        try:
            process.learn(tokenizer, vocab_size)
        except PdserveError:
            # The next caller that needs a child gets the error.
            pass
        finally:
            self._give_back(process)

    def _note_killed(self, tenant: str) -> None:
        with self._lock:
            self.killed += 1
            self._penalties.pop(tenant, None)
            self._penalties[tenant] = self._clock()
            if len(self._penalties) > _MOST_PENALTIES:
                self._penalties.popitem(last=False)

    def _is_penalised(self, tenant: str) -> bool:
        at = self._penalties.get(tenant)
        return at is not None and self._clock() - at < _PENALTY


def _key(tokenizer: Tokenizer, vocab_size: int, source: GrammarSource, salt: str) -> bytes:
    apart = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    state = hashlib.blake2b(tokenizer.digest + apart, digest_size=16)
    state.update(f"{vocab_size} {source.kind} ".encode())
    state.update(source.text.encode())
    return state.digest()


def _said(outcome: GrammarOutcome, source: GrammarSource) -> str:
    if outcome.error:
        param = source.param + outcome.where
        raise InvalidRequest(f"'{param}' cannot be enforced: {outcome.error}", param=param)
    return outcome.grammar
