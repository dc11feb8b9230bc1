"""Downloads one model in a child process: `python -m pdserve.worker.download`.

`model.fetch` starts it with repository, revision, cache directory and the parent's process id. It
writes JSON lines to standard output: progress (`stage`, `fraction`), then one of `path` or `error`.
It ends when its parent ends, even if the parent was killed.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model*")
"""Files to download: weights and configuration; no code, and no formats that no engine reads."""

SECOND_COPIES = ("consolidated*.safetensors",)
"""Files with the same weights in another tool's layout, which are skipped."""

_PR_SET_PDEATHSIG = 1
_REPORT_EVERY = 0.2
"""Seconds between progress lines."""


def main(arguments: list[str]) -> int:
    """Downloads the model; the exit status is 0 if the path was printed."""
    repo, revision, cache_dir, parent = arguments
    _die_with(int(parent))
    try:
        path = _download(repo, revision or None, cache_dir or None)
    except Exception as error:
        _say({"error": explain(repo, error)})
        return 1
    _say({"path": path})
    return 0


def explain(repo: str, error: BaseException) -> str:
    """Turns an exception into one line for the operator: cause and remedy."""
    from huggingface_hub import errors as hub

    token = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, hub.GatedRepoError):
        return f"model {repo} is gated: accept its terms on the hub, then {token}"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"model {repo} has no such revision: check what follows the @"
    if isinstance(error, hub.RepositoryNotFoundError):
        return f"model {repo} was not found on the hub: check the name; if it is private, {token}"
    if isinstance(error, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled | ConnectionError):
        return (
            f"model {repo} is not in the cache and the hub does not give it "
            f"({_one_line(error.__cause__ or error)}): check the network and HF_ENDPOINT, or copy "
            "the checkpoint to this machine and give --model DIRECTORY"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for model {repo}: choose another place with --download-dir"
    return f"model {repo} could not be downloaded: {type(error).__name__}: {_one_line(error)}"


def _download(repo: str, revision: str | None, cache_dir: str | None) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        repo,
        revision=revision,
        cache_dir=cache_dir,
        allow_patterns=list(PATTERNS),
        ignore_patterns=list(SECOND_COPIES),
        tqdm_class=_progress_class(repo),
    )


def _progress_class(repo: str) -> Any:
    """A tqdm that prints nothing and reports all files together."""
    tqdm: Any = importlib.import_module("huggingface_hub.utils").tqdm
    lock = threading.Lock()
    reporter = _Reporter(repo)

    class Progress(tqdm):  # type: ignore[misc]  # untyped library
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False})

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Override: draws nothing where tqdm would draw its bar."""
            with lock:
                reporter.note(self.unit, self.n, self.total)

    return Progress


class _Reporter:
    """Turns several bars into one rising fraction: bytes if any bar counts them, else files."""

    def __init__(self, repo: str) -> None:
        self._repo = repo
        self._bytes: float | None = None
        self._files: float | None = None
        self._last = 0.0

    def note(self, unit: str, done: float, total: float | None) -> None:
        if not total:
            return
        fraction = min(1.0, done / total)
        if unit == "B":
            self._bytes = max(fraction, self._bytes or 0.0)
        else:
            self._files = fraction
        now = time.monotonic()
        if now - self._last >= _REPORT_EVERY:
            self._last = now
            best = self._files if self._bytes is None else self._bytes
            _say({"stage": f"downloading {self._repo}", "fraction": best})


def _die_with(parent: int) -> None:
    """Asks the kernel to end this process with its parent, and checks that the parent
    still lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _one_line(error: BaseException) -> str:
    """The first line of a message, without repetition."""
    return " ".join(str(error).split())[:160]


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
