"""A budget ends work while it is done."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequest
from pdserve.text.tool_parsers.schema_budget import MAX_STEPS, SchemaBudget


def test_steps_are_refused_at_the_bound_and_name_the_field():
    budget = SchemaBudget("tools", max_steps=3)
    budget.step()
    budget.step(2)
    budget.field = "tools[3].function.parameters"
    with pytest.raises(InvalidRequest, match="more than 3 steps") as caught:
        budget.step()
    assert caught.value.param == "tools[3].function.parameters"
    assert caught.value.message.startswith("'tools[3].function.parameters' is too complex: ")


def test_characters_are_refused_at_the_bound():
    budget = SchemaBudget("tools", max_chars=5)
    assert budget.make("abc") == "abc"
    assert budget.chars == 3
    with pytest.raises(InvalidRequest, match="more than 5 characters"):
        budget.make("def")


def test_a_budget_without_numbers_has_the_usual_ones():
    budget = SchemaBudget("tools")
    budget.step(MAX_STEPS)
    with pytest.raises(InvalidRequest):
        budget.step()
