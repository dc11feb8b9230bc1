import pytest

from pdserve.cli.main import main
from pdserve.cli.mode import outcome, worker_named
from pdserve.cli.status_tables import render
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.messages.mode import ModeReport
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
    assert outcome(ModeReport(mode="decode", state="leaving", target="both"), "both") == ""
    assert outcome(SERVING, "decode") == "decode, generation 3"
    both = ModeReport(mode="both", generation=2, state="serving", share=0.25)
    assert outcome(both, "both") == "both (share 0.25), generation 2"
    failed = ModeReport(mode="decode", state="serving", failed="prefill: 2 requests were left")
    assert outcome(failed, "prefill") == "still decode: prefill: 2 requests were left"
    assert outcome(SERVING, "prefill") == "still decode: the change was cancelled"


@pytest.mark.parametrize(
    "arguments",
    [["w", "decod"], ["w", "both", "--share", "0"], ["w", "both", "--timeout", "nan"]],
)
def test_what_cannot_be_is_refused_before_anybody_is_asked(arguments, capsys):
    assert main(["mode", *arguments]) == exit_codes.USAGE
    assert "unknown" in (said := capsys.readouterr().err) or "must be greater than 0" in said


def test_status_shows_the_mode_and_where_it_leads():
    changing = ModeReport(mode="decode", generation=1, state="leaving", target="prefill")
    text = render(status(member("w", "worker", NodeReport(mode=changing, worker=LOAD))))
    (row,) = (line for line in text.splitlines() if line.startswith("w ") and "decode" in line)
    assert row.split()[:3] == ["w", "no", "decode>prefill"]
