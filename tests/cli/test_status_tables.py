"""What status and top print, from made-up statuses."""

import json

import msgspec
import pytest
from msgspec.structs import replace

from pdserve.cli.console.layout import lines_of
from pdserve.cli.status_tables import age, as_json, render, tables
from pdserve.ids import NodeId
from pdserve.messages.engine import PathState
from pdserve.messages.routing import WorkerLoad
from pdserve.messages.status import (
    ClusterStatus,
    EngineWindow,
    FrontendStats,
    HandoffStats,
    MemberStatus,
    ModelStatus,
    NodeReport,
    RouterStats,
)

NOW = 1_700_000_000.0


def member(name, role, report=None, **fields):
    return MemberStatus(
        node=NodeId(name), role=role, epoch=int((NOW - 192) * 1000), report=report, **fields
    )


def router(routed=10):
    return member("r1", "router", NodeReport(router=RouterStats(routed, 1, 2)))


def status(*members, now=NOW, **fields):
    return ClusterStatus(cluster="test", asked=NodeId("r1"), now=now, members=members, **fields)


def with_rates(now, before):
    return "\n".join(line for table in tables(now, before) for line in lines_of(table, 1000))


def row(text, word):
    (line,) = (line for line in text.splitlines() if line.startswith(word))
    return line.split()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (9.9, "9s"), (192, "3m12s"), (7500, "2h05m"), (4 * 86400 + 3 * 3600, "4d03h")],
)
def test_ages_are_told_in_two_units(seconds, text):
    assert age(seconds) == text


def test_members_have_a_row_with_state_and_age():
    text = render(
        status(
            member("w1", "worker", state="suspect", version="1.0", host="box", pid=77),
            member("w2", "worker", draining=True),
        )
    )
    assert "2 members, 0 models" in text
    assert row(text, "w1")[:7] == ["w1", "worker", "suspect", "3m12s", "1.0", "box", "77"]
    assert row(text, "w2")[2] == "draining"


def test_sections_without_rows_are_left_out():
    text = render(status(router()))
    assert "ROUTER" in text
    for heading in ("MODEL", "WORKER ", "FRONTEND", "DEGRADED", "DID NOT ANSWER"):
        assert heading not in text


def test_numbers_of_each_role():
    load = WorkerLoad(
        ready=True, running=3, waiting=2, blocks_total=8, blocks_used=2, blocks_cached=4, itl=0.005
    )
    window = EngineWindow(seconds=60, prompt_tokens=600, cached_tokens=240, output_tokens=1200)
    text = render(
        status(
            router(),
            member(
                "w1",
                "worker",
                NodeReport(worker=load, minute=window),
                models=("tiny",),
                tokens=("exact (sim)",),
            ),
            member("f1", "frontend", NodeReport(frontend=FrontendStats(5, 7, 1)), http="h:80"),
            models=(
                ModelStatus(
                    name="tiny", workers=(NodeId("w1"),), engine="instant", tokens="exact (sim)"
                ),
            ),
        )
    )
    wanted = ["w1", "yes", "3", "2", "10.0", "20.0", "5.0", "ms", "40%", "25%", "4", "8", "tiny"]
    assert row(text, "w1      yes")[: len(wanted)] == wanted
    assert "r1      10      1        2" in text
    assert row(text, "f1        5") == ["f1", "5", "0.0", "0.0", "7", "1", "h:80"]
    assert row(text, "tiny")[-4:] == ["instant", "0", "exact", "(sim)"]


def test_adapters_have_a_column_if_there_are_any():
    bare = ModelStatus(name="tiny", workers=(NodeId("w1"),), engine="sim", aliases=("t",))
    assert "ADAPTERS" not in render(status(router(), models=(bare,)))
    adapted = msgspec.structs.replace(bare, name="large", adapters=("clerk@2", "poet@1"))
    text = render(status(router(), models=(bare, adapted)))
    assert row(text, "large")[-3:] == ["t", "clerk@2,", "poet@1"]
    assert row(text, "tiny")[-1] == "t"


def test_where_prompts_were_prefilled_and_how_their_kv_came():
    paths = (PathState(node="p1", epoch=7, backend="shm", received_bytes=3 << 20, why="same host"),)
    decode = HandoffStats(
        mode="decode",
        disagg="rule",
        remote={"rule": 3},
        local={"short_prompt": 5, "queue_full": 1},
        ended={"done": 3},
        states={"fill": 2},
    )
    then = status(member("d1", "worker", NodeReport(handoffs=decode, paths=paths)))
    (line,) = (line for line in render(then).splitlines() if " decode " in line)
    assert line.split()[1:5] == ["decode", "rule", "3", "6"]
    assert "5 short_prompt, 3 rule, 1 queue_full" in render(then)
    (line,) = (line for line in render(then).splitlines() if " shm " in line)
    assert line.split()[1:7] == ["p1", "shm", "0", "B", "3.0", "MiB"]
    moved = (replace(paths[0], received_bytes=7 << 20),)
    now = status(member("d1", "worker", NodeReport(handoffs=decode, paths=moved)), now=NOW + 2)
    assert "2.0 MiB" in with_rates(now, then)
    down = (replace(paths[0], down="the peer has ended"),)
    assert "down: the peer has ended" in render(
        status(member("d1", "worker", NodeReport(paths=down)))
    )
    none = (PathState(node="p1", epoch=7, backend="none", degraded="tcp: no TLS (there)"),)
    assert "tcp: no TLS (there)" in render(status(member("d1", "worker", NodeReport(paths=none))))


def test_rates_need_two_statuses_of_the_same_life():
    before, after = status(router(10)), status(router(30), now=NOW + 4)
    assert row(with_rates(after, before), "r1      3")[4] == "5.0"
    reborn = status(msgspec.structs.replace(router(30), epoch=1), now=NOW + 4)
    assert row(with_rates(reborn, before), "r1      3")[4] == "-"


def test_a_router_shows_who_waits_and_how_well_it_chooses():
    numbers = RouterStats(
        10, 1, 2, held=7, policy="ttft", prompt_tokens=200, cached_tokens=50, prediction=1.234
    )
    text = render(status(member("r1", "router", NodeReport(router=numbers))))
    assert row(text, "r1      10")[4:] == ["7", "25%", "ttft", "1.23", "0"]


def test_reasons_of_one_process_are_listed_once():
    report = NodeReport(degraded={"no_uvloop": "slower"})
    text = render(
        status(
            member("r1", "router", report, host="box", pid=1),
            member("w1", "worker", report, host="box", pid=1),
            member("w2", "worker", report, host="box", pid=2),
            member("w3", "worker", host="box", pid=3, degraded=("pure_twins",)),
        )
    )
    assert text.count("no_uvloop: slower") == 2
    assert "w3: pure_twins" in text


def test_who_did_not_answer_and_who_gets_no_requests_is_named():
    text = render(
        status(
            member("w1", "worker", silence="no answer within 1 s"),
            conflicts={NodeId("w2"): "its 'tiny' has another tokenizer"},
        )
    )
    assert "DID NOT ANSWER\n  w1: no answer within 1 s" in text
    assert "GETS NO REQUESTS\n  w2: its 'tiny'" in text


def test_a_reason_is_shown_beside_its_member():
    text = render(status(member("w1", "worker", NodeReport(reason="starting: loading weights"))))
    assert "starting: loading weights" in text


def test_what_members_say_cannot_steer_the_terminal():
    text = render(status(member("w\x1b[2J1", "wor\nker", silence="a\x07b\nc")))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "wor ker" in text


def test_json_has_every_field_by_name():
    shown = json.loads(json.dumps(as_json(status(router(), models=(ModelStatus(name="tiny"),)))))
    assert shown["members"][0]["report"]["router"]["routed"] == 10
    assert shown["models"][0]["name"] == "tiny"
    assert shown["asked"] == "r1"
