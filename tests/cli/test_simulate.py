"""`pdserve simulate`: flags, files, and numbers that repeat."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.cli.main import main
from pdserve.cli.simulate.report import ReplayProgress
from pdserve.sim.tuning.replays import SliceReplays

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = (
    *("simulate", "--generate", "shared-prefix", "--generate-option", "requests=30"),
    *("--generate-option", "prefix=640", "--generate-option", "output=20", "--workers", "2"),
    *("--block-size", "64", "--kv-tokens", "64000", "--seed", "5", "--noise", "0.3"),
)
SPLIT = ("--workers", "0", "--prefill", "1", "--decode", "2", "--disagg", "always")


def test_it_prints_a_table_and_writes_every_number(tmp_path: Path, capsys) -> None:
    path = tmp_path / "out.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "30 requests in" in printed.out
    assert "first token, s" in printed.out
    assert "30/30 requests" in printed.err
    made = json.loads(path.read_text())
    assert made["summary"]["outcomes"]["completed"] == 30
    assert len(made["requests"]) == 30
    assert [worker["worker"] for worker in made["workers"]] == ["worker-0", "worker-1"]
    assert made["settings"]["seed"] == 5
    assert len(made["load"]) >= 1


def test_the_first_lines_say_what_was_replayed(capsys) -> None:
    assert main([*SMALL, "--preset", "h200-8b", "--slo", "ttft=2s,cold=1.5,itl=50"]) == 0
    assert (
        "2 x h200-8b, policy ttft; good = first token within 2 s + 1.5 x its time on an idle "
        "worker, 50 ms between tokens" in capsys.readouterr().out
    )


PLANNED = (
    *("simulate", "--generate", "unique", "--generate-option", "requests=360", "--rate", "4"),
    *("--generate-option", "input=4000", "--generate-option", "output=100", "--workers", "1"),
    *("--block-size", "64", "--kv-tokens", "64000", "--slo-ttft", "300ms", "--planner"),
    *("--start-up", "10s:15s", "--good", "95%", "--most-workers", "4"),
)


def test_a_planner_starts_the_workers_that_a_load_needs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "out.json"
    assert main([*PLANNED, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "start sim as aggregated" in printed
    made = json.loads(path.read_text())["summary"]
    assert made["outcomes"]["completed"] == 360
    assert made["scaling"]["starts"] >= 1
    assert 1 < made["scaling"]["mean_workers"] <= 4
    assert made["good"] > 0.6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pending", "3s"], "--pending has no effect without --planner"),
        (["--planner", "--plan"], "--plan and --planner are two questions"),
        (["--planner", "--start-up", "30s:10s"], "90th percentile, which is not below it"),
        (["--planner", "--start-up", "0s"], "more than 0"),
        (["--planner", "--stuck", "2"], "share"),
        (["--planner", "--budget=-1"], "is no budget"),
        (["--planner", "--budget", "0.5"], "budget 0.5 is below 1"),
        (["--planner", "--workers", "9", "--most-workers", "4"], "is less than the 9 workers"),
        (["--planner", "--price", "-1"], "--price -1 must be 0 or more"),
    ],
)
def test_what_a_planner_refuses(flags, words, capsys) -> None:
    command = ["simulate", "--generate", "unique", "--generate-option", "requests=5"]
    assert main([*command, "--slo-ttft", "1s", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_network_that_is_too_slow_for_the_nodes_is_named(capsys) -> None:
    command = ["simulate", "--generate", "unique", "--generate-option", "requests=2"]
    assert main([*command, "--delay", "1h"]) == 2
    assert "--delay 3600s is too long: give less" in capsys.readouterr().err


PLAN = (
    *("simulate", "--generate", "unique", "--generate-option", "requests=60", "--plan"),
    *("--generate-option", "rate=40", "--generate-option", "output=20", "--block-size", "64"),
    *("--kv-tokens", "200000"),
)


def test_a_plan_names_the_cheapest_cluster_and_what_binds_it(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    flags = ("--slo-ttft", "400ms", "--good", "95%", "--price", "2.5", "--modes", "aggregated")
    assert main([*PLAN, *flags, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "unique at 1x, engine h100-8b, policy ttft, disagg rule" in printed.out
    assert "objective: 95% of the requests with first token within 400ms" in printed.out
    made = json.loads(path.read_text())
    size = made["aggregated"]["workers"]
    assert size > 1
    assert f"answer: {size} aggregated workers, {2.5 * size:g} an hour" in printed.out
    assert f"3 may with {size - 1} aggregated" in printed.out
    by_size = {(one["workers"], one["seed"]): one["met"] for one in made["replays"]}
    assert by_size[size, 0]
    assert by_size[size, 1]
    assert not by_size[size - 1, 0] or not by_size[size - 1, 1]
    assert all(size <= made["answer"]["workers"] for (size, _), met in by_size.items() if not met)


@pytest.mark.parametrize(
    ("flag", "said"), [("--plan", "answer: "), ("--planner", "start sim as aggregated")]
)
def test_the_documented_lines_run(flag: str, said: str, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs/simulation.md").read_text(encoding="utf-8")
    [line] = [
        line
        for line in page.splitlines()
        if line.startswith("    pdserve simulate") and flag in line.split()
    ]
    assert main(shlex.split(line)[1:]) == 0
    assert said in capsys.readouterr().out


def test_a_plan_without_an_answer_says_why(capsys) -> None:
    assert main([*PLAN, "--slo-ttft", "300ms", "--most-workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "no cluster of up to 1 workers keeps the objective: raise --most-workers" in said
    assert "binds: ttft: at least 1 of 60 requests miss it, 0 may with 1 aggregated" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--slo-ttft", "1ms"),
            "60 of 60 requests miss ttft on an idle worker, 0 may; the slowest",
        ),
        (("--slo-itl", "1ms"), "one request alone has 6.1 ms between its tokens, more than 1ms"),
        (("--slo-itl", "1s", "--kv-tokens", "640"), "tokens, and a worker takes at most"),
        ((), "--plan needs an objective, such as --slo-ttft 500ms"),
        (("--slo-ttft", "1s", "--workers", "2"), "--workers has no effect beside --plan"),
        (("--slo-ttft", "1s", "--modes", "both"), "'both' is not a choice of aggregated and split"),
        (("--slo-ttft", "1s", "--seeds", "0"), "--seeds must be at least 1"),
        (("--slo-ttft", "1s", "--price", "-1"), "--price must not be negative"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(flags, words: str, capsys) -> None:
    assert main([*PLAN, *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    path = tmp_path / "plan.png"
    flags = ("--slo-ttft", "5s", "--slo-itl", "1s@p90", "--modes", "aggregated")
    assert main([*PLAN, *flags, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("more", [(), SPLIT], ids=["aggregated", "split"])
def test_the_same_command_writes_the_same_bytes_in_every_process(more, tmp_path: Path) -> None:
    written = []
    for hash_seed in ("1", "2"):
        path = tmp_path / f"{hash_seed}.json"
        command = [
            sys.executable,
            "-m",
            "pdserve",
            *SMALL,
            *more,
            "--routers",
            "2",
            "--frontends",
            "3",
        ]
        subprocess.run(
            [*command, "--json", str(path)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=50,
        )
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_a_file_is_read_and_only_its_name_is_kept(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}
    trace.write_text("".join(json.dumps(line | {"timestamp": t}) + "\n" for t in (0, 0, 3000)))
    path = tmp_path / "out.json"
    arguments = ["--trace", str(trace), "--jitter", "3", "--speed", "2", "--json", str(path)]
    assert main(["simulate", *arguments]) == 0
    made = json.loads(path.read_text())
    assert made["settings"]["trace"] == "t.jsonl"
    assert made["summary"]["requests"] == 3
    assert str(tmp_path) not in path.read_text()


def test_a_trace_without_times_needs_a_rate(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "talks.json"
    turn = {"from": "human", "value": "why? " * 40}
    trace.write_text(json.dumps([{"conversations": [turn, turn]}] * 3))
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "talks.json has no arrival times: give --rate" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(trace), "--rate", "5"]) == 0
    assert "3 requests in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of the arguments --trace --generate is required"),
        (["--generate", "nothing"], "no trace 'nothing'"),
        (["--generate", "unique", "--trace", "x"], "not allowed with"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--generate", "unique", "--worker", "2"], "did you mean --workers"),
        (["--generate", "unique", "--workers", "0"], "workers must be at least 1"),
        (["--generate", "unique", "--speed", "fast"], "--speed: 'fast' is no number"),
        (["--generate", "unique", "--workers", "many"], "--workers: 'many': 'many' is not a whole"),
        (["--generate", "unique", "--slow", "0.5"], "--slow '0.5' is not 2 numbers"),
        (["--generate", "unique", "--slo", "1"], "--slo: '1' is not of the form ttft=500"),
        (["--generate", "unique", "--part", "1:0"], "the part 1:0 is empty"),
        (["--generate", "unique", "--generate-option", "rate"], "--generate-option"),
        (["--generate", "unique", "--policy", "tfft"], "did you mean 'ttft'"),
        (["--generate", "unique", "--policy-option", "gamma=x", "--policy", "ttft"], "gamma"),
        (["--generate", "unique", "--engine", "torch"], "simulate needs one that models time"),
        (["--generate", "unique", "--engine", "smi"], "there is no engine 'smi'"),
        (["--generate", "unique", "--json", "no/such/folder/x"], "there is no folder"),
        (["--generate", "unique", "--prefill", "2"], "--prefill and --decode belong together"),
        (["--generate", "unique", "--bandwidth", "25GB/h"], "is not a rate"),
        (["--generate", "unique", "--disagg", "maybe"], "disagg 'maybe' is unknown"),
        (["--generate", "unique", "--host-kv", "much"], "--host-kv"),
        (["--generate", "unique", "--kv-fetch", "maybe"], "kv-fetch 'maybe' is unknown"),
        (
            ["--generate", "unique", "--engine", "instant", "--host-kv", "1GiB"],
            "engine instant has no KV tiers",
        ),
        (["--trace", "x", "--generate-option", "rate=1"], "belongs to --generate"),
        (
            ["--generate", "unique", "--good", "90%"],
            "--good has no effect without --plan or --planner: add",
        ),
        (["--generate", "unique", "--modes=split"], "--modes has no effect without --plan"),
        (["--generate", "unique", "--price", "3"], "--price has no effect without --plan"),
        (["--generate", "unique", "--most-workers", "9"], "--most-workers has no effect without"),
        (["--generate", "unique", "--seeds", "3"], "--seeds has no effect without --plan"),
        (["--generate", "unique", "--processes", "1"], "--processes has no effect without --plan"),
        (["--generate", "unique", "--slo-ttft", "1s@p95"], "the share p95 of ttft has no effect"),
        (["--generate", "unique", "--slo", "itl=50@p99.9"], "the share p99.9 of itl has no effect"),
        (["--generate", "unique", "--rate", "nan"], "--rate: 'nan' is no number"),
        (["--generate", "unique", "--noise", "inf"], "--noise: 'inf' is no number"),
        (["--generate", "unique", "--slow", "nan:1"], "--slow 'nan:1' is not 2 numbers"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(arguments, words: str, capsys) -> None:
    assert main(["simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_prompts_are_prefilled_elsewhere(tmp_path: Path, capsys) -> None:
    path = tmp_path / "out.json"
    assert main([*SMALL, *SPLIT, "--bandwidth", "1GB/s", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "prefilled remote  100.0%   30 remote (always)" in printed
    assert "KV moved" in printed
    made = json.loads(path.read_text())
    assert [worker["mode"] for worker in made["workers"]] == ["prefill", "decode", "decode"]
    assert made["summary"]["prefills"]["remote"] == {"always": 30}
    transfers = made["summary"]["transfers"]
    assert transfers["attempts"] == {"done": 30}
    assert transfers["attempts_lost"] == 0
    # The preset's model has 128 KiB of KV per token; two paths of one sender share its rate.
    assert transfers["bytes"] == made["summary"]["prefills"]["received_tokens"] * 131072
    assert transfers["seconds"] >= 0.9 * transfers["bytes"] / 1e9


def test_a_bad_line_is_found_before_any_work(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0]}\n{}\n')
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "t.jsonl, line 2: " in capsys.readouterr().err


def test_an_empty_trace_is_refused(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("at,input,output\n")
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert "the trace has no request" in capsys.readouterr().err


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    path = tmp_path / "out.png"
    assert main([*SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SMALL, "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_progress_in_a_line() -> None:
    progress = ReplayProgress(10)
    assert progress.line(1.0).startswith("[..............................] 0/10 requests")
    assert ReplayProgress(0).line(0.0).startswith("[")


TUNE = (
    *("simulate", "--generate", "unique", "--generate-option", "requests=150", "--tune"),
    *("--generate-option", "rate=12", "--generate-option", "output=40", "--block-size", "64"),
    *("--kv-tokens", "200000", "--workers", "1", "--slo-ttft", "400ms", "--slo-itl", "20ms"),
    *("--trials", "20", "--seeds", "1"),
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that take no time: the more tokens a batch has, the better."""

    def good(replays: SliceReplays, values: Sequence[float], slice_: int) -> list[float]:
        return [min(1.0, 0.2 + values[-1] / 1e4)] * replays.seeds

    monkeypatch.setattr(SliceReplays, "good", good)


@pytest.mark.usefixtures("quick")
def test_tuning_says_what_it_tried_and_what_came_of_it(tmp_path: Path, capsys) -> None:
    pytest.importorskip("optuna")
    path = tmp_path / "tune.json"
    assert main([*TUNE, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert "unique at 1x: 20 choices" in printed.out
    made = json.loads(path.read_text())
    assert set(made["settings"]) == {"hold-work", "max-batch-tokens"}
    assert made["settings"]["max-batch-tokens"]["today"] == 2048
    assert made["accepted"]
    assert made["flags"].startswith("--max-batch-tokens=")
    assert f"\nproposed: {made['flags']}\n" in printed.out
    assert made["held_out"]["mean"] > 0.03


@pytest.mark.usefixtures("quick")
def test_what_flags_set_is_not_tuned_unless_it_is_named(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    for flags, tuned in (
        ((), {"hold-work"}),
        (("--knobs", "max-batch-tokens"), {"max-batch-tokens"}),
    ):
        path = tmp_path / "tune.json"
        assert main([*TUNE, "--max-batch-tokens=1024", *flags, "--json", str(path)]) == 0
        assert set(json.loads(path.read_text())["settings"]) == tuned


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--plan"], "--plan and --tune are two questions"),
        (["--knobs", "hold-wrok"], "did you mean hold-work?"),
        (["--knobs", "disagg-min-tokens"], "it needs --prefill and --disagg rule"),
        (["--trials", "0"], "--trials must be at least 1"),
        (["--plot", "x.png"], "--plot has no effect beside --tune"),
        (["--price", "2"], "--price has no effect without --plan"),
        (["--max-batch-tokens", "512", "--router-option", "hold-work=0.2"], "flags set every"),
    ],
)
def test_a_tuning_that_cannot_be_is_refused(flags: list[str], words: str, capsys) -> None:
    pytest.importorskip("optuna")
    assert main([*TUNE, *flags]) != 0
    assert words in capsys.readouterr().err


def test_flags_of_tuning_alone_are_refused_without_it(capsys) -> None:
    assert main([*SMALL, "--trials", "9"]) != 0
    assert "--trials has no effect without --tune" in capsys.readouterr().err


def test_tuning_without_optuna_names_the_extra(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(list(TUNE)) != 0
    assert "pip install 'pdserve[tune]'" in capsys.readouterr().err
