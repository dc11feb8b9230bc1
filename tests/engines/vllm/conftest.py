"""Ends the engines of the real vLLM after the last test of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.vllm import real
from tests.support.vllm_threads import ONE_THREAD

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def engines() -> Iterator[None]:
    """Engines stay loaded for the whole run."""
    if not real.has_vllm():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_THREAD.items():
            patch.setenv(name, value)
        yield
        real.unload()
