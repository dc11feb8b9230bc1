"""`pdserve chat`: talk to a running server from a terminal, or answer one piped message.

Owns the terminal and one HTTP request at a time; the conversation's state is `conversation.py`'s.
Each answer runs on an event loop of its own life, so that Ctrl-C ends the answer and not the chat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pdserve.cli.conversation import Conversation, printable
from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError, PdserveError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    import aiohttp

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT = 10.0
"""Seconds to reach the server."""
_SILENCE_TIMEOUT = 600.0
"""Seconds without a byte before the server is given up; it may be busy with a long prompt."""


class ChatError(PdserveError):
    """The server cannot be reached, or refused."""


@dataclass(slots=True)
class _Server:
    """Where to ask, and how."""

    url: str
    api_key: str
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def session(self) -> aiohttp.ClientSession:
        import aiohttp

        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=_SILENCE_TIMEOUT
        )
        return aiohttp.ClientSession(headers=headers, timeout=timeout)


def run(arguments: list[str]) -> int:
    """Chat until the person leaves; with piped input, answer once."""
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
    add("--api-key", default=key, metavar="KEY", help="If the server asks for one.")
    add("--model", default="", metavar="NAME", help="[the first one served]")
    add("--system", default="", metavar="TEXT", help="System message.")
    add("--temperature", type=float, metavar="X", help="0 is always the likeliest token.")
    add("--max-tokens", type=int, metavar="N", help="Length of an answer at most.")
    add("--seed", type=int, metavar="N", help="Same seed, same answer.")
    return parser


def _address(url: str) -> str:
    """The server's URL without the API's own path. Errors: `ConfigError`."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or " " in url:
        raise ConfigError(f"--url: {url!r} is no address such as {DEFAULT_URL}")
    return whole.rstrip("/").removesuffix("/v1")


def _answer_piped(server: _Server, conversation: Conversation) -> int:
    """All of standard input is one message."""
    text = sys.stdin.read().strip()
    if not text:
        raise ChatError("nothing to say: standard input is empty")
    if text != _printed(text):
        raise ChatError("standard input is not text in UTF-8")
    conversation.say(text)

    async def answer() -> None:
        await _choose_model(server)
        async for piece in _stream(server, conversation):
            _show(piece)

    asyncio.run(answer())
    _show("\n")
    return exit_codes.OK


class _Terminal:
    """A person at a keyboard."""

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
        """React to one line; False when the person leaves."""
        reaction = self._conversation.on_line(line)
        if reaction.action == "tell":
            print(reaction.text)
        elif reaction.action == "ask":
            self._answer(run)
        return reaction.action != "quit"

    def _answer(self, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        pieces: list[str] = []

        async def answer() -> None:
            async for piece in _stream(self._server, self._conversation):
                pieces.append(piece)
                _show(piece)

        try:
            run(answer())
            print()
        except KeyboardInterrupt:
            print("\n(stopped)")
        except ChatError as error:
            print(f"\n{error.message}")
        if pieces:
            self._conversation.answered("".join(pieces))
        else:
            self._conversation.take_back()


async def _choose_model(server: _Server) -> None:
    """Ask what is served, which also tells whether anybody is there."""
    async with _request(server, "GET", "/v1/models") as response:
        try:
            models = [_text(entry["id"]) for entry in (await response.json())["data"]]
        except (ValueError, KeyError, TypeError):
            raise _stranger(server) from None
    if not models:
        raise ChatError(f"the server at {server.url} serves no model yet")
    server.model = server.model or models[0]


async def _stream(server: _Server, conversation: Conversation) -> AsyncIterator[str]:
    """Pieces of the answer as they come. Closing it ends the request at the server."""
    from pdserve.openai.sse import SseDecoder

    body = {"model": server.model, "messages": conversation.to_send(), "stream": True}
    decoder = SseDecoder()
    async with _request(server, "POST", "/v1/chat/completions", body | server.settings) as response:
        async for chunk in response.content.iter_any():
            for event in decoder.feed(chunk):
                if event.done:
                    return
                if piece := _piece(server, event.data):
                    yield piece
    raise ChatError("the connection ended before the answer did")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _printed(text: str) -> str:
    """Text with bytes that are no UTF-8, which Python smuggles in as surrogates, as U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _piece(server: _Server, data: str) -> str:
    """The text of one chunk. Errors: `ChatError` if it reports one, or is none."""
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
        if not error:
            choices = chunk.get("choices") or [{}]
            return str(choices[0].get("delta", {}).get("content") or "")
        message = error.get("message", error)
    except (ValueError, AttributeError, LookupError, TypeError):
        raise _stranger(server) from None
    raise ChatError(f"the server failed: {message}")


def _stranger(server: _Server) -> ChatError:
    return ChatError(f"what answers at {server.url} does not speak the OpenAI API")


@contextlib.asynccontextmanager
async def _request(
    server: _Server, method: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """One request whose status is good. Errors: `ChatError` in words for a person."""
    import aiohttp

    try:
        async with (
            server.session() as session,
            session.request(method, server.url + path, json=body) as response,
        ):
            if response.status != 200:
                raise ChatError(await _refusal(response))
            yield response
    except aiohttp.ClientConnectorError:
        raise ChatError(
            f"no server answers at {server.url}: start one with `pdserve` in another terminal, "
            "or name one with --url"
        ) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ChatError(f"the connection to {server.url} broke: {error}") from None


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The server's own words, if it is one of ours."""
    text = await response.text()
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200] or response.reason
    return f"refused ({response.status}): {message}"


def _show(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


def _read_line() -> str | None:
    """One line, or several joined where each ends in a backslash; None when the person leaves."""
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
    """Editing and the history of earlier chats, where the platform has readline."""
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
