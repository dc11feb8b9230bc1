"""What reading a literal of Python would take."""

from __future__ import annotations

from pdserve.text.tool_parsers.python_calls.pythonic import arguments_json
from pdserve.text.tool_parsers.python_literals import MAX_STRUCTURE, structure_size
from pdserve.text.tool_parsers.typed_values import value_as_json

LARGE = "[" + "None," * MAX_STRUCTURE + "]"


def test_strings_do_not_count():
    text = "{'a': '" + "x, " * MAX_STRUCTURE + '\', "b": "it\\"s"}'
    assert structure_size(text) == len("{: , : }")


def test_each_character_is_looked_at_once():
    """Quadratic work would not end before the test's time is over."""
    assert structure_size("'" + "\\'" * (1 << 21)) == 0
    assert structure_size("[" * (1 << 21)) == 1 << 21


def test_what_is_large_is_read_if_it_is_json():
    assert (
        value_as_json(LARGE.replace("None,]", "null]").replace("None", "null"), ("array",))[0]
        == "["
    )
    numbers = "[" + "1," * MAX_STRUCTURE + "1]"
    assert arguments_json([f"a={numbers}"]) == '{"a": [' + "1, " * MAX_STRUCTURE + "1]}"


def test_what_is_large_and_only_python_is_not_read():
    assert value_as_json(LARGE, ("array",))[0] == '"'
    assert arguments_json([f"a={LARGE}"]) is None
    some = "[" + "None," * (MAX_STRUCTURE // 20) + "]"
    assert arguments_json([f"a={some}"]) is not None
    assert arguments_json([f"a{number}={some}" for number in range(40)]) is None


def test_a_long_text_in_a_small_literal_is_read():
    text = "line\\n" * MAX_STRUCTURE
    value = "{'content': '" + text + "', 'more': None}"
    assert value_as_json(value, ("object",)).startswith('{"content": "line')
    assert str(arguments_json([f"a={value}"])).startswith('{"a": {"content": "line')
