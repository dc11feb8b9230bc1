"""The planner file: what it may say, and what an error names."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.config.planner_file import parse_planner_file, read_planner_file
from pdserve.planner.config import PlannerConfig

EXAMPLE = Path(__file__).parents[3] / "examples/planner.toml"
POOL = '[[planner.pool]]\nmodel = "m"\n'
AGENTS = '[[planner.actuator]]\ntype = "agents"\n'
SYSTEMD = '[[planner.actuator]]\ntype = "systemd"\n[planner.actuator.kinds.gpu]\nslots = 1\n'


def parsed(text: str):
    return parse_planner_file(text.encode(), "planner.toml", "act")


def test_the_example_is_one() -> None:
    config = read_planner_file(EXAMPLE, "advise").config
    assert (config.mode, config.budget, config.hold) == ("advise", 8.0, 3600.0)
    (pool,) = config.pools
    assert (pool.model, pool.ttft, pool.itl, pool.share) == ("llama", 1.0, 0.05, 0.95)
    (floor,) = pool.floors
    assert (floor.days, floor.begin, floor.end, floor.min) == (
        *(frozenset(range(5)), 8 * 3600.0, 18 * 3600.0, 2),
    )


def test_a_model_alone_is_enough() -> None:
    config, actuators = parsed(f"[planner]\n{POOL}")
    assert (config.pools[0].model, config.pools[0].min, actuators) == ("m", 1, ())
    assert config.mode == "act"


def test_days_are_written_short_or_in_full() -> None:
    floor = "[[planner.pool.floor]]\ndays = ['Monday', 'tue']\nmin = 1\n"
    assert parsed(f"[planner]\n{POOL}{floor}").config.pools[0].floors[0].days == {0, 1}


def test_times_have_the_grammar_of_flags() -> None:
    config, _ = parsed(f'[planner]\ntick = "500ms"\nstable = "5min"\n{POOL}slo-itl = "40ms@p99"\n')
    assert (config.tick, config.stable) == (0.5, 300.0)
    assert (config.pools[0].itl, config.pools[0].share) == (0.04, 0.99)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[planer]\n", "line 1: 'planer': unknown field; did you mean 'planner'?"),
        ("[planner]\n", "'pool': write each model under its own [[planner.pool]] header"),
        (
            f"[planner]\nstabel = '5s'\n{POOL}",
            "line 2: 'stabel': unknown field; did you mean 'stable'?",
        ),
        (f"[planner]\ntick = 5\n{POOL}", "line 2: 'tick': must be a time in quotes"),
        (f"[planner]\ntick = 'soon'\n{POOL}", "line 2: 'tick': 'soon' is not a duration"),
        (f"[planner]\nbudget = true\n{POOL}", "'budget': must be a number"),
        (f"[planner]\nbudget = 1{'0' * 400}\n{POOL}", "line 2: 'budget': is too large"),
        (f"[planner]\n{POOL}share = 1{'0' * 400}\n", "'share': is too large"),
        (f"[planner]\n{POOL}slo-ttft = '100d'\n", "slo-ttft must be more than 0 and less than 1e6"),
        (f"[planner]\n{POOL}kinds = ['a', 'a']\n", "'kinds': 'a' stands there twice"),
        (f"[planner]\n{POOL}modes = ['']\n", "'modes': a name is empty"),
        (
            f"[planner]\n{POOL}slo_ttft = '1s'\n",
            "(planner.pool 1): 'slo_ttft': unknown field; did you mean 'slo-ttft'?",
        ),
        (
            f"[planner]\n{POOL}slo-ttft = '1'\n",
            "line 4 (planner.pool 1): 'slo-ttft': '1' has no unit",
        ),
        (
            f"[planner]\n{POOL}slo-ttft = '1s@p95'\nslo-itl = '1s@p99'\n",
            "'share': a pool has one share",
        ),
        (
            f"[planner]\n{POOL}{POOL}min = 1.5\n",
            "line 6 (planner.pool 2): 'min': must be a whole number",
        ),
        (f"[planner]\n{POOL}min = 0\n", "pool 'm': min must be at least 1: a start takes minutes"),
        (f"[planner]\n{POOL}modes = ['decod']\n", "mode 'decod' is not known"),
        (f"[planner]\nbudget = 1\n{POOL}min = 2\n", "budget 1 is below 2"),
        (
            f"[planner]\n{POOL}[[planner.pool.floor]]\ndays = ['mo', 'xyz']\n",
            "'days': 'mo' is no weekday",
        ),
        (
            f"[planner]\n{POOL}[[planner.pool.floor]]\ndays = ['Monday', 'month']\n",
            "'days': 'month' is no weekday: use mon, tue",
        ),
        (
            f"[planner]\n{POOL}[[planner.pool.floor]]\nfrom = '8'\n",
            "'from': '8' is no time of a day",
        ),
        (
            f"[planner]\n{POOL}[[planner.pool.floor]]\nzone = 'Mars/X'\n",
            "zone 'Mars/X' is not known here",
        ),
        (f"[planner]\n{POOL}[planner.prices]\ngpu = 'a'\n", "'gpu': must be a number"),
        (f"[planner]\n{POOL}[planner.actuator]\ntype = 'slrm'\n", "did you mean 'slurm'?"),
        ("[planner\n", "planner.toml: not valid TOML"),
        (f"[planner]\ntick = '1us'\n{POOL}", "tick must be at least 0.05 s"),
        (
            f"[planner]\nstable = '99999d'\n{POOL}",
            "stable must be more than 0, and less than 1e+09",
        ),
        (f"[planner]\nreversal-gain = -3\n{POOL}", "reversal-gain must be at least 0, and less"),
        (f"[planner]\ndonor-headroom = nan\n{POOL}", "donor-headroom must be at least 0"),
        ('[planner]\n[[planner.pool]]\nmodel = "a\\u001b"\n', "a text without control characters"),
        (
            f"[planner]\n{POOL}{AGENTS}{AGENTS}",
            "[planner.actuator]: type 'agents' stands there twice",
        ),
        (f"[planner]\n{POOL}{AGENTS}slots = 3\n", "'slots' is unknown; known: none"),
        (
            f"[planner]\n{POOL}kinds = ['gpuu']\n{SYSTEMD}",
            "pool 'm': no actuator has kind 'gpuu'; did you mean 'gpu'?",
        ),
        (
            f"[planner]\n{POOL}[planner.prices]\ngpuu = 2\n{SYSTEMD}",
            "[planner.prices]: no actuator has kind 'gpuu'; did you mean 'gpu'?",
        ),
    ],
)
def test_an_error_names_the_place_and_the_remedy(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert caught.value.message.startswith("planner.toml")
    assert says in caught.value.message


def test_a_file_that_is_not_there_names_an_example(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file .*examples/planner.toml"):
        read_planner_file(tmp_path / "none")


def test_kinds_of_agents_are_known_only_later() -> None:
    config, _ = parsed(f"[planner]\n{POOL}kinds = ['gpu', 'cpu']\n{SYSTEMD}{AGENTS}")
    assert config.pools[0].kinds == ("gpu", "cpu")


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    for name, says in (("pipe", "it is no file"), ("large", "it is larger than 1048576 bytes")):
        with pytest.raises(ConfigError, match=f"cannot be read: {says}"):
            read_planner_file(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read: it is no file"):
        read_planner_file(Path("/dev/zero"))


@pytest.mark.parametrize("kind", ["slurm", "systemd"])
@pytest.mark.parametrize("own", [True, False], ids=["a kind's own", "all kinds'"])
def test_flags_of_workers_are_checked_before_one_starts(kind: str, own: bool) -> None:
    flags = 'worker = ["--engine=sim", "--modell=/m"]\n'
    directory = 'directory = "/shared"\n' if kind == "slurm" else ""
    text = f"[planner]\n{POOL}[planner.actuator]\ntype = '{kind}'\n{directory}"
    text += f"{'' if own else flags}[planner.actuator.kinds.gpu]\n{flags if own else ''}"
    with pytest.raises(ConfigError) as raised:
        parsed(text)
    where = "[planner.actuator] kinds.gpu worker" if own else "[planner.actuator] worker"
    says = f"planner.toml: {where}: --modell is unknown, did you mean --model?"
    assert raised.value.message == says
    parsed(text.replace("--modell", "--model"))


def test_the_page_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs/planner.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `([a-z-]+)` \| (\d\S*) \|", page, re.MULTILINE))
    usual = PlannerConfig()
    names = {one.name for one in dataclasses.fields(PlannerConfig)} - {"mode", "pools", "prices"}
    assert {name.replace("_", "-") for name in names} == {*told}
    text = "[planner]\n" + "".join(
        f"{key} = {value if value[-1].isdigit() else repr(value)}\n" for key, value in told.items()
    )
    assert replace(parsed(text + POOL).config, pools=()) == replace(usual, mode="act")
