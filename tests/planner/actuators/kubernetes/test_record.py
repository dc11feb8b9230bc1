"""Changes get pods, and a Deployment shrinks only when it takes the right ones."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from pdserve.planner.actuators.kubernetes.api import pod_state
from pdserve.planner.actuators.kubernetes.record import (
    CHEAP,
    ChangeRecord,
    DeploymentRecord,
    PodState,
    Todo,
    pod_instance,
    record_of,
)
from pdserve.planner.actuators.kubernetes.record import reconcile as reconcile_record


def pod(name: str, **more: object) -> PodState:
    base = PodState(name, "Running", ready=True, scheduled=True, leaving=False)
    return base._replace(**more)  # type: ignore[arg-type]


def reconcile(
    changes: dict[str, ChangeRecord], pods: list[PodState], replicas: int, now: float
) -> Todo:
    """A Deployment whose pods are all the planners'."""
    return reconcile_record(DeploymentRecord(changes=changes, size=replicas), pods, replicas, now)


A, B = ChangeRecord(pod="p1"), ChangeRecord(pod="p2")


def test_new_changes_get_pods_in_the_order_of_their_birth() -> None:
    pods = [pod("p2", created="2"), pod("p1", created="1")]
    todo = reconcile({"a": ChangeRecord(), "b": ChangeRecord()}, pods, 2, 9.0)
    assert todo.record.changes == {"a": A, "b": B}
    assert (todo.replicas, todo.cheap) == (2, ())


def test_a_change_without_a_pod_makes_room_for_one() -> None:
    todo = reconcile({"a": A, "c": ChangeRecord()}, [pod("p1")], 1, 9.0)
    assert (todo.record.changes["c"], todo.replicas, todo.record.size) == (ChangeRecord(), 2, 2)


def test_a_drained_pod_goes_and_no_other() -> None:
    stopped = ChangeRecord(pod="p1", stop=True)
    drained = pod("p1", ready=False)
    todo = reconcile({"a": stopped, "b": B}, [drained, pod("p2")], 2, 9.0)
    assert (todo.replicas, todo.cheap) == (1, ("p1",))
    after = reconcile(todo.record.changes, [drained._replace(leaving=True), pod("p2")], 1, 9.0)
    assert not after.record.changes["a"].ended
    assert (after.replicas, after.cheap) == (1, ())
    gone = reconcile(after.record.changes, [pod("p2")], 1, 10.0)
    assert gone.record.changes["a"].ended == 10.0
    assert pod_instance("a", "k", gone.record.changes["a"], None).state == "ended"


def test_equals_are_told_apart_by_a_cost_that_was_read_before() -> None:
    stopped = ChangeRecord(pod="p1", stop=True)
    fresh = reconcile({"a": stopped, "b": B}, [pod("p1"), pod("p2")], 2, 9.0)
    assert (fresh.replicas, fresh.cheap) == (2, ("p1",))
    known = reconcile({"a": stopped, "b": B}, [pod("p1", cost=CHEAP), pod("p2")], 2, 9.0)
    assert (known.replicas, known.cheap) == (1, ())


def test_a_pod_that_is_about_to_serve_is_not_taken_in_place_of_a_drained_one() -> None:
    stopped = ChangeRecord(pod="p1", stop=True)
    starting = pod("p2", phase="Pending", ready=False)
    todo = reconcile({"a": stopped, "b": B}, [pod("p1", cost=CHEAP), starting], 2, 9.0)
    assert todo.replicas == 2


def test_a_deleted_pod_has_no_successor() -> None:
    todo = reconcile({"a": A}, [pod("new", phase="Pending", ready=False)], 1, 9.0)
    assert todo.record.changes["a"].reason == "its pod was deleted"
    assert (todo.replicas, todo.cheap) == (0, ("new",))
    unplaced = pod("new", phase="Pending", ready=False, scheduled=False)
    assert reconcile({"a": A}, [unplaced], 1, 9.0).replicas == 0
    assert pod_instance("a", "k", todo.record.changes["a"], None).state == "failed"


def test_a_pod_that_does_not_come_up_has_failed() -> None:
    broken = pod("p1", ready=False, waiting="CrashLoopBackOff: back-off 10s")
    todo = reconcile({"a": A, "b": B}, [broken, pod("p2")], 2, 9.0)
    assert todo.record.changes["a"].reason == "CrashLoopBackOff: back-off 10s"
    assert (todo.replicas, todo.cheap) == (1, ("p1",))


def test_a_worker_that_ended_in_order_has_not_failed_while_its_pod_waits() -> None:
    over = pod("p1", ready=False, waiting="CrashLoopBackOff: 10s", drained="2026")
    assert reconcile({"a": A}, [over], 1, 9.0).record.changes["a"].reason == ""
    done = pod("p1", phase="Succeeded", ready=False)
    assert reconcile({"a": A}, [done], 1, 9.0).record.changes["a"].ended == 9.0


def test_what_ended_long_ago_is_forgotten() -> None:
    ended = ChangeRecord(pod="p9", ended=100.0)
    assert reconcile({"a": ended}, [], 0, 399.0).record.changes == {"a": ended}
    assert reconcile({"a": ended}, [], 0, 401.0).record.changes == {}


def test_an_empty_annotation_has_no_changes() -> None:
    assert record_of("") == DeploymentRecord()


@pytest.mark.parametrize("size", [0, 1])
def test_pods_that_somebody_asked_for_and_that_do_not_exist_yet_are_not_taken_away(
    size: int,
) -> None:
    known = DeploymentRecord(changes={"a": A} if size else {}, size=size)
    todo = reconcile_record(known, [pod("p1")], 3, 9.0)
    assert (todo.replicas, todo.record.size, todo.record.others) == (3, 3, 2)
    later = reconcile_record(todo.record, [pod("p1"), pod("x"), pod("y")], 3, 9.0)
    assert (later.replicas, later.record.others, later.cheap) == (3, 0, ())
    assert set(later.record.changes) >= {"x", "y"}


class World:
    """A Deployment that planners and others size, and a ReplicaSet that keeps to its rules."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.pods: dict[str, PodState] = {}
        self.record, self.replicas, self.made = DeploymentRecord(), 0, 0

    def wanted(self) -> list[str]:
        return [change for change, one in self.record.changes.items() if one.wanted]

    def edit(self, turn: int) -> DeploymentRecord:
        """A start, a stop, or nothing."""
        changes, wanted = dict(self.record.changes), self.wanted()
        if self.draw.random() < 0.4 and len(wanted) < 5:
            changes[f"c{turn}"] = ChangeRecord()
        elif self.draw.random() < 0.4 and wanted:
            one = self.draw.choice(wanted)
            changes[one] = ChangeRecord(pod=changes[one].pod, stop=True)
        return replace(self.record, changes=changes)

    def carry_out(self, todo: Todo, *, sized: bool = True) -> None:
        """The writes of a call; `sized`: the last one is not lost."""
        self.record, known = todo.record, dict(self.pods)
        for name in todo.cheap:
            self.pods[name] = self.pods[name]._replace(cost=CHEAP)
        if sized:
            self.replicas = todo.replicas
        kept = {self.record.changes[change].pod for change in self.wanted()}
        while len(self.pods) > self.replicas:
            first = {
                n: (one.rank, known[n].cost, self.draw.random()) for n, one in self.pods.items()
            }
            victim = min(first, key=lambda name: first[name])
            assert victim not in kept, victim
            del self.pods[victim]

    def go_on(self, share: float) -> None:
        """New pods appear, and some of those that wait run."""
        while len(self.pods) < self.replicas:
            self.made += 1
            name = f"p{self.made}"
            new = pod(name, phase="Pending", ready=False, scheduled=False)
            self.pods[name] = new._replace(created=f"{self.made:05}")
        for name in self.pods:
            if self.draw.random() < share:
                self.pods[name] = pod(
                    name, created=self.pods[name].created, cost=self.pods[name].cost
                )

    def reconciled(self, record: DeploymentRecord, turn: int) -> Todo:
        return reconcile_record(record, list(self.pods.values()), self.replicas, float(turn))


def test_no_worker_that_is_wanted_goes_and_all_others_do(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        world = World(draw)
        for turn in range(40):
            todo = world.reconciled(world.edit(turn), turn)
            if draw.random() < 0.9:  # else another writer was first
                world.carry_out(todo, sized=draw.random() < 0.9)
            world.replicas += draw.random() < 0.05
            world.go_on(0.3)
        for turn in range(40, 50):
            world.carry_out(world.reconciled(world.record, turn))
            world.go_on(1.0)
        served = {world.record.changes[change].pod for change in world.wanted()}
        assert served == set(world.pods)
        assert len(served) == len(world.wanted()) == world.replicas


# ---------------------------------------------------------------------- reading pods


def test_a_pod_is_read() -> None:
    over = {"terminated": {"exitCode": 0, "finishedAt": "2026-01-02T00:00:00Z"}}
    ready = [{"type": "Ready", "status": "True"}]
    cost = {"controller.kubernetes.io/pod-deletion-cost": str(CHEAP)}
    found = pod_state(
        {
            "metadata": {"name": "p1", "annotations": cost, "creationTimestamp": "1"},
            "spec": {"nodeName": "n1"},
            "status": {
                "phase": "Running",
                "conditions": ready,
                "containerStatuses": [{"state": {"running": {}}, "lastState": over}],
            },
        }
    )
    assert found == pod("p1", created="1", cost=CHEAP, drained="2026-01-02T00:00:00Z")
    assert found.active


def test_a_pod_without_anything_waits() -> None:
    place = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
    status = {"phase": "Pending", "conditions": [place]}
    meta = {"name": "p", "annotations": {"controller.kubernetes.io/pod-deletion-cost": "much"}}
    found = pod_state({"metadata": meta, "status": status})
    assert (found.scheduled, found.waiting, found.cost) == (False, "Unschedulable: no", 0)
    crashed = [{"state": {"terminated": {"exitCode": 1}}}]
    status = {"phase": "Running", "containerStatuses": crashed}
    assert pod_state({"metadata": meta, "status": status}).drained == ""
