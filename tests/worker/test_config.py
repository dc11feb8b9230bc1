from typing import get_args

import pytest

from pdserve.errors import ConfigError
from pdserve.worker.config import (
    MAX_LORAS,
    POOLINGS,
    WorkerConfig,
)
from pdserve.worker.pooling import PoolingOption


def test_the_names_of_what_reads_text_are_those_that_there_are():
    """They are written out, so that `pdserve --help` need not load what they name."""
    assert get_args(PoolingOption) == POOLINGS


@pytest.mark.parametrize("name", ["", "two words", "a@b", "a,b", "x" * 65])
def test_names_that_cannot_be_are_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match="a name has 1 to 64 characters"):
        WorkerConfig(loras={name: "/adapters/x"}).validate()


def test_there_is_a_bound_and_no_directory_may_be_missing() -> None:
    WorkerConfig(loras={f"a{i}": "/x" for i in range(MAX_LORAS)}).validate()
    with pytest.raises(ConfigError, match="65 adapters are named, a worker serves 64"):
        WorkerConfig(loras={f"a{i}": "/x" for i in range(MAX_LORAS + 1)}).validate()
    with pytest.raises(ConfigError, match="write poet=DIR"):
        WorkerConfig(loras={"poet": ""}).validate()
