"""Runs long text work off the event loop: tokenising, templates, decoding of whole prompts.

Threads and waiting jobs are bounded and shared fairly among tenants; at the bound a job fails at
once with `Overloaded`, since a longer queue only hides a slow frontend. Short work runs in place,
which is cheaper. Templates and grammars from requests go to child processes that can be killed
(`chat/template_process.py`, `grammar/grammar_compiler.py`). The frontend's service owns the pool.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from pdserve.errors import Draining, Overloaded
from pdserve.text.chat.template_process import TemplateProcess
from pdserve.text.fair_thread_pool import JOB_SECONDS, FairThreadPool
from pdserve.text.grammar.grammar_compiler import GrammarCompiler
from pdserve.text.tokenization.slow_text import SlowText, run_in_place, text_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.text.chat.chat_messages import ChatMessage
    from pdserve.text.grammar.grammar_source import GrammarSource
    from pdserve.text.tokenization.tokenizer import Tokenizer
    from pdserve.token_ids import TokenIds

__all__ = [
    "INLINE_CHARS",
    "INLINE_FAST",
    "LARGE_CHARS",
    "TextPool",
    "TextPoolStats",
    "TextWork",
    "encoding_chars",
    "text_size",
]

_log = logging.getLogger("pdserve.text")

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARS = 4096
"""Text up to this length is tokenised in place: `tokenizers` takes 0.2 us a character, so the loop
is blocked for about 1 ms. A thread costs the process 0.2 to 0.3 ms, because it and the loop take
the interpreter's lock in turns."""
INLINE_FAST: Final = 16
"""Text that the extension encodes may be this many times as long, 64 KiB: it takes 0.01 to 0.03 us
a byte, at most 0.1 us (bench/results/encode_text.md)."""
LARGE_CHARS = 1 << 20
"""Jobs with more text than this run one at a time: tokenizers need about 150 bytes a character."""
_SPARE: Final = 2
"""Extra threads of a thread pool, only for tenants without a running job."""


def encoding_chars(size: int, tokenizer: Tokenizer) -> int:
    """Cost of encoding text of this size, in characters for `tokenizers`.

    Text that is too long for the event loop counts as a whole, because its memory counts as well.
    """
    if tokenizer.is_fast and size <= INLINE_FAST * INLINE_CHARS:
        return -(-size // INLINE_FAST)
    return size


@dataclass(frozen=True, slots=True)
class TextPoolStats:
    """A snapshot of the pool."""

    jobs: int
    """Jobs submitted to threads and not finished."""
    inline: int
    """Jobs that ran in place, since the start."""
    handed_over: int
    """Jobs submitted to threads, since the start."""
    refused: int
    """Jobs refused at a bound, since the start."""
    given_up: int
    """Jobs that passed their deadline, since the start."""
    stuck: int
    """Abandoned threads that still run."""


class TextWork:
    """The text pool for one tenant. Use it from one event loop's thread."""

    def __init__(self, pool: TextPool, tenant: str, salt: str) -> None:
        """Create with `TextPool.of`."""
        self._pool = pool
        self._tenant = tenant
        self._salt = salt

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool = True
    ) -> TokenIds:
        """Run `tokenizer.encode` in the pool; errors and cancellation as for `run`."""
        return await self._place(
            encoding_chars(text_size(text), tokenizer),
            lambda: tokenizer.encode(text, add_special_tokens, salt=self._salt),
        )

    async def encode_batch(
        self, tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[TokenIds]:
        """Run `tokenizer.encode_batch` in the pool; errors and cancellation as for `run`."""
        return await self._place(
            encoding_chars(sum(map(text_size, texts)), tokenizer),
            lambda: tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens),
        )

    async def run(
        self, chars: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function(*args, **kwargs)`: in place if its input of `chars` characters is small. It
        begins again in a thread if the extension leaves its text to `tokenizers`.

        Errors: `Overloaded` at the bound, `Draining` after `close`, `DeadlineExceeded` when it
        takes too long in a thread, and what `function` raises.
        Cancellation: a waiting job is withdrawn; a running one keeps its thread until it ends, and
        its result is dropped.
        """
        return await self._place(chars, lambda: function(*args, **kwargs))

    async def _place(self, chars: int, function: Callable[[], T]) -> T:
        pool = self._pool
        pool.refuse_when_closed()
        if chars <= pool.inline_chars:
            pool.inline += 1
            try:
                return run_in_place(pool.inline_chars, function)
            except SlowText:
                # The extension has left it to `tokenizers`: only the time until then is lost.
                pool.inline -= 1
        return await pool.texts.submit(function, tenant=self._tenant, large=chars > LARGE_CHARS)

    async def finish(self, chars: int, function: Callable[[], T]) -> T:
        """Run the last step of an admitted request: like `run`, but never refused at the bound.

        Errors: `DeadlineExceeded`, and what `function` raises.
        """
        pool = self._pool
        if chars > pool.inline_chars and not pool.closed:
            try:
                return await pool.texts.submit(function, tenant=self._tenant, first=True)
            except (Draining, Overloaded):
                # The pool was closed meanwhile, or no thread can be started. The request was
                # admitted, so its last step runs here.
                pass
        pool.inline += 1
        return function()

    async def render_foreign(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[ChatMessage],
        options: Mapping[str, Any],
    ) -> str:
        """Render a template from a request in a child process that can be killed.

        Arguments and errors as for `TemplateProcess.render`, and errors of `run`.
        """
        pool = self._pool
        pool.refuse_when_closed()
        return await pool.templates.submit(
            lambda: pool.foreign.render(source, special_tokens, messages, options),
            tenant=self._tenant,
        )

    async def compile_grammar(
        self, tokenizer: Tokenizer, vocab_size: int, source: GrammarSource
    ) -> str:
        """Compile the grammar of `source` in a child process, unless it is cached.

        Errors as for `GrammarCompiler.compile` and `run`.
        """
        pool, tenant, salt = self._pool, self._tenant, self._salt
        pool.refuse_when_closed()
        known = pool.grammars.known(tokenizer, vocab_size, source, salt)
        if known is not None:
            return known
        return await pool.structures.submit(
            lambda: pool.grammars.compile(tokenizer, vocab_size, source, tenant, salt),
            tenant=tenant,
        )


class TextPool(TextWork):
    """Bounded threads for text work. As a `TextWork` it belongs to no tenant."""

    def __init__(
        self,
        threads: int = 2,
        max_jobs: int = 256,
        inline_chars: int = INLINE_CHARS,
        max_foreign: int = 8,
        foreign: TemplateProcess | None = None,
        max_grammars: int = 64,
        grammars: GrammarCompiler | None = None,
        seconds: Seconds = JOB_SECONDS,
    ) -> None:
        """`max_jobs` counts running and waiting jobs together, `max_foreign` those of templates
        that requests brought along: they run one at a time, in `foreign`. `max_grammars` are
        compiled a few at a time, in `grammar.grammar_compiler`. `seconds`: what one job may
        take."""
        super().__init__(self, "", "")
        self.inline_chars = inline_chars

        def changed() -> None:
            self.on_stuck(self.stats())

        self.texts = FairThreadPool(
            *("pdserve-text", threads, max_jobs),
            spare=_SPARE,
            seconds=seconds,
            changed=changed,
        )
        self.templates = FairThreadPool(
            "pdserve-template", 1, max_foreign, seconds=seconds, changed=changed
        )
        compilers = min(max(2, (os.cpu_count() or 2) // 2), 4, max_grammars)
        self.structures = FairThreadPool(
            *("pdserve-structure", compilers, max_grammars),
            spare=_SPARE,
            seconds=seconds,
            changed=changed,
        )
        self.foreign = foreign or TemplateProcess()
        self.grammars = grammars or GrammarCompiler()
        self.on_stuck: Callable[[TextPoolStats], None] = lambda text: None
        """Called when a job passes its deadline, and when the thread of such a job ends."""
        self.closed = False
        self.inline = 0

    def of(self, tenant: str, salt: str = "") -> TextWork:
        """Return the pool for a tenant; a tenant's number of jobs does not delay others.

        `salt`: cached texts and grammars are found under the same salt only.
        """
        return TextWork(self, tenant, salt)

    def stats(self) -> TextPoolStats:
        """Return the pool's current state and counters."""
        lanes = self._lanes()
        return TextPoolStats(
            jobs=sum(len(lane.jobs) for lane in lanes),
            inline=self.inline,
            handed_over=sum(lane.accepted for lane in lanes),
            refused=sum(lane.refused for lane in lanes),
            given_up=sum(lane.given_up for lane in lanes),
            stuck=sum(lane.stuck for lane in lanes),
        )

    async def close(self, timeout: Seconds = 5.0) -> bool:
        """Take no more jobs, withdraw those that wait, give running ones `timeout` seconds.

        Returns whether all have ended; the others are abandoned. Idempotent. Cancellation: jobs go
        on ending by themselves.
        """
        self.closed = True
        for lane in self._lanes():
            lane.stop()
        self.foreign.close()
        self.grammars.close()
        try:
            async with asyncio.timeout(timeout):
                for lane in self._lanes():
                    await lane.wait_quiet()
        except TimeoutError:
            pass
        finally:
            left = sum(lane.end() for lane in self._lanes())
            if left:
                _log.warning("%d text jobs did not end within %g s: left behind", left, timeout)
        return not left

    def refuse_when_closed(self) -> None:
        """Errors: `Draining` after `close`."""
        if self.closed:
            raise Draining("text is no longer processed: shutting down")

    def _lanes(self) -> tuple[FairThreadPool, ...]:
        return (self.texts, self.templates, self.structures)
