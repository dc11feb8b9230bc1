"""The planner file: what it may say, and what an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.config.planner_file import parse_planner_file, read_planner_file

EXAMPLE = Path(__file__).parents[3] / "examples/planner.toml"
POOL = '[[planner.pool]]\nmodel = "m"\n'


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
