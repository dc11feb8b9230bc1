"""A peer in a process and an environment of its own, asked line by line.

The child loads the checkpoint, writes a line with its name, and answers each line `[batch, prompt,
outputs]` with the seconds that it took. `[]` ends it.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds

__all__ = ["Remote"]

_ROOT: Final = Path(__file__).parents[3]
_REST: Final[Seconds] = 0.3
"""Threads of OpenMP still turn this long after their work, and would disturb the next arm."""


class Remote:
    """One child. Errors: `RuntimeError` if it ends."""

    def __init__(self, python: Path, module: str, folder: Path, dtype: str, threads: int) -> None:
        words = [str(python), "-m", f"{__package__}.{module}", str(folder), dtype, str(threads)]
        self._child = subprocess.Popen(
            words, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = str(self._line()["name"])

    def seconds(self, batch: int, prompt: int, outputs: int) -> float:
        """Time to generate `outputs` tokens for each of `batch` prompts."""
        time.sleep(_REST)
        self._ask([batch, prompt, outputs])
        return float(str(self._line()["seconds"]))

    def tokens(self, prompt: list[int], outputs: int) -> list[int]:
        """The greedy continuation of a prompt: do both compute the same model?"""
        self._ask({"prompt": prompt, "outputs": outputs})
        found = self._line()["tokens"]
        assert isinstance(found, list)
        return found

    def close(self) -> None:
        """Ends the child."""
        self._ask([])
        self._child.wait(60)

    def _ask(self, question: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()

    def _line(self) -> dict[str, object]:
        """The next line in JSON: what libraries print besides is passed over."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                found: dict[str, object] = json.loads(line)
                return found
        raise RuntimeError(f"the peer ended with status {self._child.wait()}: see its messages")
