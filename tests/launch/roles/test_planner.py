"""The planner role in a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.roles import planner as role

if TYPE_CHECKING:
    from pathlib import Path


def test_a_planner_needs_a_file_and_says_which_one_to_copy() -> None:
    class Context:
        class config:
            class process:
                planner_file = None

    context: Any = Context()
    node: Any = None
    with pytest.raises(ConfigError, match=r"needs --planner-file: .*examples/planner.toml is one"):
        role.PlannerRole(context, node)


def test_workers_are_led_into_the_planners_cluster(tmp_path: Path) -> None:
    key = tmp_path / "key"
    config = ClusterConfig(join=("a:1", "b:2"), cluster="blue", cluster_key_file=key)
    assert list(role._flags(config)) == [
        "--join=a:1,b:2",
        "--cluster=blue",
        f"--cluster-key-file={key}",
    ]
