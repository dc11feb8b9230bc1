"""Renders untrusted chat templates (from requests) in a child process that can be killed.

`template_sandbox.py` stops a template in its loops and calls. It cannot stop one built-in operation
that takes forever (comparing lists that hold each other's copies forty levels deep) or all memory.
The child has limits on memory and processor time and only its socket open, and is killed when its
answer is late. A child that answered in time is reused. `TemplateProcess` is the parent side,
`main` the child side. `text/text_pool.py` owns one and gives it a thread.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.text.chat.template_limits import TemplateLimits
from pdserve.text.killable_process import KillableProcess, limit_cpu_time, receive_jobs, send_answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Bytes, Seconds
    from pdserve.text.chat.chat_messages import ChatMessage
    from pdserve.text.chat.chat_template import ChatTemplate

UNTRUSTED_LIMITS = TemplateLimits(
    source_chars=128 * 1024, output_chars=8 * 2**20, work_chars=32 * 2**20, seconds=2.0
)
"""Limits of a template that came with a request."""
MEMORY: Bytes = 768 * 2**20
"""Address space of the child; Python itself maps about a fifth of it."""
STARTUP: Seconds = 20.0
"""Time a child has to start on a busy machine; usually it takes 0.2 s."""
_GRACE: Seconds = 0.5
"""Time after the meter's limit before the child is killed, so that its own error can arrive."""


class _Job(msgspec.Struct, array_like=True):
    source: str
    special_tokens: dict[str, str]
    limits: tuple[int, int, int, int, float]
    messages: list[dict[str, Any]]
    options: dict[str, Any]


class _Outcome(msgspec.Struct, array_like=True):
    text: str | None
    error: str = ""
    param: str | None = None


class TemplateProcess:
    """Owns at most one child, started when first needed. Any thread may call; one at a time is
    served."""

    def __init__(self, limits: TemplateLimits = UNTRUSTED_LIMITS, memory: Bytes = MEMORY) -> None:
        self._limits = limits
        self._memory = memory
        self._turn = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self.killed = 0
        """Number of children that were killed."""

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[ChatMessage],
        options: Mapping[str, Any],
    ) -> str:
        """Return `ChatTemplate(source, special_tokens).render(messages, **options)`, whatever the
        template does.

        Once this call is served it takes at most the limits' `seconds`, half a second, and perhaps
        the start of a child. Errors: `InvalidRequest` for anything the template does, `Draining`
        after `close`, `Unavailable` when no child can be started.
        """
        limits = self._limits
        job = _Job(
            source,
            dict(special_tokens),
            (
                limits.source_chars,
                limits.output_chars,
                limits.work_chars,
                limits.steps,
                limits.seconds,
            ),
            [dict(message) for message in messages],
            dict(options),
        )
        try:
            frame = msgspec.msgpack.encode(job)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise InvalidRequest("messages and options must be JSON", param="messages") from None
        with self._turn:
            outcome = self._ask(frame)
        if outcome.text is None:
            raise InvalidRequest(outcome.error, param=outcome.param)
        return outcome.text

    def close(self) -> None:
        """Kill the child and collect it; a rendering in progress fails. Idempotent."""
        self._closed = True
        child = self._child
        if child is not None:
            # The thread that uses the child now reads the end of the stream and gives up its turn.
            child.end()
        with self._turn:
            self._drop()

    def _ask(self, frame: bytes) -> _Outcome:
        child = self._ready_child()
        try:
            reply = child.ask(frame, self._limits.seconds + _GRACE)
            return msgspec.msgpack.decode(reply, type=_Outcome)
        except TimeoutError:
            reason = f"takes over {self._limits.seconds:g} s"
        except (OSError, EOFError, msgspec.MsgspecError):
            reason = "ended its process, by using too much memory or time"
        except BaseException:
            # The answer stays unread in the child's socket, and the next job must not get it.
            self._drop()
            raise
        self._drop()
        self._refuse_when_closed()
        self.killed += 1
        return _Outcome(None, f"the chat template {reason}", "chat_template")

    def _ready_child(self) -> _Child:
        # Another process may have killed the idle child.
        if self._child is not None and self._child.ended():
            self._drop()
        self._refuse_when_closed()
        if self._child is None:
            try:
                self._child = _Child(self._memory)
                # `close` may have looked for a child before this one was started.
                self._refuse_when_closed()
                self._child.wait_ready(STARTUP)
            except (OSError, EOFError) as error:
                self._drop()
                self._refuse_when_closed()
                raise Unavailable(f"no process for the chat template: {error}") from None
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise Draining("chat templates are no longer rendered: shutting down")


class _Child(KillableProcess):
    """A child process that renders."""

    def __init__(self, memory: Bytes) -> None:
        super().__init__(__name__, memory)


# -------------------------------------------------------------------- the child


def main() -> None:
    """Run the child: answer jobs until the parent closes the socket."""
    for parent, frame in receive_jobs():
        job = msgspec.msgpack.decode(frame, type=_Job)
        limit_cpu_time(job.limits[-1])
        send_answer(parent, msgspec.msgpack.encode(_outcome(job)))


def _outcome(job: _Job) -> _Outcome:
    try:
        return _Outcome(_rendered(job))
    except InvalidRequest as error:
        return _Outcome(None, error.message, error.param)
    except MemoryError:
        return _Outcome(None, "the chat template uses too much memory", "chat_template")


def _rendered(job: _Job) -> str:
    template = _compiled(job.source, tuple(job.special_tokens.items()), job.limits)
    return template.render(job.messages, **job.options)


@lru_cache(maxsize=8)
def _compiled(
    source: str, special_tokens: tuple[tuple[str, str], ...], limits: tuple[Any, ...]
) -> ChatTemplate:
    # Only the child imports the template language for it.
    from pdserve.text.chat.chat_template import ChatTemplate

    return ChatTemplate(source, dict(special_tokens), limits=TemplateLimits(*limits))


if __name__ == "__main__":
    main()
