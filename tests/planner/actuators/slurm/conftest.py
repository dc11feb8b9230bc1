"""A real Slurm of one node with sixteen cores, for all tests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.slurm import Slurm, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    with Slurm(tmp_path_factory.mktemp("slurm"), cpus=16, kill_wait=2) as slurm:
        yield slurm
