"""The release before this one, taken from the repository's history and installed beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Node

ROOT = Path(__file__).parents[2]
NAMED = Path(__file__).with_name("previous.txt")


def named() -> tuple[str, str]:
    """Tag and commit of the release that this tree is tested with."""
    lines = [line for line in NAMED.read_text().splitlines() if not line.startswith("#")]
    (line,) = lines
    tag, commit = line.split()
    return tag, commit


def git(*words: str) -> str | None:
    """What git prints; None where there is no git, no repository, or no such thing in it."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Release:
    """A pure-Python installation with an interpreter of its own over this one's libraries."""

    def __init__(self, folder: Path) -> None:
        """Skips the test when this clone's history lacks the release."""
        self.tag, commit = named()
        if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
            pytest.skip(f"no release to mix with: this clone lacks {self.tag} ({commit[:10]})")
        self.source = folder / "source"
        self.python = folder / "venv" / "bin" / "python"
        self._unpack(folder, commit)
        self._install(folder / "venv")

    def _unpack(self, folder: Path, commit: str) -> None:
        archive = folder / "source.tar"
        wanted = ("pdserve", "engines", "native", "pyproject.toml", "README.md", "LICENSE")
        command = ["git", "archive", "--output", str(archive), commit, *wanted]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        shutil.unpack_archive(archive, self.source, filter="data")

    def _install(self, venv: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        (site / "libraries.pth").write_text("\n".join(libraries))  # its .pth files do not count
        pip = ("-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        done = subprocess.run(
            [str(self.python), *pip, "--no-build-isolation", "--no-deps", str(self.source)],
            env=os.environ | {"PDSERVE_PURE": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, script: Path) -> str:
        """What a script prints there."""
        command = [str(self.python), "-P", str(script)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class OldNode(Node):
    """A node of the release before."""

    def __init__(self, release: Release, *arguments: str, **environ: Any) -> None:
        # PYTHONSAFEPATH: the working directory is this tree, whose pdserve must not be found.
        super().__init__(*arguments, PYTHONSAFEPATH="1", PDSERVE_PURE="1", **environ)
        self._command[self._command.index(sys.executable)] = str(release.python)


class Mixed(Cluster):
    """A cluster whose nodes are of this release, or of the one before while `old` is true."""

    def __init__(self, home: Path, release: Release) -> None:
        super().__init__(home)
        self.release = release
        self.old = False

    def make(self, role: str, name: str, *flags: str, **environ: str) -> Node:
        """See `Cluster`."""
        if self.old:
            return OldNode(self.release, role, name, *flags, **environ)
        return super().make(role, name, *flags, **environ)
