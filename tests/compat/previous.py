"""The release before this one, taken from the repository's history and installed beside it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster, Node
from tests.compat.renames import defined, module_at, paths_of

ROOT = Path(__file__).parents[2]
TREES = ("pdserve", "engines", "tests/support", "tests/worlds")
"""Where names of the release may be today."""
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


def revision() -> str:
    """The release in this clone's history, by its tag or its commit; skips the test where it is
    not there."""
    tag, commit = named()
    for name in (tag, commit):
        if git("cat-file", "-e", f"{name}^{{commit}}") is not None:
            return name
    pytest.skip(f"no release to mix with: this clone lacks {tag} ({commit[:10]})")


@cache
def release_sources() -> dict[str, str]:
    """The text of each Python file of the release, by its path. Skips as `revision`."""
    command = ["git", "archive", "--format=tar", revision(), "pdserve", "engines", "tests"]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        for one in files:
            if _is_python(one.name) and (content := files.extractfile(one)) is not None:
                found[one.name] = content.read().decode()
    return found


@cache
def module_names(module: str) -> set[str] | None:
    """What a module of the release defines; None: it has no such module. Skips as `revision`."""
    sources = (release_sources().get(path) for path in paths_of(module))
    return next((defined(source) for source in sources if source is not None), None)


@cache
def module_names_today(module: str) -> set[str] | None:
    """The same of this tree."""
    files = (ROOT / path for path in paths_of(module))
    return next((defined(file.read_text("utf-8")) for file in files if file.is_file()), None)


def release_names() -> list[str]:
    """`module.Name` of each public class and function of the release. Skips as `revision`."""
    return [
        f"{module}.{name}"
        for module in map(module_at, release_sources())
        if not module.startswith("tests.")
        for name in sorted(module_names(module) or ())
        if not name.startswith("_") and not name.isupper()
    ]


def names_today() -> set[str]:
    """`module.Name` of whatever this tree defines."""
    sources = (file for top in TREES for file in (ROOT / top).rglob("*.py"))
    modules = (module_at(str(file.relative_to(ROOT))) for file in sources)
    return {f"{one}.{name}" for one in modules for name in module_names_today(one) or ()}


def _is_python(path: str) -> bool:
    return path.endswith(".py")


class Release:
    """A pure-Python installation with an interpreter of its own over this one's libraries."""

    def __init__(self, folder: Path) -> None:
        """Skips the test when this clone's history lacks the release."""
        found = revision()
        self.source = folder / "source"
        self.python = folder / "venv" / "bin" / "python"
        self._unpack(folder, found)
        self._install(folder / "venv")

    def _unpack(self, folder: Path, revision: str) -> None:
        archive = folder / "source.tar"
        wanted = ("pdserve", "engines", "native", "pyproject.toml", "README.md", "LICENSE")
        command = ["git", "archive", "--output", str(archive), revision, *wanted]
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
