"""One grammar of objectives for bench and simulate."""

from __future__ import annotations

import pytest

from pdserve.cli.main import main
from pdserve.cli.parser import Parser
from pdserve.cli.slo_flags import SloText, add_slo_flags, parse_limit, parse_slo_text, slo_of
from pdserve.errors import ConfigError
from pdserve.sim.capacity.objective import SloLimit

NAMES = ("ttft", "itl")


@pytest.mark.parametrize(
    ("text", "limits", "cold"),
    [
        ("", {}, 0),
        ("ttft=500", {"ttft": SloLimit(0.5)}, 0),
        ("ttft=1s, itl = 50ms", {"ttft": SloLimit(1.0), "itl": SloLimit(0.05)}, 0),
        ("itl=50@p95,cold=2", {"itl": SloLimit(0.05, 0.95)}, 2),
        ("ttft=1.5s@p99.9", {"ttft": SloLimit(1.5, 0.999)}, 0),
    ],
)
def test_objectives_parse(text: str, limits: dict[str, SloLimit], cold: float) -> None:
    assert parse_slo_text(text, NAMES, cold=True) == SloText(limits, cold)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft", "of the form ttft=500,itl=500"),
        ("e2e=3s", "of the form"),
        ("ttft=", "duration such as"),
        ("ttft=soon", "duration such as"),
        ("ttft=0", "more than 0"),
        ("ttft=1parsec", "unknown unit"),
        ("ttft=1s,ttft=2s", "limited twice"),
        ("ttft=1s@95", "not a percentile such as p95"),
        ("ttft=1s@p100", "not a percentile"),
        ("cold=x", "no number above 0"),
    ],
)
def test_a_wrong_objective_says_what_would_be_right(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_slo_text(text, NAMES, cold=True)


def test_a_flag_of_one_limit_needs_a_unit() -> None:
    assert parse_limit("500ms@p95") == SloLimit(0.5, 0.95)
    with pytest.raises(ValueError, match="write 500ms or 500s"):
        parse_limit("500")


def parsed(*arguments: str) -> SloText:
    parser = Parser("it", "")
    add_slo_flags(parser.add_argument_group("output"), NAMES, "", "ttft=9s")
    return slo_of(parser.parse(arguments), NAMES)


def test_flags_of_single_limits_stand_beside_the_list() -> None:
    assert parsed().limits == {}
    assert parsed("--slo-itl", "50ms").limits == {"itl": SloLimit(0.05)}
    both = parsed("--slo", "ttft=1s", "--slo-itl", "50ms").limits
    assert both == {"ttft": SloLimit(1.0), "itl": SloLimit(0.05)}
    with pytest.raises(ConfigError, match="--slo-ttft and --slo both limit ttft"):
        parsed("--slo", "ttft=1s", "--slo-ttft", "2s")
    with pytest.raises(ConfigError, match="--slo-ttft: '2' has no unit"):
        parsed("--slo-ttft", "2")


@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_both_commands_explain_the_same_grammar(command: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "With @p95 behind a limit 95% of the requests must keep it" in text
    assert "The same as itl=TIME in --slo" in text
