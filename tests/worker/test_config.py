from typing import get_args

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.tiers import Admission, KvFetchMode
from pdserve.worker.config import (
    ADMISSIONS,
    KV_FETCH,
    MAX_LORAS,
    POOLINGS,
    WITHOUT_TIERS,
    DiskKv,
    WorkerConfig,
)
from pdserve.worker.pooling import PoolingOption


def test_the_names_of_what_reads_text_are_those_that_there_are():
    """They are written out, so that `pdserve --help` need not load what they name."""
    assert get_args(PoolingOption) == POOLINGS
    assert get_args(KvFetchMode) == KV_FETCH
    assert get_args(Admission) == ADMISSIONS


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


@pytest.mark.parametrize("engine", WITHOUT_TIERS)
def test_an_engine_without_tiers_refuses_them_by_name(engine: str) -> None:
    WorkerConfig(engine=engine).validate()
    with pytest.raises(ConfigError, match=f"host-kv: engine {engine} has no KV tiers"):
        WorkerConfig(engine=engine, host_kv=1 << 30).validate()
    with pytest.raises(ConfigError, match=r"disk-kv: .* use engine torch"):
        WorkerConfig(engine=engine, disk_kv=DiskKv("/kv", 1 << 30)).validate()


def test_tiers_need_the_prefix_cache_and_a_sane_bonus() -> None:
    WorkerConfig(host_kv=None).validate()
    with pytest.raises(ConfigError, match="prefix-cache is off"):
        WorkerConfig(host_kv=None, prefix_cache=False).validate()
    with pytest.raises(ConfigError, match="kv-turn-bonus must be 0 to 86400 seconds"):
        WorkerConfig(kv_turn_bonus=1e6).validate()
