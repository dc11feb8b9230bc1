"""Reads ShareGPT's conversations: lengths of the first question and its answer, without times.

vLLM's and SGLang's benchmarks take the same two messages. No tokenizer is known here, so a token
counts as four bytes of UTF-8, which is close for English text.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.sim.workloads.lines import bad_line, read_lines
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["ShareGptTrace", "is_sharegpt"]

_BYTES: Final = 4
"""Bytes of a token."""
_MOST: Final = 2 << 30
"""Bytes of a file with one JSON array, which is read as a whole."""


class _Message(msgspec.Struct):
    value: str = ""
    content: str = ""
    """The text in files that have `role` and `content` for `from` and `value`."""

    @property
    def text(self) -> str:
        return self.value or self.content


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


_line = msgspec.json.Decoder(_Conversation)
_array = msgspec.json.Decoder(list[_Conversation])


def is_sharegpt(head: bytes) -> bool:
    """True if a file that begins so holds conversations."""
    return head.lstrip().startswith((b"[", b"{")) and b'"conversations"' in head


class ShareGptTrace:
    """The requests of a file, read anew by each iteration. All arrive at time 0."""

    timed: Final = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `ConfigError` for a file that holds something else."""
        count = 0
        for one in self._conversations():
            messages = [message.text for message in one.conversations[:2]]
            if len(messages) == 2 and all(messages):
                prompt, output = map(_tokens, messages)
                yield TraceRequest(count, 0.0, ((count, prompt),), output)
                count += 1
        if not count:
            raise ConfigError(f"{self._path} has no conversation of two messages with text")

    def _conversations(self) -> Iterator[_Conversation]:
        with self._path.open("rb") as file:
            if not file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                yield from self._lines()
                return
            file.seek(0)
            text = file.read(_MOST + 1).removeprefix(codecs.BOM_UTF8)
        if len(text) > _MOST:
            raise ConfigError(f"{self._path} is too large: write one object per line (jq -c '.[]')")
        try:
            yield from _array.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path}: {error}; expected {_FORM}") from None

    def _lines(self) -> Iterator[_Conversation]:
        for number, text in read_lines(self._path):
            try:
                yield _line.decode(text)
            except msgspec.MsgspecError as error:
                raise bad_line(self._path, number, f"{error}; expected {_FORM}") from None


_FORM: Final = '{"conversations": [{"from": "human", "value": TEXT}, …]}'


def _tokens(text: str) -> int:
    return max(1, len(text.encode("utf-8", "replace")) // _BYTES)
