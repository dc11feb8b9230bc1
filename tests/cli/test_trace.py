"""`pdserve trace` with nodes that answer from a ring in this process."""

import asyncio
import json
import os
import signal
import sys

import pytest
from msgspec.structs import replace

from pdserve.cli import trace as trace_module
from pdserve.cli.console.reach import Reach
from pdserve.cli.main import main
from pdserve.launch import exit_codes
from pdserve.tracing.merge import merge_trace_replies
from pdserve.tracing.ring import TraceRing
from tests.support.traces import make_trace


class Visitor:
    """A cluster with two frontends."""

    def __init__(self):
        self.rings = {"f1": TraceRing(), "f2": TraceRing()}
        self.silent = {}
        self.queries = []
        self.closed = False
        self.before = lambda number: None

    async def traces(self, query):
        self.queries.append(query)
        self.before(len(self.queries))
        answers = {name: ring.answer(query, name) for name, ring in self.rings.items()}
        return merge_trace_replies(query, answers | self.silent)

    async def close(self):
        self.closed = True


@pytest.fixture
def visitor(monkeypatch):
    made = Visitor()
    monkeypatch.setattr(Reach, "client", lambda self: made)
    monkeypatch.setenv("PDSERVE_CONFIG", "none")
    return made


def trace(*arguments):
    return main(["trace", *arguments])


def test_the_last_requests_are_listed(visitor, capsys):
    visitor.rings["f1"].add(make_trace("req-a"))
    visitor.rings["f2"].add(make_trace("req-b"))
    assert trace() == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("TIME")
    assert {line.split()[-6] for line in lines[1:]} == {"req-a", "req-b"}
    assert visitor.closed


def test_filters_reach_the_frontends(visitor):
    flags = ("--model", "big", "--errors", "--slow", "--over", "2s", "--limit", "5")
    assert trace(*flags) == exit_codes.OK
    (query,) = visitor.queries
    assert (query.model, query.errors, query.slow) == ("big", True, True)
    assert (query.longer_than, query.limit) == (2.0, 5)


def test_an_empty_list_says_why(visitor, capsys):
    assert trace() == exit_codes.OK
    said = capsys.readouterr().out
    assert said.startswith("No trace is kept yet.")
    assert "--trace-sample" in said
    assert "--watch model=NAME" in said
    assert trace("--slow") == exit_codes.OK
    assert capsys.readouterr().out.startswith("No trace fits.")


def test_one_request_is_drawn(visitor, capsys):
    visitor.rings["f2"].add(make_trace("req-abc"))
    visitor.rings["f2"].add(make_trace("req-xyz"))
    for wanted in ("req-abc", "req-a", make_trace("req-abc").trace_id.hex()[:10]):
        assert trace(wanted) == exit_codes.OK
        shown = capsys.readouterr().out
        assert "request req-abc" in shown
        assert "pdserve." not in shown
        assert "decode" in shown


def test_ascii_is_ascii(visitor, capsys):
    visitor.rings["f1"].add(make_trace("req-abc"))
    assert trace("req-abc", "--ascii") == exit_codes.OK
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "####" in shown


@pytest.mark.parametrize(("encoding", "plain"), [("UTF-8", False), ("ascii", True), (None, True)])
def test_a_terminal_that_is_not_utf8_gets_ascii(visitor, capsys, monkeypatch, encoding, plain):
    class Output:
        def __init__(self, inner):
            self.encoding = encoding
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

    visitor.rings["f1"].add(make_trace("req-abc"))
    monkeypatch.setattr(sys, "stdout", Output(sys.stdout))
    assert trace("req-abc") == exit_codes.OK
    assert capsys.readouterr().out.isascii() is plain


def test_an_output_that_is_closed_gets_nothing(visitor, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert trace() == exit_codes.OK


def test_several_that_begin_so_are_listed(visitor, capsys):
    visitor.rings["f1"].add(make_trace("req-abc"))
    visitor.rings["f2"].add(make_trace("req-abd"))
    assert trace("req-ab") == exit_codes.FAILED
    captured = capsys.readouterr()
    assert "several requests begin with req-ab" in captured.err
    assert "req-abc" in captured.out
    assert "req-abd" in captured.out


def test_the_newest_of_one_id_is_drawn_and_the_others_are_named(visitor, capsys):
    old = replace(make_trace("mine"), trace_id=b"\x07" * 16, began=1)
    visitor.rings["f1"].add(old)
    visitor.rings["f2"].add(make_trace("mine"))
    assert trace("mine") == exit_codes.OK
    shown = capsys.readouterr().out
    assert f"trace   {make_trace('mine').trace_id.hex()}" in shown
    assert f"older ones: {old.trace_id.hex()}" in shown


def test_what_is_not_kept_is_an_error_with_the_remedy(visitor, capsys):
    assert trace("req-none") == exit_codes.FAILED
    said = capsys.readouterr().err
    assert "no trace of 'req-none' is kept" in said
    assert "--trace-sample" in said


def test_json(visitor, capsys):
    visitor.rings["f1"].add(make_trace("req-abc"))
    assert trace("--json") == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["traces"][0]["request_id"] == "req-abc"
    assert trace("req-abc", "--json") == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["spans"][0]["name"] == "POST /v1/chat/completions"


def test_a_frontend_that_does_not_answer_is_named_beside_the_list(visitor, capsys):
    visitor.silent = {"f3": "no answer within 1 s"}
    visitor.rings["f1"].add(make_trace("req-abc"))
    assert trace() == exit_codes.OK
    captured = capsys.readouterr()
    assert captured.err == "f3 did not answer: no answer within 1 s\n"
    assert "req-abc" in captured.out


def test_without_a_frontend_there_is_nothing(visitor, capsys):
    visitor.rings.clear()
    assert trace() == exit_codes.FAILED
    assert "only frontends have traces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--limit", "0"), "--limit: "),
        (("--limit", "201"), "--limit: "),
        (("--over", "soon"), "--over: "),
        (("--watch", "tiny"), "write --watch model=NAME"),
        (("--watch", "worker=w1"), "write --watch model=NAME"),
        (("--watch", "model="), "write --watch model=NAME"),
        (("--watch", "model=a", "req-1"), "give no other one"),
        (("--watch", "model=a", "--model", "b"), "give no other one"),
        (("--for", "5s"), "--for needs --watch"),
        (("--watch", "model=a", "--for", "1h"), "up to 10 minutes"),
        (("--watch", "model=a", "--for", "x"), "--for: "),
        (("--colour",), "--colour is unknown"),
        (("a", "b"), "unexpected argument 'b'"),
        (("req-\udcff",), "are UTF-8"),
        (("--model", "\udcff"), "are UTF-8"),
        (("--watch", "model=\udcff"), "are UTF-8"),
    ],
)
def test_wrong_arguments(visitor, capsys, arguments, says):
    assert trace(*arguments) == exit_codes.USAGE
    assert says in capsys.readouterr().err
    assert visitor.queries == []


# ---------------------------------------------------------------- watching


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(trace_module, "_PAUSE", 0.01)
    monkeypatch.setattr(trace_module, "_TAIL", 0.2)


def test_a_watch_prints_what_ends_meanwhile_once(visitor, capsys, quick):
    visitor.rings["f1"].add(make_trace("req-before"))
    arrive = {
        3: ("f1", "req-one", "tiny"),
        4: ("f2", "req-two", "tiny"),
        5: ("f2", "req-other", "big"),
        6: ("f1", "req-three", "tiny"),
    }

    def before(number):
        if number in arrive:
            node, name, model = arrive[number]
            visitor.rings[node].add(make_trace(name, model=model))

    visitor.before = before
    assert trace("--watch", "model=tiny", "--for", "100ms") == exit_codes.OK
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("TIME")
    shown = [word for line in lines[1:] for word in line.split() if word.startswith("req-")]
    assert shown == ["req-one", "req-two", "req-three"]
    assert "watching tiny for 0.1 s" in captured.err
    first, *others = visitor.queries
    assert (first.watch, first.watch_seconds) == ("tiny", 0.1)
    assert not any(query.watch for query in others)
    assert all(query.model == "tiny" for query in others)


def test_a_watch_says_what_came_and_went_unseen(visitor, capsys, quick):
    def before(number):
        if number == 3:
            for count in range(260):
                visitor.rings["f1"].add(make_trace(f"req-{count}"))
        if number == 5:
            for count in range(500):
                visitor.rings["f2"].add(make_trace(f"req-{count}", model="other"))

    visitor.before = before
    assert trace("--watch", "model=tiny", "--for", "100ms") == exit_codes.OK
    captured = capsys.readouterr()
    assert captured.out.count("req-") == 200
    assert "up to 360 traces were forgotten before they could be shown" in captured.err


def test_a_watch_hurries_when_much_ends(visitor, capsys, quick, monkeypatch):
    """Else what ends within a second would push the first ones out."""
    pauses = []
    sleep = asyncio.sleep

    async def slept(seconds):
        pauses.append(seconds)
        await sleep(0.001)

    monkeypatch.setattr(asyncio, "sleep", slept)

    def before(number):
        if number in (2, 3):
            for count in range(60):
                visitor.rings["f1"].add(make_trace(f"req-{number}-{count}"))

    visitor.before = before
    assert trace("--watch", "model=tiny", "--for", "50ms") == exit_codes.OK
    assert pauses[:4] == [0.01, 0.001, 0.001, 0.01]
    captured = capsys.readouterr()
    assert captured.out.count("req-") == 120
    assert "forgotten" not in captured.err


def test_a_watch_goes_on_when_a_frontend_has_been_restarted(visitor, capsys, quick):
    for number in range(9):
        visitor.rings["f1"].add(make_trace(f"req-{number}"))

    def before(number):
        if number == 3:
            visitor.rings["f1"] = TraceRing()
            visitor.rings["f1"].add(make_trace("req-first"))
        if number == 4:
            visitor.rings["f1"].add(make_trace("req-new"))

    visitor.before = before
    assert trace("--watch", "model=tiny", "--for", "100ms", "--json") == exit_codes.OK
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["request_id"] for line in lines] == ["req-first", "req-new"]


def test_an_interrupted_watch_is_ended_at_the_frontends(visitor, quick):
    def before(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)

    visitor.before = before
    assert trace("--watch", "model=tiny") == exit_codes.INTERRUPTED
    last = visitor.queries[-1]
    assert (last.watch, last.watch_seconds) == ("tiny", 0.001)
    assert visitor.closed
