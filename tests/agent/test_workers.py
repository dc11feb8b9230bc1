"""An agent's decisions: slots, repeats, ends, and what a later agent finds."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from pdserve.agent.logs import rotate
from pdserve.agent.records import RecordStore
from pdserve.agent.workers import SeenWorker, Workers
from pdserve.errors import ActuatorDenied, ActuatorExhausted
from pdserve.ids import NodeId
from pdserve.messages.agent import StartWorker
from tests.agent.support import FakeProcesses, command

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.agent.processes import Started
    from pdserve.messages.planner import Instance

SLOTS = {"gpu": ("0", "1"), "cpu": ("",)}


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


@pytest.fixture
def workers(tmp_path: Path, processes: FakeProcesses) -> Workers:
    return make(tmp_path, processes)


def make(path: Path, processes: FakeProcesses) -> Workers:
    kinds = ("gpu", "cpu", "gpu/big")
    return Workers(SLOTS, kinds, RecordStore(path), processes, command, "agent-host-1f")


def order(change: str, kind: str = "gpu", mode: str = "aggregated") -> StartWorker:
    return StartWorker(change=change, kind=kind, mode=mode)


def one(workers: Workers, change: str, now: float = 0.0) -> Instance:
    (found,) = [one for one in workers.report(now).instances if one.change == change]
    return found


SEEN = {"a": SeenWorker(NodeId("host-1f-gpu-0"))}


def test_a_worker_gets_the_first_free_slot_and_a_name_of_it(
    workers: Workers, processes: FakeProcesses
) -> None:
    assert [workers.start(order(x), 0.0).node for x in "ab"] == ["host-1f-gpu-0", "host-1f-gpu-1"]
    assert [one["DEVICES"] for one in processes.environs] == ["0", "1"]
    processes.end(100)
    workers.poll(1.0, {})
    assert workers.start(order("c"), 1.0).node == "host-1f-gpu-0"


def test_a_life(workers: Workers, processes: FakeProcesses) -> None:
    assert workers.start(order("a"), 0.0).state == "booting"
    workers.poll(1.0, SEEN)
    assert one(workers, "a").state == "running"
    workers.poll(2.0, {"a": SeenWorker(NodeId("x"), draining=True)})
    assert one(workers, "a").state == "ending"
    workers.poll(3.0, SEEN)
    assert one(workers, "a").state == "running", "its drain was undone"
    assert workers.stop("a", 10.0, 3.0)
    workers.poll(3.5, SEEN)
    assert one(workers, "a").state == "ending"
    assert processes.signals == [("TERM", 100)]
    processes.end(100)
    workers.poll(4.0, {})
    ended = one(workers, "a", 4.0)
    assert (ended.state, ended.reason, ended.ref) == ("ended", "ended with status 0", "pid 100")


def test_a_repeat_starts_nothing_whatever_became_of_it(
    workers: Workers, processes: FakeProcesses
) -> None:
    workers.start(order("a"), 0.0)
    assert workers.start(order("a"), 0.0).state == "booting"
    processes.end(100, 1)
    workers.poll(1.0, {})
    assert workers.start(order("a"), 5000.0).state == "failed"
    assert len(processes.words) == 1


def test_kinds_that_share_slots_count_together(workers: Workers) -> None:
    workers.start(order("a"), 0.0)
    report = workers.report(0.0)
    assert [(kind.name, kind.slots) for kind in report.kinds] == [
        ("gpu", 2),
        ("cpu", 1),
        ("gpu/big", 2),
    ]
    assert report.free == {"gpu": 1, "cpu": 1, "gpu/big": 1}
    workers.start(order("b", "gpu/big"), 0.0)
    with pytest.raises(ActuatorExhausted, match="all 2 slots 'gpu'"):
        workers.start(order("c"), 0.0)
    assert workers.start(order("d", "cpu"), 0.0).state == "booting"


@pytest.mark.parametrize(
    ("kind", "mode", "words"),
    [("gpus", "decode", "did you mean 'gpu'"), ("gpu", "both", "one of aggregated, prefill")],
)
def test_what_its_operator_did_not_allow_is_denied(
    workers: Workers, processes: FakeProcesses, kind: str, mode: str, words: str
) -> None:
    with pytest.raises(ActuatorDenied, match=words):
        workers.start(order("a", kind, mode), 0.0)
    assert not processes.words
    assert not workers.knows("a")


@pytest.mark.parametrize(
    ("status", "says"),
    [(3, "ended with status 3"), (-9, "was ended by SIGKILL")],
)
def test_a_worker_that_ends_by_itself_has_failed_and_says_why(
    workers: Workers, processes: FakeProcesses, status: int, says: str
) -> None:
    workers.start(order("a"), 0.0)
    processes.end(100, status)
    workers.poll(1.0, {})
    assert one(workers, "a").state == "failed"
    assert one(workers, "a").reason == f"{says}; its last line: ready to serve"
    assert not [x for x in workers.report(302.0).instances if x.change == "a"]


def test_a_signal_without_a_name_is_told_by_its_number(
    workers: Workers, processes: FakeProcesses
) -> None:
    workers.start(order("a"), 0.0)
    processes.end(100, -35)
    workers.poll(1.0, {})
    assert one(workers, "a").reason.startswith("was ended by signal 35")


def test_a_log_that_cannot_be_removed_ends_no_look_at_the_workers(
    tmp_path: Path, workers: Workers, processes: FakeProcesses
) -> None:
    for number in range(22):
        workers.start(order(f"w{number}"), 0.0)
        processes.end(100 + number)
        workers.poll(float(number), {})
        if not number:
            (tmp_path / "w0.log").unlink()
            (tmp_path / "w0.log").mkdir()
    assert not (tmp_path / "w1.log").exists()
    assert (tmp_path / "w2.log").exists()


def test_a_worker_that_an_operator_drained_has_not_failed(
    workers: Workers, processes: FakeProcesses
) -> None:
    workers.start(order("a"), 0.0)
    processes.end(100, 0)
    workers.poll(1.0, {})
    assert one(workers, "a").state == "ended"


def test_what_cannot_be_run_has_failed(workers: Workers, processes: FakeProcesses) -> None:
    processes.fails = FileNotFoundError(2, "No such file or directory")
    found = workers.start(order("a"), 0.0)
    assert found.state == "failed"
    assert "No such file" in found.reason
    assert workers.report(0.0).free["gpu"] == 2


def test_an_order_that_cannot_be_written_down_is_not_carried_out(
    tmp_path: Path, processes: FakeProcesses
) -> None:
    workers = make(tmp_path / "gone", processes)
    with pytest.raises(ActuatorExhausted, match="cannot be written: No such file"):
        workers.start(order("a"), 0.0)
    assert not processes.words
    assert not workers.knows("a")


def test_a_record_that_cannot_be_written_is_told_and_written_later(
    tmp_path: Path, workers: Workers, processes: FakeProcesses
) -> None:
    workers.start(order("a"), 0.0)
    (tmp_path / "a.json.new").mkdir()
    workers.stop("a", 10.0, 0.0)
    assert workers.unwritten == f"{tmp_path} cannot be written: Is a directory"
    workers.poll(1.0, {})
    assert workers.unwritten
    (tmp_path / "a.json.new").rmdir()
    workers.poll(2.0, {})
    assert not workers.unwritten
    (record,), _ = RecordStore(tmp_path).load()
    assert (record.kill_at, record.told) == (10.0, True)


def test_after_the_grace_it_is_killed_once(workers: Workers, processes: FakeProcesses) -> None:
    workers.start(order("a"), 0.0)
    workers.stop("a", 10.0, 0.0)
    workers.stop("a", 60.0, 0.0)
    workers.poll(9.9, {})
    assert processes.signals == [("TERM", 100)]
    for now in (10.0, 10.5):
        workers.poll(now, {})
    assert processes.signals == [("TERM", 100), ("KILL", 100)]
    assert one(workers, "a", 10.5).state == "ended"
    assert "was killed" in one(workers, "a", 10.5).reason


def test_a_repeat_shortens_the_grace(workers: Workers, processes: FakeProcesses) -> None:
    workers.start(order("a"), 0.0)
    workers.stop("a", 10.0, 0.0)
    workers.stop("a", 1.0, 2.0)
    workers.poll(3.0, {})
    assert processes.signals == [("TERM", 100), ("KILL", 100)]


def test_an_engine_that_outlives_its_worker_keeps_the_slot_until_it_is_killed(
    workers: Workers, processes: FakeProcesses
) -> None:
    workers.start(order("a"), 0.0)
    processes.engines.update(processes.alive)
    processes.end(100, 1)
    workers.poll(1.0, {})
    workers.poll(5.0, {})
    assert workers.report(5.0).free["gpu"] == 1
    assert not processes.signals
    workers.poll(6.1, {})
    assert processes.signals == [("KILL", 100)]
    assert workers.report(6.1).free["gpu"] == 2


def test_many_workers_that_end_at_once_cost_one_look_at_the_host(
    workers: Workers, processes: FakeProcesses
) -> None:
    for name in ("a", "b"):
        workers.start(order(name), 0.0)
    processes.engines.update(one for one in processes.alive if one.pid == 100)
    processes.end(100, 1)
    processes.end(101, 1)
    workers.poll(1.0, {})
    assert processes.looks == 1
    assert workers.report(1.0).free["gpu"] == 1


def test_a_log_is_bounded_after_its_worker_has_ended(
    tmp_path: Path, workers: Workers, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.agent.workers.rotate", partial(rotate, most=100))
    workers.start(order("a"), 0.0)
    (tmp_path / "a.log").write_bytes(b"x" * 300 + b"\nno such model\n")
    workers.bound_logs()
    assert (tmp_path / "a.log").stat().st_size == 0
    processes.end(100, 1)
    workers.poll(1.0, {})
    assert one(workers, "a", 1.0).reason == "ended with status 1; its last line: no such model"
    (tmp_path / "a.log").write_bytes(b"y" * 300)
    workers.bound_logs()
    assert (tmp_path / "a.log.1").read_bytes() == b"y" * 100


def test_a_log_that_cannot_be_moved_leaves_the_others_bounded(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.agent.workers.rotate", partial(rotate, most=100))
    for name in ("a", "b"):
        workers.start(order(name), 0.0)
        (tmp_path / f"{name}.log").write_bytes(b"x" * 300)
    (tmp_path / "a.log.1").mkdir()
    with pytest.raises(IsADirectoryError):
        workers.bound_logs()
    sizes = [(tmp_path / f"{name}.log").stat().st_size for name in ("a", "b")]
    assert sizes == [0, 0], "a disk that is full of logs must get room"


def test_ending_what_is_not_known(workers: Workers) -> None:
    assert not workers.stop("a", 1.0, 0.0)


# ---------------------------------------------------------------------- a later agent


def test_a_later_agent_finds_what_runs(tmp_path: Path, processes: FakeProcesses) -> None:
    first = make(tmp_path, processes)
    first.start(order("a"), 0.0)
    first.start(order("b"), 0.0)
    first.stop("b", 10.0, 1.0)
    second = make(tmp_path, processes)
    assert second.adopt(2.0) == []
    second.poll(2.0, SEEN)
    assert [(x.change, x.state) for x in second.report(2.0).instances] == [
        ("a", "running"),
        ("b", "ending"),
    ]
    assert second.start(order("a"), 2.0).ref == "pid 100"
    assert second.report(2.0).free["gpu"] == 0
    second.poll(11.0, SEEN)
    assert processes.signals == [("TERM", 101), ("KILL", 101)], "the grace goes on"


def start_and_die(first: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent starts a worker, and is killed before it has noted the process."""

    def killed(record: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "_put", killed)
    with pytest.raises(KeyboardInterrupt):
        first.start(order("a"), 0.0)


def test_an_agent_that_was_killed_before_it_knew_the_process_finds_it(
    tmp_path: Path, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_and_die(make(tmp_path, processes), monkeypatch)
    second = make(tmp_path, processes)
    second.adopt(1.0)
    assert one(second, "a", 1.0).ref == "pid 100"
    assert one(second, "a", 1.0).state == "booting"


def test_an_agent_that_was_killed_before_it_started_anything_says_so(
    tmp_path: Path, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path, processes)

    def killed(record: object, now: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "_launch", killed)
    with pytest.raises(KeyboardInterrupt):
        first.start(order("a"), 0.0)
    second = make(tmp_path, processes)
    second.adopt(1.0)
    assert one(second, "a", 1.0).state == "failed"
    assert "before it had started" in one(second, "a", 1.0).reason
    assert second.start(order("a"), 1.0).state == "failed"


@pytest.mark.parametrize("told", [False, True])
def test_an_agent_that_was_killed_as_it_ended_a_worker_leaves_it_to_the_next_one(
    tmp_path: Path, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Before the signal or just after it: a worker gets one, or it would end without its drain."""
    first = make(tmp_path, processes)
    first.start(order("a"), 0.0)

    def killed(process: Started) -> None:
        if told:
            processes.signals.append(("TERM", process.pid))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes, "terminate", killed)
        with pytest.raises(KeyboardInterrupt):
            first.stop("a", 30.0, 1.0)
    second = make(tmp_path, processes)
    second.adopt(2.0)
    card = {"a": SeenWorker(NodeId("x"), draining=told)}
    for now in (2.0, 4.9, 5.1, 6.0, 9.0):
        second.poll(now, card)
        assert processes.signals == ([("TERM", 100)] if told or now > 5.0 else [])
    third = make(tmp_path, processes)
    third.adopt(10.0)
    for now in (10.0, 20.0):
        third.poll(now, SEEN)
    assert processes.signals == [("TERM", 100)]


def test_a_process_id_that_was_used_again_is_another_process(
    tmp_path: Path, processes: FakeProcesses
) -> None:
    make(tmp_path, processes).start(order("a"), 0.0)
    (old,) = processes.alive
    processes.alive = {type(old)(old.pid, old.begun + 1)}
    second = make(tmp_path, processes)
    second.adopt(1.0)
    second.poll(1.0, {})
    assert one(second, "a", 1.0).state == "failed"
    second.stop("a", 0.0, 1.0)
    assert not processes.signals


@pytest.mark.parametrize(("draining", "state"), [(True, "ended"), (False, "failed")])
def test_an_unknown_status_is_read_from_what_was_last_seen(
    tmp_path: Path, processes: FakeProcesses, draining: bool, state: str
) -> None:
    first = make(tmp_path, processes)
    first.start(order("a"), 0.0)
    first.poll(1.0, {"a": SeenWorker(NodeId("x"), draining=draining)})
    processes.end(100, None)
    second = make(tmp_path, processes)
    second.adopt(2.0)
    second.poll(2.0, {})
    assert one(second, "a", 2.0).state == state


@pytest.mark.parametrize(
    ("left", "state", "says"),
    [
        ("0\n", "ended", "ended with status 0"),
        ("4\n", "failed", "ended with status 4; its last line: ready to serve"),
        ("", "failed", "left no exit status, as a process that is killed or crashes"),
    ],
)
@pytest.mark.parametrize("while_away", [True, False])
def test_a_later_agent_reads_the_status_that_a_worker_has_left(
    tmp_path: Path, processes: FakeProcesses, while_away: bool, left: str, state: str, says: str
) -> None:
    make(tmp_path, processes).start(order("a"), 0.0)
    second = make(tmp_path, processes)
    if not while_away:
        second.adopt(1.0)
    processes.end(100, None)
    (tmp_path / "a.exit").write_text(left)
    if while_away:
        second.adopt(1.0)
    second.poll(2.0, {})
    assert one(second, "a", 2.0).state == state
    assert one(second, "a", 2.0).reason.startswith(says)


def test_a_worker_that_ended_before_its_process_was_written_down_says_how(
    tmp_path: Path, processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_and_die(make(tmp_path, processes), monkeypatch)
    processes.end(100, None)
    (tmp_path / "a.exit").write_text("2\n")
    second = make(tmp_path, processes)
    second.adopt(1.0)
    assert one(second, "a", 1.0).state == "failed"
    assert one(second, "a", 1.0).reason.startswith("ended with status 2")


def test_a_machine_that_is_shut_down_in_order_fails_no_worker(
    tmp_path: Path, processes: FakeProcesses
) -> None:
    make(tmp_path, processes).start(order("a"), 5000.0)
    (tmp_path / "a.exit").write_text("0\n")
    second = make(tmp_path, FakeProcesses("boot-2"))
    second.adopt(10.0)
    assert one(second, "a", 10.0).state == "ended"
    assert one(second, "a", 10.0).reason == "ended with status 0"


def test_a_restart_of_the_machine_ends_all(tmp_path: Path, processes: FakeProcesses) -> None:
    make(tmp_path, processes).start(order("a"), 5000.0)
    second = make(tmp_path, FakeProcesses("boot-2"))
    second.adopt(10.0)
    assert one(second, "a", 10.0).state == "failed"
    assert "machine was restarted" in one(second, "a", 10.0).reason
    third = make(tmp_path, FakeProcesses("boot-3"))
    third.adopt(3.0)
    assert one(third, "a", 3.0).state == "failed"


def test_an_unreadable_record_is_named(tmp_path: Path, processes: FakeProcesses) -> None:
    (tmp_path / "b.json").write_text("{")
    assert make(tmp_path, processes).adopt(0.0) == ["b.json"]


def test_old_records_and_logs_go(
    tmp_path: Path, workers: Workers, processes: FakeProcesses
) -> None:
    for number in range(25):
        workers.start(order(f"c{number}", "cpu"), float(number))
        processes.end(100 + number)
        workers.poll(float(number), {})
    assert len(list(tmp_path.glob("*.log"))) == 20
    assert len(list(tmp_path.glob("*.json"))) == 25
    workers.poll(86400.0 + 10.5, {})
    assert len(list(tmp_path.glob("*.json"))) == 14
    assert not workers.knows("c10")
    assert workers.knows("c11")
