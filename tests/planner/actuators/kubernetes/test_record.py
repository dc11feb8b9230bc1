"""Changes get pods, and a Deployment shrinks only when it takes the right ones."""

from __future__ import annotations

from pdserve.planner.actuators.kubernetes.record import (
    ChangeRecord,
    PodState,
    changes_of,
    pod_instance,
    reconcile,
)


def pod(name: str, **more: object) -> PodState:
    base = PodState(name, "Running", ready=True, scheduled=True, leaving=False)
    return base._replace(**more)  # type: ignore[arg-type]


A, B = ChangeRecord(pod="p1"), ChangeRecord(pod="p2")


def test_new_changes_get_pods_in_the_order_of_their_birth() -> None:
    pods = [pod("p2", created="2"), pod("p1", created="1")]
    todo = reconcile({"a": ChangeRecord(), "b": ChangeRecord()}, pods, 2, 9.0)
    assert todo.changes == {"a": A, "b": B}
    assert (todo.replicas, todo.cheap) == (2, ())


def test_a_change_without_a_pod_makes_room_for_one() -> None:
    todo = reconcile({"a": A, "c": ChangeRecord()}, [pod("p1")], 1, 9.0)
    assert (todo.changes["c"], todo.replicas) == (ChangeRecord(), 2)


def test_a_drained_pod_goes_and_no_other() -> None:
    stopped = ChangeRecord(pod="p1", stop=True)
    drained = pod("p1", ready=False)
    todo = reconcile({"a": stopped, "b": B}, [drained, pod("p2")], 2, 9.0)
    assert (todo.replicas, todo.cheap) == (1, ("p1",))
    after = reconcile(todo.changes, [drained._replace(leaving=True), pod("p2")], 1, 9.0)
    assert not after.changes["a"].ended
    assert (after.replicas, after.cheap) == (1, ())
    gone = reconcile(after.changes, [pod("p2")], 1, 10.0)
    assert gone.changes["a"].ended == 10.0
    assert pod_instance("a", "k", gone.changes["a"], None).state == "ended"


def test_a_pod_that_is_about_to_serve_is_not_taken_in_place_of_a_drained_one() -> None:
    stopped = ChangeRecord(pod="p1", stop=True)
    starting = pod("p2", phase="Pending", ready=False)
    todo = reconcile({"a": stopped, "b": B}, [pod("p1"), starting], 2, 9.0)
    assert todo.replicas == 2


def test_a_deleted_pod_has_no_successor() -> None:
    todo = reconcile({"a": A}, [pod("new", phase="Pending", ready=False)], 1, 9.0)
    assert todo.changes["a"].reason == "its pod was deleted"
    assert (todo.replicas, todo.cheap) == (0, ("new",))
    assert pod_instance("a", "k", todo.changes["a"], None).state == "failed"


def test_a_pod_that_does_not_come_up_has_failed() -> None:
    broken = pod("p1", ready=False, waiting="CrashLoopBackOff: back-off 10s")
    todo = reconcile({"a": A, "b": B}, [broken, pod("p2")], 2, 9.0)
    assert todo.changes["a"].reason == "CrashLoopBackOff: back-off 10s"
    assert (todo.replicas, todo.cheap) == (1, ("p1",))


def test_what_ended_long_ago_is_forgotten() -> None:
    ended = ChangeRecord(pod="p9", ended=100.0)
    assert reconcile({"a": ended}, [], 0, 399.0).changes == {"a": ended}
    assert reconcile({"a": ended}, [], 0, 401.0).changes == {}


def test_an_empty_annotation_has_no_changes() -> None:
    assert changes_of("") == {}
