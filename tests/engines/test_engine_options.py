"""Options of engines whose own settings are the options."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve_engines.engine_options import field_of, parse_value

OURS = {"model": "--model", "port": "nothing: no server is started"}


def field(name: str) -> str:
    return field_of("fast", name, ["model", "tp_size", "_secret"], OURS, "Fast's Args, as tp_size")


def test_values_are_json_where_they_look_like_it() -> None:
    texts = ("1", "true", "True", "None", "fp8", '{"a": 1}', "[1, 2]", "")
    expected = [1, True, True, None, "fp8", {"a": 1}, [1, 2], ""]
    assert [parse_value(text) for text in texts] == expected


def test_dashes_are_underscores() -> None:
    assert field("tp-size") == field("tp_size") == "tp_size"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "the fast engine's option model is set by --model"),
        ("port", "the fast engine's option port cannot be set: no server is started"),
        ("tp_siez", "no option 'tp_siez'; did you mean 'tp_size'.* fields of Fast's Args"),
        ("unlike", "no option 'unlike'[.] Options are the fields of Fast's Args, as tp_size"),
        ("_secret", "no option '_secret'"),
    ],
)
def test_other_names_are_refused_with_the_remedy(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        field(name)
