"""What the end-to-end tests share: one tiny model, written once."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.model import MARKERS, THINKS, write_model

if TYPE_CHECKING:
    from pathlib import Path


# Programs inherit which signals are ignored: under nohup, or behind `&` in a script, the processes
# started here would never see the signals that these tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose template knows of tools and reasoning."""
    folder = tmp_path_factory.mktemp("model") / "tools"
    return write_model(folder, template=THINKS, markers=MARKERS)
