import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.cli import mode as command
from pdserve.cli.main import main
from pdserve.cli.mode import outcome, worker_named
from pdserve.cli.status_tables import render
from pdserve.errors import ConfigError, LinkLost, WorkerLost
from pdserve.launch import exit_codes
from pdserve.messages.mode import ModeReport, SetMode
from pdserve.messages.routing import WorkerLoad
from pdserve.messages.status import NodeReport
from tests.cli.test_status_tables import member, status

SERVING = ModeReport(mode="decode", generation=3, state="serving")
LOAD = WorkerLoad(ready=False)


def test_only_workers_that_answer_and_can_change_are_told():
    able = member("w", "worker", NodeReport(mode=SERVING))
    assert worker_named(status(able), "w") == (able, SERVING)
    for words, one in (
        ("only workers have a mode", member("w", "router", NodeReport())),
        ("does not answer", member("w", "worker")),
        ("too old", member("w", "worker", NodeReport(handoffs=None))),
    ):
        with pytest.raises(ConfigError, match=words):
            worker_named(status(one), "w")


def test_the_end_of_a_change_is_said_in_words():
    both = SetMode(mode="both", share=0.25)
    assert outcome(ModeReport(mode="decode", state="leaving", target="both"), both) == ""
    assert outcome(SERVING, SetMode(mode="decode")) == "decode, generation 3"
    done = ModeReport(mode="both", generation=2, state="serving", share=0.25)
    assert outcome(done, both) == "both (share 0.25), generation 2"
    failed = ModeReport(mode="decode", state="serving", failed="prefill: 2 requests were left")
    assert outcome(failed, SetMode(mode="prefill")) == "still decode: prefill: 2 requests were left"
    assert outcome(SERVING, SetMode(mode="prefill")) == "still decode: the change was cancelled"
    failed = ModeReport(mode="both", state="serving", share=0.5, failed="both: it is stuck")
    assert outcome(failed, both) == "still both (share 0.5): both: it is stuck"


@pytest.mark.parametrize(
    "arguments",
    [["w", "decod"], ["w", "both", "--share", "0"], ["w", "both", "--timeout", "nan"]],
)
def test_what_cannot_be_is_refused_before_anybody_is_asked(arguments, capsys):
    assert main(["mode", *arguments]) == exit_codes.USAGE
    assert "unknown" in (said := capsys.readouterr().err) or "must be greater than 0" in said


def test_a_share_is_refused_where_it_would_be_ignored(capsys):
    assert main(["mode", "w", "decode", "--share", "0.3"]) == exit_codes.USAGE
    assert "--share is for mode both, and a decode worker has none" in capsys.readouterr().err


def test_status_shows_the_mode_and_where_it_leads():
    changing = ModeReport(mode="decode", generation=1, state="leaving", target="prefill")
    text = render(status(member("w", "worker", NodeReport(mode=changing, worker=LOAD))))
    (row,) = (line for line in text.splitlines() if line.startswith("w ") and "decode" in line)
    assert row.split()[:3] == ["w", "no", "decode>prefill"]
    proving = ModeReport(mode="prefill", generation=2, state="proving", target="prefill")
    text = render(status(member("w", "worker", NodeReport(mode=proving, worker=LOAD))))
    (row,) = (line for line in text.splitlines() if line.startswith("w ") and "prefill" in line)
    assert row.split()[:3] == ["w", "no", "prefill"]


class Told:
    """Answers with one status after another; an error is raised."""

    def __init__(self, order: SetMode, *found: object) -> None:
        self._order, self._found = order, list(found)

    def client(self) -> "Told":
        return self

    async def status(self) -> object:
        found = self._found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def set_mode(self, address: str, node: str, order: SetMode) -> ModeReport:
        assert (order.mode, order.share) == (self._order.mode, self._order.share)
        return ModeReport(mode="both", share=0.5, state="leaving", target=order.mode)

    async def close(self) -> None:
        assert not self._found


@pytest.mark.parametrize("left", [0.5, 0.25])
def test_waiting_survives_silence_and_ends_with_what_happened(left, capsys, monkeypatch):
    monkeypatch.setattr(command, "_POLL", 0.0)
    order = SetMode(mode="both", share=0.25)
    now = ModeReport(mode="both", share=left, state="serving", failed="" if left < 0.5 else "why")
    worker = [member("w", "worker", NodeReport(mode=one)) for one in (SERVING, now)]
    told: Any = Told(
        *(order, status(worker[0]), LinkLost("gone"), status(member("w", "worker"))),
        status(worker[1]),
    )
    found = asyncio.run(command._change(told, "w", order, wait=True))
    assert found == (exit_codes.OK if left < 0.5 else exit_codes.FAILED)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        "w: both (share 0.25), generation 0" if left < 0.5 else "w: still both (share 0.5): why"
    )


def test_a_worker_that_dies_or_starts_anew_is_no_mistake_of_the_operator(monkeypatch):
    monkeypatch.setattr(command, "_POLL", 0.0)
    order = SetMode(mode="both", share=0.25)
    before = member("w", "worker", NodeReport(mode=SERVING))
    for words, after in (
        ("has left the cluster", status(member("v", "worker"))),
        ("was started anew", status(replace(before, epoch=before.epoch + 1))),
    ):
        told: Any = Told(order, status(before), after)
        with pytest.raises(WorkerLost, match=words):
            asyncio.run(command._change(told, "w", order, wait=True))
