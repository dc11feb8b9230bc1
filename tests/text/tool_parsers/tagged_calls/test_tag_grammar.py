"""Grammars let through what the families' templates write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher

from pdserve.text.tool_parsers import tool_format
from tests.text.golden.deepseek_v32 import dsml
from tests.text.golden.glm45 import TAGS as GLM45
from tests.text.golden.glm47 import TAGS as GLM47
from tests.text.golden.hy_v3 import OPEN_TAGS, around
from tests.text.golden.minimax_m2 import TAGS as MINIMAX_M2
from tests.text.golden.minimax_m3 import block, element, invoke
from tests.text.golden.samples import TOOLS
from tests.text.golden.seed_oss import TAGS as SEED_OSS
from tests.text.golden.step3 import TAGS as STEP3
from tests.text.tool_parsers.test_tool_call_grammar import ids_of, tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.text.golden.tagged import Tags

MARK = "]<]minimax[>["


def paris(tags: Tags) -> str:
    return tags.call("get_weather", city="Paris")


def in_one_block(tags: Tags) -> str:
    """Two calls in a block, a line each."""
    begin = f"{tags.start}\n"
    inner = paris(tags).removeprefix(begin).removesuffix(f"\n{tags.stop}")
    return f"{begin}{inner}\n{inner}\n{tags.stop}"


WRITTEN = {
    "glm45": f"{paris(GLM45)}\n{paris(GLM45)}",
    "glm47": paris(GLM47) + GLM47.call("now"),
    "hy_v3": around(f"{paris(OPEN_TAGS)}\n{paris(OPEN_TAGS)}"),
    "minimax_m2": in_one_block(MINIMAX_M2),
    "deepseek_v32": in_one_block(dsml("function_calls")),
    "deepseek_v4": in_one_block(dsml("tool_calls")),
    "deepseek_v41": in_one_block(dsml("calls", " ")),
    "step3": f"<｜tool_calls_begin｜>\n{paris(STEP3)}\n{paris(STEP3)}\n<｜tool_calls_end｜>",
    "seed_oss": (paris(SEED_OSS).replace("Paris", "\nParis\n") + "\n" + SEED_OSS.call("now")),
    "minimax_m3": block(
        invoke("get_weather", element("city", "Paris")),
        invoke("plan", element("steps", element("item", "a"), element("item", "b"))),
    ),
}


def allows(name: str, text: str, special: Mapping[str, int], choice: str = "required") -> bool:
    """Whether the grammar lets the text through as a whole answer."""
    grammar = tool_format(name).grammar(TOOLS, choice, True, special)
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = ids_of(text, special)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_as_the_template_writes_them(name: str, choice: str):
    assert allows(name, WRITTEN[name], {}, choice)
    start = tool_format(name).starts[0]
    assert allows(name, WRITTEN[name], {start: 0}, choice)


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m3"])
def test_a_token_inside_of_tags_is_written_as_that_token(name: str, choice: str):
    token = MARK if name == "minimax_m3" else "｜DSML｜"
    special = {token: 0}
    assert allows(name, WRITTEN[name], special, choice)
    spelled = tokenizer().tokenize_str(WRITTEN[name])
    grammar = tool_format(name).grammar(TOOLS, "required", True, special)
    assert LLMatcher(tokenizer(), grammar, log_level=0).validate_tokens(spelled) < len(spelled)
