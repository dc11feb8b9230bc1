"""An operator's commands, run in this process: each process of its own takes as long as ten."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pdserve.cli.main import main

if TYPE_CHECKING:
    from tests.chaos.cluster import Cluster

__all__ = ["Done", "pdserve"]


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def pdserve(cluster: Cluster, *arguments: str) -> Done:
    """Runs a command with the cluster's key, on any of its nodes."""
    home = {"HOME": str(cluster.home), "XDG_CONFIG_HOME": str(cluster.home / "config")}
    out, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PDSERVE_")]:
            patch.delenv(name)
        for name, value in (home | {"PDSERVE_CONFIG": "none"}).items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            code = main([*arguments, "--join", cluster.address])
    return Done(code, out.getvalue(), told.getvalue())
