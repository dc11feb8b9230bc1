"""`pdserve top`: the cluster's status in the terminal, drawn anew about once a second.

Owns the terminal while it runs and gives it back as it was. What is drawn is `tables`' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.parser import Parser, add_options, given_flags
from pdserve.cli.status import OPTIONS
from pdserve.cli.tables import render
from pdserve.errors import ConfigError, HandshakeRefused, PdserveError
from pdserve.launch import exit_codes
from pdserve.launch.config import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Seconds
    from pdserve.launch.addresses import ClusterConfig
    from pdserve.launch.visit import Visitor
    from pdserve.messages.status import ClusterStatus

__all__ = ["frame", "run"]

_INTERVAL: Final[Seconds] = 1.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The terminal's other page, so that what was on it comes back; no cursor."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HINT: Final = "q or Ctrl-C ends"


def run(arguments: list[str]) -> int:
    """Draw until told to stop."""
    parser = Parser(
        "pdserve top",
        "Watch a cluster in the terminal; q or Ctrl-C ends. Takes what `pdserve status` takes.",
    )
    add_options(parser, OPTIONS)
    config = resolve(given_flags(parser.parse(arguments))).cluster
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Top(config).run())
    return exit_codes.OK


def frame(text: str, size: tuple[int, int]) -> str:
    """`text` as it is drawn over the last frame of a terminal of `size` (columns, lines)."""
    columns, lines = size
    shown = [line[: columns - 1] for line in text.split("\n")]
    if len(shown) > lines - 2:
        shown = [*shown[: lines - 3], f"… {len(shown) - lines + 3} more lines"]
    body = "".join(f"{line}\x1b[K\n" for line in (*shown, ""))
    return f"\x1b[H{body}{_HINT[: columns - 1]}\x1b[J"


class _Top:
    """One look, until it ends."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._before: ClusterStatus | None = None

    async def run(self) -> None:
        """Errors: those of the first question; later ones are shown, since nodes come back."""
        from pdserve.launch.visit import Visitor

        visitor = Visitor(self._config)
        self._over = asyncio.get_running_loop().create_future()
        try:
            text = render(await self._look(visitor))
            with _screen(), self._keys():
                while not self._over.done():
                    self._draw(text)
                    await asyncio.wait({self._over}, timeout=_INTERVAL)
                    text = await self._next(visitor, text)
        finally:
            await visitor.close()

    async def _look(self, visitor: Visitor) -> ClusterStatus:
        status = await visitor.status()
        self._before = status
        return status

    async def _next(self, visitor: Visitor, text: str) -> str:
        before = self._before
        try:
            return render(await self._look(visitor), before)
        except (HandshakeRefused, ConfigError):
            raise
        except PdserveError as error:
            old = text.partition("\n\n")[2] if text.startswith("(") else text
            return f"({error.message}; this is the last answer)\n\n{old}"

    def _draw(self, text: str) -> None:
        if sys.stdout.isatty():
            size = shutil.get_terminal_size()
            sys.stdout.write(frame(text, (size.columns, size.lines)))
        else:
            sys.stdout.write(f"{text}\n\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def _keys(self) -> Iterator[None]:
        """`q` ends, without Enter."""
        if not sys.stdin.isatty():
            yield
            return
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before: list[Any] = termios.tcgetattr(descriptor)
        loop = asyncio.get_running_loop()
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, self._on_key, descriptor)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def _on_key(self, descriptor: int) -> None:
        pressed = os.read(descriptor, 64)
        if (not pressed or b"q" in pressed.lower()) and not self._over.done():
            self._over.set_result(None)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    if not sys.stdout.isatty():
        yield
        return
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
