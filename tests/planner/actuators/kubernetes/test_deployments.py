"""The actuator and a fake API server, whose requests and answers fit the published schemas."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient, ConfigError
from pdserve.planner.actuators import read_actuator
from pdserve.planner.actuators.settings import Home
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.planner.actuators.kubernetes.place import Place, kubernetes_place

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pdserve.planner.actuators.kubernetes import Deployments

NOTE = "pdserve.io/prod-changes"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with kubernetes_place(tmp_path, slots=3) as place:
        yield place


class TestKubernetes(ActuatorSuite):
    @pytest.fixture
    async def lab(self, tmp_path: Path) -> AsyncIterator[Place]:
        async with kubernetes_place(tmp_path, slots=2) as place:
            place.server.runs = True
            yield place


async def states(actuator: Deployments) -> dict[str, str]:
    return {one.change: one.state for one in await actuator.list()}


async def until_gone(actuator: Deployments, change: str) -> dict[str, str]:
    """The states once a change has ended: costs first, then the number, then the pod."""
    for _ in range(4):
        found = await states(actuator)
        if found[change] in ("ended", "failed"):
            break
    return found


async def three(place: Place) -> Deployments:
    """Changes a, b and c with running pods web-1 to web-3."""
    pods = place.make()
    for change in ("a", "b", "c"):
        await pods.start("gpu", "aggregated", change)
        await pods.list()
        place.server.run(f"web-{place.server.count}")
    return pods


# ---------------------------------------------------------------------- starting


async def test_a_pod_per_change_and_every_planner_finds_it(place: Place) -> None:
    pods, server = place.make(), place.server
    await asyncio.gather(*(pods.start("gpu", "aggregated", "a") for _ in range(3)))
    assert (server.replicas, list(server.pods)) == (1, ["web-1"])
    assert await states(pods) == {"a": "pending"}
    server.run("web-1")
    (found,) = await place.make().list()
    assert (found.change, found.state, found.node, found.ref) == ("a", "booting", "web-1", "web-1")
    await place.make().start("gpu", "aggregated", "a")
    assert server.replicas == 1


async def test_of_two_writers_one_reads_again(place: Place) -> None:
    pods, server = place.make(), place.server
    server.conflicts = 3
    await pods.start("gpu", "aggregated", "a")
    assert (server.replicas, await states(pods)) == (1, {"a": "pending"})
    server.conflicts = 99
    with pytest.raises(ActuatorTransient, match="409: the object has been modified"):
        await pods.start("gpu", "aggregated", "b")
    server.conflicts = 0
    assert await states(pods) == {"a": "pending"}


async def test_two_planners_that_start_at_once_start_what_they_asked_for(place: Place) -> None:
    one, other, server = place.make(), place.make(), place.server
    await asyncio.gather(
        *(pods.start("gpu", "aggregated", change) for pods in (one, other) for change in "abc")
    )
    assert (server.replicas, sorted(await states(one))) == (3, ["a", "b", "c"])


async def test_a_planner_that_died_between_both_writes(place: Place) -> None:
    place.server.notes[NOTE] = '{"changes": {"a": {}}, "size": 1}'
    assert await states(place.make()) == {"a": "pending"}
    assert place.server.replicas == 1


async def test_a_start_whose_answer_was_lost_is_done_once(place: Place) -> None:
    pods, server = place.make(), place.server
    server.lose = "patch_namespaced_deployment_scale"
    with pytest.raises(ActuatorTransient):
        await pods.start("gpu", "aggregated", "a")
    server.lose = "patch_namespaced_deployment"
    with pytest.raises(ActuatorTransient):
        await pods.start("gpu", "aggregated", "b")
    server.lose = ""
    for change in ("a", "b"):
        await place.make().start("gpu", "aggregated", change)
    assert (server.replicas, len(server.pods)) == (2, 2)


# ---------------------------------------------------------------------- stopping


async def test_the_stopped_pod_is_the_one_that_goes(place: Place) -> None:
    pods, server = await three(place), place.server
    with pytest.raises(ActuatorExhausted, match="3 pods of kind gpu are wanted already"):
        await pods.start("gpu", "aggregated", "d")
    await pods.stop("b", 30.0)
    assert server.replicas == 3, "its ReplicaSet may not know its cost yet"
    await pods.stop("b", 30.0)
    await pods.stop("never", 30.0)
    assert await until_gone(pods, "b") == {"a": "booting", "b": "ended", "c": "booting"}
    assert sorted(server.pods) == ["web-1", "web-3"]
    assert (await pods.start("gpu", "aggregated", "b")).state == "ended"


async def test_a_drained_worker_does_not_come_back_for_good(place: Place) -> None:
    """A worker ends once it is drained, and its node starts it again in the same pod."""
    pods, server = await three(place), place.server
    server.end("web-2", 0)
    assert (await states(pods))["b"] == "ending"
    assert (await until_gone(pods, "b"))["b"] == "ended"
    assert sorted(server.pods) == ["web-1", "web-3"]


async def test_a_worker_that_crashes_is_started_again_in_its_pod(place: Place) -> None:
    pods, server = await three(place), place.server
    server.end("web-2", 139)
    assert (await states(pods))["b"] == "booting"
    assert len(server.pods) == 3


async def one_of_each(place: Place) -> Deployments:
    """Change a runs in web-1 and is to end; b is to start."""
    pods = place.make()
    await pods.start("gpu", "aggregated", "a")
    place.server.run("web-1")
    await pods.list()
    await pods.stop("a", 30.0)
    await pods.start("gpu", "aggregated", "b")
    return pods


async def test_a_stop_and_a_start_at_once_do_not_wait_for_each_other(place: Place) -> None:
    """On a full cluster the new pod gets a node once the old one has gone."""
    pods, server = await one_of_each(place), place.server
    assert await until_gone(pods, "a") == {"a": "ended", "b": "pending"}
    (name,) = server.pods
    assert "nodeName" not in server.pods[name]["spec"]


async def test_a_pod_that_starts_is_not_taken_for_a_drained_one(place: Place) -> None:
    pods, server = place.make(), place.server
    await pods.start("gpu", "aggregated", "a")
    server.run("web-1")
    await pods.list()
    await pods.start("gpu", "aggregated", "b")
    server.place("web-2")
    await pods.stop("a", 30.0)
    for _ in range(3):
        assert await states(pods) == {"a": "ending", "b": "pending"}
    assert sorted(server.pods) == ["web-1", "web-2"]
    server.run("web-2")
    assert await until_gone(pods, "a") == {"a": "ended", "b": "booting"}
    assert list(server.pods) == ["web-2"]


async def test_a_deleted_pod_has_no_successor(place: Place) -> None:
    pods, server = await three(place), place.server
    server.delete("web-2")
    assert (await until_gone(pods, "b"))["b"] == "failed"
    assert (server.replicas, sorted(server.pods)) == (2, ["web-1", "web-3"])


async def test_an_evicted_pod_is_not_given_to_a_later_change(place: Place) -> None:
    pods, server = await three(place), place.server
    server.evict("web-2")
    assert (await until_gone(pods, "b"))["b"] == "failed"
    await pods.start("gpu", "aggregated", "d")
    await pods.list()
    server.place("web-5")
    (found,) = [one for one in await pods.list() if one.change == "d"]
    assert (found.state, found.ref, server.replicas) == ("pending", "web-5", 3)


# ---------------------------------------------------------------------- others' hands


async def test_pods_that_were_there_before_serve_on_under_their_own_names(place: Place) -> None:
    server = place.server
    server.runs = True
    server.resize(2)
    pods = place.make()
    assert await states(pods) == {"web-1": "booting", "web-2": "booting"}
    await pods.start("gpu", "aggregated", "a")
    assert await states(pods) == {"web-1": "booting", "web-2": "booting", "a": "booting"}
    assert (server.replicas, sorted(server.pods)) == (3, ["web-1", "web-2", "web-3"])
    await pods.stop("web-1", 30.0)
    assert (await until_gone(pods, "web-1"))["web-1"] == "ended"
    assert sorted(server.pods) == ["web-2", "web-3"]


async def test_without_its_annotation_no_worker_ends(place: Place) -> None:
    pods, server = await three(place), place.server
    server.notes.clear()
    assert set(await states(pods)) == {"web-1", "web-2", "web-3"}
    assert server.replicas == 3


async def test_what_somebody_adds_is_kept(place: Place) -> None:
    pods, server = await three(place), place.server
    await pods.list()
    server.resize(5)
    assert set(await states(pods)) == {"a", "b", "c"}
    server.run("web-5")
    server.run("web-4")
    assert set(await states(pods)) == {"a", "b", "c", "web-4", "web-5"}
    assert server.replicas == 5


async def test_the_end_of_a_worker_before_it_was_taken_in_does_not_count(place: Place) -> None:
    pods, server = place.make(), place.server
    server.runs = True
    server.resize(1)
    server.end("web-1", 0)
    for _ in range(3):
        assert await states(pods) == {"web-1": "booting"}
    server.end("web-1", 0, "2026-01-03T00:00:00Z")
    assert (await until_gone(pods, "web-1"))["web-1"] == "ended"


async def test_a_planner_that_advises_writes_nothing(place: Place) -> None:
    server = place.server
    server.notes[NOTE] = '{"changes": {"a": {"pod": "gone"}}, "size": 1}'
    server.resize(3)
    found = await states(place.make(acts=False))
    assert found["a"] == "failed"
    assert server.seen == []


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("status", "words", "error"),
    [
        (403, 'deployments "web" is forbidden', ActuatorDenied),
        (403, "exceeded quota: gpus", ActuatorExhausted),
        (404, 'deployments "web" not found', ActuatorDenied),
        (429, "too many requests", ActuatorTransient),
        (503, "apiserver is shutting down", ActuatorTransient),
    ],
)
async def test_refusals_are_in_the_servers_words(
    place: Place, status: int, words: str, error: type[Exception]
) -> None:
    place.server.refuse = (status, words)
    with pytest.raises(error, match=f"{status}: {words}"):
        await place.make().list()


async def test_a_wrong_namespace_is_named(place: Place) -> None:
    pods = place.make(namespace="other")
    with pytest.raises(ActuatorDenied, match=r'namespaces/other/.*404: .*"web" not found'):
        await pods.list()


async def test_a_missing_deployment_does_not_keep_others_from_a_stop(place: Place) -> None:
    kinds = {"cpu": {"deployment": "missing"}, "gpu": {"deployment": "web"}}
    pods, server = place.make(kinds=kinds), place.server
    await pods.start("gpu", "aggregated", "a")
    await pods.stop("a", 1.0)
    with pytest.raises(ActuatorDenied, match='"missing" not found'):
        await pods.stop("never", 1.0)
    with pytest.raises(ActuatorDenied, match='"missing" not found'):
        await pods.list()
    assert json.loads(server.notes[NOTE])["changes"]["a"]["stop"]


async def test_a_selector_with_conditions_is_asked_for_in_full(place: Place) -> None:
    place.server.selector = {
        "matchLabels": {"app": "web"},
        "matchExpressions": [
            {"key": "tier", "operator": "In", "values": ["a", "b"]},
            {"key": "canary", "operator": "DoesNotExist"},
        ],
    }
    place.server.query = "!canary,app=web,tier in (a,b)"
    await place.make().start("gpu", "aggregated", "a")
    place.server.selector = {"matchExpressions": [{"key": "tier", "operator": "Gt"}]}
    with pytest.raises(ActuatorDenied, match="unknown operator 'Gt'"):
        await place.make().list()


async def test_modes_and_notes_that_do_not_fit(place: Place) -> None:
    with pytest.raises(ActuatorDenied, match="start in mode aggregated, not decode: add a kind"):
        await place.make().start("gpu", "decode", "a")
    place.server.notes[NOTE] = "{"
    with pytest.raises(ActuatorDenied, match="cannot be read"):
        await place.make().list()


async def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    table = {"type": "kubernetes", "api": "http://127.0.0.1:1", "token_file": "", "ca_file": ""}
    kind, config = read_actuator(table | {"kinds": {"g": {"deployment": "d"}}}, "f")
    pods = kind.make(config, Home("c"))
    with pytest.raises(ActuatorTransient, match=r"127\.0\.0\.1:1"):
        await pods.list()
    await pods.close()
    lost = str(tmp_path / "none")
    kind, config = read_actuator(
        table | {"token_file": lost, "kinds": {"g": {"deployment": "d"}}}, "f"
    )
    pods = kind.make(config, Home("c"))
    with pytest.raises(ActuatorDenied, match="No such file"):
        await pods.list()
    await pods.close()


def test_kinds_need_deployments_of_their_own() -> None:
    table = {"type": "kubernetes", "kinds": {"a": {"deployment": "d"}, "b": {"deployment": "d"}}}
    with pytest.raises(ConfigError, match="two kinds have the same deployment"):
        read_actuator(table, "f")
    with pytest.raises(ConfigError, match="missing required field `deployment`"):
        read_actuator({"type": "kubernetes", "kinds": {"a": {}}}, "f")
