"""What the generators of result pages say: caveats, and aims that nobody can judge."""

from __future__ import annotations

from typing import Any, cast

import pytest

from bench import index, transfer
from bench.machine import facts
from bench.pages import kept, replaced
from bench.policy_grid.cells import KV_LOAD, RIVALS, TTFT, Arm, Scale, World
from bench.policy_grid.report import Findings, page
from bench.transfer import SIZES, Row


def test_every_page_names_the_commit():
    assert facts()[0].startswith("Commit: ")


def test_what_people_have_written_is_kept(tmp_path):
    page = tmp_path / "page.md"
    assert kept(page, "## Notes") == ""
    page.write_text("# A\n\nfigures\n\n## Notes\n\nby hand\n")
    assert kept(page, "## Notes") == "\n## Notes\n\nby hand\n"


def test_the_index_is_judged_in_productions_form():
    judged = {name for _, name, _ in (*index.AIMS, *index.LIMITS)}
    assert {"dict", "branching dict"} <= judged
    assert not judged & {"match 1000", "branching"}
    assert "production" in index.ABOUT


# ---------------------------------------------------------------------- transfer


def row(name: str, *rates: float) -> Row:
    """GB/s by size; the last is that of all larger ones."""
    each = [*rates, *[rates[-1]] * (len(SIZES) - len(rates))]
    seconds = {size: [size / rate / 1e9] for size, rate in zip(SIZES, each, strict=True)}
    return Row(name, "", cast("Any", None), seconds)


def aims(*rows: Row, iperf3: tuple[float, ...] = (1.0,), busy: bool = False) -> list[str]:
    by_name = {each.name: each for each in rows}
    return transfer.aims(by_name, {"iperf3": [0.5] * len(iperf3), "fast": list(iperf3)}, busy=busy)


OURS = (row("pdserve shm/sample", 4.0), row("pdserve tcp/all", 0.9))


def test_an_aim_is_judged_with_productions_checks_beside_the_fastest_stream():
    lines = aims(*OURS, row("memcpy piece", 4.5), row("NIXL", 5.0, 3.0))
    assert "| pdserve shm/sample : memcpy piece | >= 0.85 | 16 MiB | 0.89 | met |" in lines
    assert "| pdserve tcp/all : fast | >= 0.85 | 16 MiB | 0.90 | met |" in lines
    assert not any("/off :" in line for line in lines)
    assert "| pdserve shm/all : pdserve shm/off | >= 0.7 | 16 MiB | | NOT measured |" in lines
    assert "NIXL is faster than pdserve shm/sample at: 64 KiB." in lines


@pytest.mark.parametrize("busy", [True, False])
def test_an_aim_whose_limit_is_off_is_not_judged(busy):
    shm = row("pdserve shm/sample", 4.0)
    tcp = Row("pdserve tcp/all", "", cast("Any", None), {s: [s / 1e9] * 2 for s in SIZES})
    lines = aims(shm, tcp, row("memcpy piece", 4.5, 1.5), iperf3=(1.0, 2.1), busy=busy)
    verdicts = [line for line in lines if "memcpy piece |" in line or ": fast |" in line]
    assert len(verdicts) == 4
    assert all("not judged: " in line for line in verdicts)
    assert busy or "memcpy piece itself fell to 1.50 of 4.50 GB/s" in verdicts[0]


def test_fixed_costs_are_counted_in_round_trips_of_the_same_run():
    def timed(name: str, fixed: float) -> Row:
        seconds = {s: [fixed + s / 1e10] * 2 for s in SIZES}
        return Row(name, "", cast("Any", None), seconds)

    rows = [timed(f"pdserve shm/{mode}", 100e-6) for mode in ("off", "sample", "all")]
    rows += [timed(f"pdserve tcp/{mode}", 60e-6) for mode in ("off", "sample", "all")]
    rows += [timed("bare unix", 40e-6), timed("bare tcp", 50e-6)]
    lines = transfer.fixed({each.name: each for each in rows})
    trip = 40 + SIZES[0] / 1e4
    assert f"- bare unix: a round trip of {trip:.0f} us" in lines
    assert f"| pdserve shm/off | 100 | <= 120 | {100 / trip:.2f} | <= 1.5 | NOT met |" in lines
    assert any("| pdserve tcp/all | 60 |" in line and "| met |" in line for line in lines)


# ---------------------------------------------------------------------- policies


def result(good: float) -> dict[str, Any]:
    times = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    fields = {"good": good, "goodput": 1.0, "hit_rate": 0.1, "balance": 1.0, "prediction": {}}
    return fields | {"ttft": times, "itl": times}


def test_the_policies_page_says_what_its_grid_does_not_show():
    def tuned(credit: str, weight: str) -> Arm:
        return Arm("kv_load, tuned", "kv_load", {"credit": credit, "request_weight": weight})

    few, other = World(load=1.0), World(load=1.0, routers=2)
    best = tuned("2", "16")
    names = [arm.name for arm in (TTFT, best, KV_LOAD, *RIVALS)]
    goods = {name: 1.0 if name in ("ttft", "mooncake") else 0.5 for name in names}
    results: Any = {(few, name): [result(goods[name])] * 2 for name in names}
    results |= {(other, name): [result(goods[name])] * 2 for name in names[:2]}
    tuning = [(arm, 0.9, 1.0) for arm in (best, tuned("2", "4"), tuned("3", "16"))]
    scale = Scale(requests=7, few_loads=(1.0,))
    text = page(Findings(scale, {}, best, tuning, results, 0.0), [], [])
    for words in (
        "It loses no cell.\n\nWhat the grid does not show:",
        "In 1 of the 2 cells `kv_load` is the only rival",
        "in goodput at every load: `mooncake`.",
        "`unique` prompts",
        "One trace, 7 requests a replay, cold caches, one preset in 2 of 2 cells",
        "`session` is `least_loaded`",
        "On the edge of what was tried: `request_weight` 16; more may be better.",
    ):
        assert words in text, words


def test_a_section_is_replaced_and_what_is_before_it_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nWords.\n")
    page.write_text(replaced(page, "## More", "## More\n\nOne.\n"))
    page.write_text(replaced(page, "## More", "## More\n\nTwo.\n"))
    assert page.read_text() == "# Page\n\nWords.\n\n## More\n\nTwo.\n"
    assert replaced(tmp_path / "none.md", "## More", "## More\n") == "## More\n"
