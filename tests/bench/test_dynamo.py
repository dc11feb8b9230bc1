"""The comparison with Dynamo: how answers are checked and counted, and what its page says."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from bench.frontend import HERE
from bench.peers.frontends.load import ROWS, Probe, Row, Sample, read_answer, request, vocabulary
from bench.peers.frontends.page import Findings, behind, page, ratios
from bench.peers.frontends.profile import hottest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHOLE = Row("whole", 1)
STREAM = Row("stream", 1, 2, choices=2)


def whole(*, end: str = "length", tokens: int = 1) -> str:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": end}
    return json.dumps(
        {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    )


def stream(*, choices: int = 2, tokens: int = 4, done: bool = True) -> str:
    def event(index: int, text: str, end: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": end}
        return {"choices": [choice]}

    events = [event(k, "") for k in range(choices)]
    events += [event(k, "a", None if n == 0 else "length") for n in (0, 1) for k in range(choices)]
    usage = {"prompt_tokens": 7, "completion_tokens": tokens}
    texts = [json.dumps(one) for one in (*events, {"choices": [], "usage": usage})]
    return "".join(f"data: {text}\n\n" for text in (*texts, *(["[DONE]"] if done else [])))


def test_right_answers_are_right() -> None:
    assert read_answer(WHOLE, 200, whole()) == Probe("", 7, 0)
    assert read_answer(STREAM, 200, stream()) == Probe("", 7, 4)


@pytest.mark.parametrize(
    ("row", "status", "text"),
    [
        (WHOLE, 503, whole()),
        (WHOLE, 200, whole(tokens=2)),
        (WHOLE, 200, whole(end="stop")),
        (WHOLE, 200, '{"error": "no"}'),
        (WHOLE, 200, "no JSON"),
        (STREAM, 200, stream(choices=1)),
        (STREAM, 200, stream(tokens=3)),
        (STREAM, 200, stream(done=False)),
    ],
)
def test_wrong_answers_are_not_right(row: Row, status: int, text: str) -> None:
    assert read_answer(row, status, text).wrong


def test_rows_have_names_of_their_own_and_what_is_compared() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.own + row.shared for row in ROWS} >= {500, 2000, 8000}
    assert any(row.choices == 2 for row in ROWS)
    assert any(row.shared for row in ROWS)
    assert any(row.rate for row in ROWS)


def test_words_stand_in_json_and_in_bodies_as_they_are() -> None:
    words = vocabulary()
    assert len(words) > 10_000
    assert not [word for word in words if json.dumps(word) != f'"{word}"' or "<" in word]


# ---------------------------------------------------------------- the generator


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    program: Path = tmp_path_factory.mktemp("loadgen") / "loadgen"
    source = HERE / "loadgen" / "loadgen.cpp"
    subprocess.run(["g++", "-std=c++17", "-o", str(program), str(source)], check=True)
    return program


@pytest.fixture
def port(generator: Path) -> Iterator[int]:
    command = [str(generator), "serve", "--openai", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.terminate()


@pytest.mark.parametrize("row", [WHOLE, Row("some", 2, 3), Row("two", 2, 3, choices=2, shared=9)])
def test_the_generator_counts_right_answers_only(
    row: Row, generator: Path, port: int, tmp_path: Path
) -> None:
    (tmp_path / "words").write_text("one\ntwo\nthree\n")
    (tmp_path / "body").write_text(json.dumps(request(row)))
    command = [str(generator), "load", "--port", str(port), "--path", "/v1/chat/completions"]
    command += ["--body", str(tmp_path / "body"), "--vocabulary", str(tmp_path / "words")]
    command += ["--requests", "40", "--warmup", "0", "--seconds", "20", "--tokens"]

    def run(tokens: int) -> dict[str, Any]:
        done = subprocess.run([*command, str(tokens)], check=True, capture_output=True, text=True)
        got: dict[str, Any] = json.loads(done.stdout)
        return got

    right = run(row.answer_tokens)
    assert (right["requests"], right["wrong"], right["errors"]) == (40, 0, 0)
    assert right["prompt_tokens"] == 40
    if row.tokens:
        assert right["answer_events"] == 40 * (row.answer_tokens + 2)
    wrong = run(row.answer_tokens + 1)
    assert wrong["requests"] == 0
    assert wrong["wrong"] == 40


# ---------------------------------------------------------------- profile and page


def test_a_profile_has_the_functions_that_run_themselves() -> None:
    lines = ["main (a.py:1);work (b.py:2) 6", "main (a.py:9);work (b.py:3) 2", "main (a.py:1) 2"]
    lines.append("main (a.py:1);Condition.wait (threading.py:320) 90")
    assert hottest(lines) == [("work (b.py)", 0.8), ("main (a.py)", 0.2)]


def sample(good: float) -> Sample:
    """A sample that is so many times as good as that of 1."""
    return Sample(
        requests=100 * good,
        chunks=6400 * good,
        each=64,
        prompt=1000 * good,
        p50=10 / good,
        p99=20 / good,
        front=300 / good,
        workers=200 / good,
        share=0.9,
        bad=1,
        foreign=0.1,
    )


def findings(ours: tuple[float, ...]) -> Findings:
    rows = [row for row in ROWS if row.choices == 1]
    samples = {(row.name, "ours"): [sample(good) for good in ours] for row in rows}
    samples |= {(row.name, "theirs"): [sample(1.0)] * len(ours) for row in rows}
    probes = {key: Probe("", 7) for key in samples}
    probes["two choices", "theirs"] = Probe("only one choice")
    return Findings("ours", ["theirs"], samples, probes)


def test_a_ratio_above_one_is_better_for_rates_and_times() -> None:
    found = ratios(findings((2.0, 4.0, 3.0)))
    assert found
    assert all(one.median == pytest.approx(3.0) for one in found)
    assert {one.what for one in found} == {"requests", "chunks", "p50", "p99", "front"}
    assert behind(findings((2.0, 4.0, 3.0))) == []


def test_the_page_names_rows_that_are_behind_and_what_was_not_right() -> None:
    made = findings((0.5, 2.0, 0.8))
    text = page(made, ["# Head"])
    assert len(behind(made)) == len({row.name for row, _ in made_rows(made)})
    assert "- one token, 16 connections, to theirs: requests/s 0.80" in text
    assert "0.50 to 2.00 | 1, missed | 0.50 | 2.00 | 0.80 |" in text
    bad = sum(len(samples) for samples in made.samples.values())
    assert f"{bad} were not right" in text
    assert "theirs does not serve *two choices*" in text
    assert "Not taken in this run" in text


def made_rows(made: Findings) -> list[tuple[Row, str]]:
    return [(one.row, one.rival) for one in ratios(made)]


def test_the_page_has_profiles_if_they_were_taken() -> None:
    made = findings((0.5,))
    made.profiles["one token, 16 connections"] = {"frontend": [("work (b.py)", 0.8)]}
    assert "- frontend: work (b.py) 80%" in page(made, [])


def test_aims_are_judged_by_the_arm_that_is_placed_alike() -> None:
    made = findings((2.0, 2.0, 2.0))
    row = "one token, 16 connections"
    text = page(made, [])
    assert f"| {row} | theirs | requests/s | 2.00 | 2.00 to 2.00 | 1, met |" in text
    samples = {**made.samples, (row, "own"): [sample(0.5), sample(0.25), sample(0.75)]}
    both = Findings("ours", ["theirs"], samples, made.probes, apart="own")
    text = page(both, [])
    assert f"| {row} | theirs | requests/s | 2.00 (0.50) | 2.00 to 2.00 | 1, met |" in text
    assert behind(both) == []
