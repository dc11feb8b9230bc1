"""docs/fields.md is what the code makes of it, and every supported field is tried by some test."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from pdserve.protocols.completion_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pdserve.protocols.fields_page import ENDPOINTS, render_page
from pdserve.protocols.openapi import document
from pdserve.protocols.unsupported_fields import WITHOUT_EFFECT

ROOT = Path(__file__).parents[2]
SAME_AS = {
    *("/route", "/v1/responses/input_tokens", "/v2/rerank", "/rerank", "/score"),
    *("/invocations", "/ping"),
}
"""They take what others take, or nothing."""
_FIELDS: Final = "tests/frontend/api/test_request_fields.py::"
_SAMPLING: Final = "tests/frontend/preprocess/test_sampling.py::"
_WISHES: Final = "tests/frontend/preprocess/test_cache_wishes.py::"
_CLIENT: Final = "tests/e2e/test_openai_client.py::"

TRIED: Final = {
    "model": (
        "tests/frontend/test_generation.py::test_models_are_found_by_name_alias_or_alone"
    ), "stream": _CLIENT + "test_a_stream_carries_the_same_text_and_its_usage_on_request",
    "stream_options": _CLIENT + "test_a_stream_carries_the_same_text_and_its_usage_on_request", "n":
    _CLIENT + "test_several_choices_differ_and_each_one_ends", "temperature": _SAMPLING +
    "test_what_the_request_leaves_open_the_model_recommends", "top_p": _SAMPLING +
    "test_what_the_request_leaves_open_the_model_recommends", "top_k": _SAMPLING +
    "test_what_the_request_leaves_open_the_model_recommends", "min_p": _SAMPLING +
    "test_what_the_request_leaves_open_the_model_recommends", "frequency_penalty": _FIELDS +
    "test_penalties_and_ends_reach_the_engine", "presence_penalty": _FIELDS +
    "test_penalties_and_ends_reach_the_engine", "repetition_penalty": _SAMPLING +
    "test_what_the_request_leaves_open_the_model_recommends", "logit_bias": _CLIENT +
    "test_logit_bias_can_force_a_token", "seed": _CLIENT +
    "test_the_same_seed_gives_the_same_answer_and_another_one_another", "stop": _CLIENT +
    "test_a_stop_string_ends_the_answer_before_it", "stop_token_ids":
    "tests/frontend/output/test_streaming_response.py::test_a_stop_token_is_told_by_its_id",
    "include_stop_str_in_output": (
        _FIELDS + "test_include_stop_str_in_output_leaves_the_stop_string_in"
    ),
    "ignore_eos": _FIELDS + "test_penalties_and_ends_reach_the_engine",
    "min_tokens": _SAMPLING + "test_min_tokens_must_fit",
    "skip_special_tokens": (
        "tests/frontend/output/test_streaming_response.py::test_special_tokens_are_shown_when_asked_for"
    ),
    "spaces_between_special_tokens": (
        _FIELDS + "test_spaces_between_special_tokens_are_the_callers_to_choose"
    ),
    "add_special_tokens": (
        _FIELDS + "test_add_generation_prompt_and_special_tokens_are_the_callers_to_choose"
    ),
    "return_token_ids": _FIELDS + "test_return_token_ids_tells_prompt_and_output",
    "priority": "tests/e2e/test_overload.py::test_a_higher_priority_goes_first",
    "request_id": "tests/frontend/test_generation.py::test_a_body_may_name_its_request",
    "cache_salt": (
        "tests/frontend/preprocess/test_input_processor.py::test_a_tenant_with_isolation_gets_its_own_salt"
    ),
    "cache_ttl": _WISHES + "test_fields_become_one_wish",
    "cache_scope": _WISHES + "test_fields_become_one_wish",
    "prompt_cache_retention": _WISHES + "test_fields_become_one_wish",
    "session_id": "tests/frontend/api/test_routing_headers.py::test_wishes_reach_the_backend",
    "response_format": (
        "tests/frontend/preprocess/test_structured_output.py::"
        "test_an_answer_fits_what_was_asked_for_and_nothing_else"
    ),
    "structured_outputs": (
        "tests/frontend/preprocess/test_structured_output.py::test_completions_take_the_same_fields"
    ),
    "prompt_logprobs": (
        _FIELDS
        + "test_prompt_logprobs_go_by_token_id_on_top_of_a_chat_and_in_each_completion"
    ),
    "logprob_token_ids": _FIELDS + "test_logprob_token_ids_reach_the_engine",
    "allowed_token_ids": (
        _FIELDS + "test_allowed_token_ids_and_bad_words_reach_the_engine_as_tokens"
    ),
    "bad_words": _FIELDS + "test_allowed_token_ids_and_bad_words_reach_the_engine_as_tokens",
    "truncate_prompt_tokens": (
        _FIELDS + "test_truncate_prompt_tokens_keeps_the_end_and_the_echo_shows_what_is_left"
    ),
    "return_tokens_as_token_ids": (
        _FIELDS + "test_return_tokens_as_token_ids_names_tokens_by_their_ids"
    ),
    "stream_interval": _FIELDS + "test_stream_interval_gathers_tokens_after_the_first",
    "repetition_detection": (
        _FIELDS + "test_repetition_detection_ends_what_says_the_same_over_and_over"
    ),
    "messages": (
        "tests/frontend/preprocess/test_input_processor.py::"
        "test_parts_roles_and_template_arguments_reach_the_template"
    ), "truncation_side": _FIELDS + "test_truncation_side_says_which_end_is_cut_off", "verbosity":
    "tests/frontend/preprocess/test_normalize.py::test_verbosity_is_a_hint_for_the_template",
    "max_tokens": _SAMPLING + "test_more_output_than_fits_is_cut", "max_completion_tokens":
    _SAMPLING + "test_max_completion_tokens_wins_over_max_tokens", "logprobs": _CLIENT +
    "test_logprobs_come_with_alternatives_in_order", "top_logprobs": _CLIENT +
    "test_logprobs_come_with_alternatives_in_order", "echo": _FIELDS +
    "test_echo_puts_the_continued_message_before_the_answer", "tools":
    "tests/frontend/output/test_tool_calls.py::test_the_template_sees_the_tools_as_they_were_sent",
    "tool_choice": "tests/e2e/test_tools_client.py::test_a_call_that_has_to_be_made_is_made",
    "parallel_tool_calls": (
        "tests/frontend/output/test_tool_calls.py::test_one_call_at_a_time_ends_at_the_second"
    ),
    "reasoning_effort": (
        "tests/frontend/output/test_reasoning.py::"
        "test_no_effort_is_no_thinking_where_the_template_knows"
    ),
    "enable_thinking": (
        "tests/frontend/output/test_reasoning.py::test_effort_is_a_variable_of_the_template"
    ), "thinking":
    "tests/frontend/output/test_reasoning.py::test_effort_is_a_variable_of_the_template",
    "include_reasoning": "tests/frontend/output/test_reasoning.py::test_reasoning_can_be_left_out",
    "thinking_token_budget": (
        "tests/frontend/output/test_reasoning.py::"
        "test_a_bound_on_what_cannot_be_told_apart_is_refused"
    ),
    "documents": _FIELDS + "test_documents_are_handed_to_the_template",
    "chat_template": (
        "tests/frontend/preprocess/test_input_processor.py::"
        "test_a_template_of_the_model_is_chosen_by_name_without_trust"
    ),
    "chat_template_kwargs": (
        "tests/frontend/preprocess/test_input_processor.py::"
        "test_parts_roles_and_template_arguments_reach_the_template"
    ),
    "add_generation_prompt": (
        _FIELDS + "test_add_generation_prompt_and_special_tokens_are_the_callers_to_choose"
    ),
    "continue_final_message": (
        _FIELDS + "test_continue_final_message_leaves_the_last_turn_open"
    ),
    "prompt": _CLIENT + "test_echo_repeats_the_prompt",
    "suffix": "tests/frontend/preprocess/test_infill.py::test_a_gap_is_filled_over_the_api",
    "best_of": _SAMPLING + "test_choices_are_bounded_over_all_prompts",
}  # fmt: skip
"""A field, and a test of its effect: `without.py` shows that it fails without the field."""


def test_the_page_is_what_the_code_makes_of_it() -> None:
    stale = "run: python -m pdserve.protocols.fields_page docs/fields.md"
    assert (ROOT / "docs" / "fields.md").read_text() == render_page(), stale


def test_every_request_has_a_table() -> None:
    paths = document("0")["paths"].items()
    asked = {path for path, item in paths if "requestBody" in item.get("post", ())}
    assert asked - SAME_AS == set(ENDPOINTS)


@pytest.mark.parametrize(
    "record", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_every_field_says_what_it_is_for(record: type) -> None:
    fields = document("0")["components"]["schemas"][record.__name__]["properties"]
    silent = [name for name, described in fields.items() if not described.get("description")]
    assert not silent


def test_every_supported_field_is_tried_by_a_test() -> None:
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    idle = WITHOUT_EFFECT - {"prompt_cache_retention"}
    assert fields - idle == set(TRIED)


@cache
def functions(path: str) -> dict[str, str]:
    """Tests of a file by name, as text, with what stands at the file's top level."""
    source = (ROOT / path).read_text()
    nodes = ast.parse(source).body
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    constants = [
        ast.unparse(node) for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    return {node.name: "\n".join([ast.unparse(node), *constants]) for node in tests}


@pytest.mark.parametrize("field", TRIED)
def test_the_test_of_a_field_exists_and_names_it(field: str) -> None:
    path, name = TRIED[field].split("::")
    assert name in functions(path), f"{TRIED[field]} is gone: name another test of '{field}'"
    assert field in functions(path)[name]
