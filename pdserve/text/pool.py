"""Runs long text work off the event loop: tokenising, templates, decoding of whole prompts.

A bounded number of threads works; a bounded number of jobs waits; at the bound a job is refused at
once with `Overloaded`, since a queue in front of the tokenizer only hides that the frontend is too
slow. Short work runs in place, where it costs less than handing it over.

It knows nothing of what it runs, save that a template or a grammar brought along by a request goes
to a process that can be killed (`template_process.py`, `grammar_process.py`). Its owner, the
frontend's service, makes one and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from pdserve.errors import Draining, Overloaded
from pdserve.text.grammar_process import GrammarProcess
from pdserve.text.template_process import TemplateProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.text.chat_messages import Message
    from pdserve.text.structured import Source
    from pdserve.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

INLINE_CHARS = 1024
"""Text up to this length is tokenised in place. Measured on one core: encoding takes 0.18 us a
character; handing over takes 0.04 ms of the loop's own time and adds 0.08 ms to the answer. So at
this length the loop stands still for 0.2 ms, and would for 0.04 ms."""


@dataclass(frozen=True, slots=True)
class TextPoolStats:
    """A snapshot of the pool; the last three count since the start."""

    jobs: int
    """Handed over and not ended."""
    inline: int
    """Jobs that ran in place."""
    handed_over: int
    refused: int
    """Jobs turned away at a bound."""


class TextPool:
    """A bounded pool of threads for text work. Used from one event loop's thread."""

    def __init__(
        self,
        threads: int = 2,
        max_jobs: int = 256,
        inline_chars: int = INLINE_CHARS,
        max_foreign: int = 8,
        foreign: TemplateProcess | None = None,
        max_grammars: int = 64,
        grammars: GrammarProcess | None = None,
    ) -> None:
        """`max_jobs` counts running and waiting jobs together, `max_foreign` those of templates
        that requests brought along: they run one at a time, in `foreign`, so that bad ones delay
        each other only. So do `max_grammars` in `grammars`."""
        self._inline_chars = inline_chars
        self._work = _Lane("pdserve-text", threads, max_jobs)
        self._foreign_lane = _Lane("pdserve-template", 1, max_foreign)
        self._foreign = foreign or TemplateProcess()
        self._grammar_lane = _Lane("pdserve-structure", 1, max_grammars)
        self._grammars = grammars or GrammarProcess()
        self._closed = False
        self._inline = 0

    async def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool = True
    ) -> list[int]:
        """`tokenizer.encode`; see `run` for errors and cancellation."""
        return await self.run(
            len(text), tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def encode_batch(
        self, tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`tokenizer.encode_batch`; see `run` for errors and cancellation."""
        chars = sum(map(len, texts))
        return await self.run(
            chars, tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens
        )

    async def run(
        self, chars: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(*args, **kwargs)`, in place when `chars`, the size of its input, is small.

        Errors: `Overloaded` at the bound, `Draining` after `close`, and what `function` raises.
        Cancellation: a job that waits is withdrawn; one that runs ends unheard and keeps its place
        until then.
        """
        self._refuse_when_closed()
        if chars <= self._inline_chars:
            self._inline += 1
            return function(*args, **kwargs)
        return await self._work.submit(lambda: function(*args, **kwargs))

    async def render_foreign(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Message],
        options: Mapping[str, Any],
    ) -> str:
        """Render a template that a request brought along, in a process that can be killed.

        See `TemplateProcess.render` for arguments and errors, `run` for the rest.
        """
        self._refuse_when_closed()
        return await self._foreign_lane.submit(
            lambda: self._foreign.render(source, special_tokens, messages, options)
        )

    async def compile_grammar(self, tokenizer: Tokenizer, vocab_size: int, source: Source) -> str:
        """The grammar of `source`, compiled in a process that can be killed, unless it is known.

        See `GrammarProcess.compile` for errors, `run` for the rest.
        """
        self._refuse_when_closed()
        known = self._grammars.known(tokenizer, vocab_size, source)
        if known is not None:
            return known
        return await self._grammar_lane.submit(
            lambda: self._grammars.compile(tokenizer, vocab_size, source)
        )

    def statistics(self) -> TextPoolStats:
        """What the pool does now and has done."""
        lanes = (self._work, self._foreign_lane, self._grammar_lane)
        return TextPoolStats(
            jobs=sum(len(lane.jobs) for lane in lanes),
            inline=self._inline,
            handed_over=sum(lane.accepted for lane in lanes),
            refused=sum(lane.refused for lane in lanes),
        )

    async def close(self, timeout: Seconds = 5.0) -> bool:
        """Take no more jobs, withdraw those that wait, give running ones `timeout` seconds.

        Returns whether all have ended. Idempotent. Cancellation: jobs go on ending by themselves.
        """
        self._closed = True
        self._work.stop()
        self._foreign_lane.stop()
        self._grammar_lane.stop()
        self._foreign.close()
        self._grammars.close()
        try:
            async with asyncio.timeout(timeout):
                await self._work.wait_idle()
                await self._foreign_lane.wait_idle()
                await self._grammar_lane.wait_idle()
        except TimeoutError:
            return False
        return True

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("text is no longer processed: shutting down")


class _Lane:
    """Some threads and the jobs handed to them."""

    def __init__(self, name: str, threads: int, max_jobs: int) -> None:
        if threads < 1 or max_jobs < threads:
            raise ValueError("need threads >= 1 and max_jobs >= threads")
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_jobs = max_jobs
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped = False
        self.jobs: set[Future[Any]] = set()
        self.accepted = 0
        self.refused = 0

    async def submit(self, function: Callable[[], T]) -> T:
        if len(self.jobs) >= self._max_jobs:
            self.refused += 1
            raise Overloaded(f"{self._max_jobs} texts are already being processed", retry_after=1.0)
        self.accepted += 1
        job = self._executor.submit(function)
        self.jobs.add(job)
        self._idle.clear()
        loop = asyncio.get_running_loop()
        # Before the waiter's own callback: its place is free when it hears of the end.
        job.add_done_callback(lambda done: self._ended_in_thread(loop, done))
        outcome = asyncio.wrap_future(job)
        try:
            return await outcome
        except asyncio.CancelledError:
            if self._stopped and job.cancelled() and not _being_cancelled():
                raise Draining("the text was not processed: shutting down") from None
            raise

    def stop(self) -> None:
        """Take no more jobs and withdraw those that wait, which then raise `Draining`."""
        self._stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def wait_idle(self) -> None:
        """Until every job has ended."""
        await self._idle.wait()

    def _ended_in_thread(self, loop: asyncio.AbstractEventLoop, job: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who counts jobs
            loop.call_soon_threadsafe(self._ended, job)

    def _ended(self, job: Future[Any]) -> None:
        self.jobs.discard(job)
        if not self.jobs:
            self._idle.set()


def _being_cancelled() -> bool:
    """Whether somebody cancelled the current task, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
