import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.launch.config import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("12b", 12),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        (" 1.5 MiB ", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_sizes_parse(text, size):
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4G", "write 4GiB or 4GB"),
        ("much", "such as 4GiB"),
        ("", "such as 4GiB"),
        ("-1GiB", "such as 4GiB"),
        ("3PiB", "unknown unit 'PiB'"),
        ("1.5", "whole number of bytes"),
    ],
)
def test_a_wrong_size_says_what_would_be_right(text, says):
    with pytest.raises(ValueError, match=says):
        units.parse_size(text)


@given(st.integers(0, 2**50))
def test_a_printed_size_parses_back(size):
    assert units.parse_size(units.format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("500ms", 0.5), ("5min", 300), ("5m", 300), ("1.5h", 5400)],
)
def test_durations_parse(text, seconds):
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "-1s", "10 fortnights", "inf", "nan"])
def test_a_wrong_duration_is_refused(text):
    with pytest.raises(ValueError, match=r"duration such as|unknown unit"):
        units.parse_duration(text)


@given(st.integers(0, 10**7).map(lambda ms: ms / 1000))
def test_a_printed_duration_parses_back(seconds):
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on"])
def test_switches_turn_on(text):
    assert units.parse_switch(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off"])
def test_switches_turn_off(text):
    assert units.parse_switch(text) is False


def test_a_switch_is_never_guessed():
    with pytest.raises(ValueError, match="neither true nor false"):
        units.parse_switch("maybe")


def test_lists_ignore_blanks():
    assert units.parse_list(" a, b ,,c") == ("a", "b", "c")
    assert units.parse_list("") == ()


def test_pairs_keep_everything_after_the_first_equals_sign():
    assert units.parse_pairs(["a=b=c", "d=", "a=x"]) == {"a": "x", "d": ""}
    with pytest.raises(ValueError, match="name=value"):
        units.parse_pairs(["novalue"])


def test_counts_are_bounded():
    assert units.parse_count("8_000", 1, 65535) == 8000
    with pytest.raises(ValueError, match="between 1 and 65535"):
        units.parse_count("70000", 1, 65535)
    with pytest.raises(ValueError, match="at least 1"):
        units.parse_count("0", 1)
    with pytest.raises(ValueError, match="not a whole number"):
        units.parse_count("8.5")


def test_approximate_sizes_are_for_reading():
    assert units.approximate_size(4 * 2**30 + 2**28) == "4.2 GiB"
    assert units.approximate_size(12) == "12 B"


def test_times_of_models_parse():
    times = units.parse_model_times(["500ms", "org/name=2s", "a=b = 1.5 min"])
    assert times == {"": 0.5, "org/name": 2.0, "a=b": 90.0}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (["500"], "write 500ms or 500s"),
        (["m=2"], "write 2ms or 2s"),
        (["m=fast"], "such as 500ms"),
        (["m="], "such as 500ms"),
        (["m=0ms"], "more than 0"),
        ([" =1s"], "names no model: write 1s for all models"),
        (["m=1s", "m=2s"], "second time for m"),
        (["1s", "2s"], "second time for all models"),
        (["1parsec"], "unknown unit"),
    ],
)
def test_a_wrong_time_of_a_model_says_what_would_be_right(parts, says):
    with pytest.raises(ValueError, match=says):
        units.parse_model_times(parts)
