"""Runs `pdserve chat`: an interactive chat with a server, or one answer to a piped message.

Owns the terminal and one HTTP request at a time; `conversation.py` has the conversation's state.
Each answer runs on its own event loop, so that Ctrl-C ends the answer and not the chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.conversation import Conversation
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from pdserve.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"
_RETRIES = 2
"""Retries when the server is busy. Few, because a person sees the error sooner."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_SILENCE_TIMEOUT = 600.0
"""Seconds without a byte before giving up; the server may be busy with a long prompt."""


class ChatError(PdserveError):
    """The server cannot be reached, or it refused."""


@dataclass(slots=True)
class _Server:
    """The server's address and the request's options."""

    url: str
    api_key: str
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def client(self) -> Client:
        """A client for use in one event loop."""
        from pdserve.client import Client, Timeouts

        timeouts = Timeouts(first=_SILENCE_TIMEOUT, between=_SILENCE_TIMEOUT)
        return Client(self.url, self.api_key or None, timeout=timeouts, retries=_RETRIES)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer."""

    text: str
    thought: bool = False
    """True if it is the model's reasoning, which is shown but not part of the conversation."""


def run(arguments: list[str]) -> int:
    """Chats until the person leaves; with piped input, answers once."""
    parsed = _make_parser().parse(arguments)
    server = _Server(_address(parsed.url), parsed.api_key, parsed.model)
    for name in ("temperature", "max_tokens", "seed"):
        if (value := getattr(parsed, name)) is not None:
            server.settings[name] = value
    conversation = Conversation(parsed.system)
    if sys.stdin.isatty():
        return _Terminal(server, conversation).run()
    return _answer_piped(server, conversation)


def _make_parser() -> Parser:
    environ = os.environ
    parser = Parser(
        "pdserve chat",
        "Talk to a running server. `echo question | pdserve chat` prints one answer.",
        "PDSERVE_URL and PDSERVE_API_KEY stand in for the first two flags.",
    )
    add = parser.own.add_argument
    url = environ.get("PDSERVE_URL", DEFAULT_URL)
    add("--url", default=url, metavar="URL", help=f"The server. [{url}]")
    key = environ.get("PDSERVE_API_KEY", "")
    add("--api-key", default=key, metavar="KEY", help="If the server requires one.")
    add("--model", default="", metavar="NAME", help="[the first one served]")
    add("--system", default="", metavar="TEXT", help="System message.")
    add("--temperature", type=float, metavar="X", help="0: always the most likely token.")
    add("--max-tokens", type=int, metavar="N", help="Maximum tokens of an answer.")
    add("--seed", type=int, metavar="N", help="Same seed, same answer.")
    return parser


def _address(url: str) -> str:
    """The server's URL without the API's own path. Errors: `ConfigError`."""
    try:
        from pdserve.client.client import address_of

        return address_of(url)
    except ConfigError as error:
        raise ConfigError(f"--url: {error.message}") from None


def _answer_piped(server: _Server, conversation: Conversation) -> int:
    """Answers all of standard input as one message."""
    text = sys.stdin.read().strip()
    if not text:
        raise ChatError("nothing to say: standard input is empty")
    if text != _printed(text):
        raise ChatError("standard input is not text in UTF-8")
    conversation.say(text)

    async def answer() -> None:
        await _choose_model(server)
        shown = _Shown()
        async for piece in _stream(server, conversation):
            shown.piece(piece)

    asyncio.run(answer())
    _show("\n")
    return exit_codes.OK


class _Terminal:
    """The terminal of an interactive chat."""

    def __init__(self, server: _Server, conversation: Conversation) -> None:
        self._server = server
        self._conversation = conversation

    def run(self) -> int:
        with contextlib.closing(asyncio.Runner()) as runner, _line_editing():
            runner.run(_choose_model(self._server))
            print(f"{self._server.model} at {self._server.url}; /help for help, Ctrl-D to leave")
            while (line := _read_line()) is not None:
                if not self._on_line(line, runner.run):
                    break
        return exit_codes.OK

    def _on_line(self, line: str, run: Callable[[Coroutine[Any, Any, None]], None]) -> bool:
        """Handles one line; returns False when the person leaves."""
        reaction = self._conversation.on_line(line)
        if reaction.action == "tell":
            print(reaction.text)
        elif reaction.action == "ask":
            self._answer(run)
        return reaction.action != "quit"

    def _answer(self, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        pieces: list[str] = []
        shown = _Shown()

        async def answer() -> None:
            async for piece in _stream(self._server, self._conversation):
                if not piece.thought:
                    pieces.append(piece.text)
                shown.piece(piece)

        try:
            run(answer())
            end = ""
        except KeyboardInterrupt:
            end = "\n(stopped)"
        except ChatError as error:
            end = f"\n{error.message}"
        shown.close()
        print(end)
        if pieces:
            self._conversation.answered("".join(pieces))
        else:
            self._conversation.take_back()


async def _choose_model(server: _Server) -> None:
    """Asks which models are served, which also checks that the server can be reached."""
    async with _told(server), server.client() as client:
        models = await client.models()
    if not models:
        if server.api_key:
            raise ChatError(
                f"the server at {server.url} lists no model for this API key: it serves none yet, "
                "or the key's `models` names none of them"
            )
        raise ChatError(f"the server at {server.url} serves no model yet; try again in a moment")
    server.model = server.model or models[0].id


async def _stream(server: _Server, conversation: Conversation) -> AsyncIterator[AnswerPiece]:
    """Yields the answer's pieces as they come. Closing it ends the request at the server."""
    messages = conversation.to_send()
    async with (
        _told(server),
        server.client() as client,
        client.chat_stream(messages, model=server.model, **server.settings) as answer,
    ):
        async for chunk in answer:
            for choice in chunk.choices:
                delta = choice.delta
                if thought := delta.reasoning or delta.reasoning_content:
                    yield AnswerPiece(thought, thought=True)
                if delta.content:
                    yield AnswerPiece(delta.content)


def _printed(text: str) -> str:
    """Text in which bytes that are not UTF-8 (surrogates in Python) are replaced by U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def _told(server: _Server) -> AsyncIterator[None]:
    """Raises the client's errors as `ChatError`, in words for a person."""
    from pdserve.client import APIError, BadAnswer, ClientError, ConnectionFailed

    try:
        yield
    except APIError as error:
        raise ChatError(f"refused ({error.status}): {error.message}") from None
    except BadAnswer:
        raise ChatError(f"what answers at {server.url} does not speak the OpenAI API") from None
    except ConnectionFailed as error:
        raise ChatError(
            f"{error.message}: start one with `pdserve` in another terminal, or name one with --url"
            if error.refused
            else error.message
        ) from None
    except ClientError as error:
        raise ChatError(error.message) from None


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


class _Shown:
    """Prints an answer; reasoning is dim on a terminal, and left out of a pipe."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._thinking = False

    def piece(self, piece: AnswerPiece) -> None:
        """Prints one more piece."""
        if piece.thought and not self._terminal:
            return
        self._style(piece.thought)
        _show(piece.text)

    def close(self) -> None:
        """Returns to plain text."""
        self._style(False)

    def _style(self, thinking: bool) -> None:
        if thinking != self._thinking:
            sys.stdout.write(_DIM if thinking else f"{_PLAIN}\n")
            self._thinking = thinking


def _read_line() -> str | None:
    """Reads one line, or several joined lines that end in a backslash; None when the person
    leaves."""
    lines: list[str] = []
    prompt = "> "
    while True:
        try:
            line = _printed(input(prompt))
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit leaves)")
            lines.clear()
            prompt = "> "
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)
        prompt = ". "


@contextlib.contextmanager
def _line_editing() -> Any:
    """Enables line editing and the history of earlier chats, where the platform has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    path = Path(state) / "pdserve" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
