"""The fake does what has a source and nothing else, and its signatures are the real ones."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.tensorrt_llm.options import llm_arguments
from pdserve_engines.tensorrt_llm.package import schema_of
from pdserve_engines.tensorrt_llm.params import Support, next_part, sampling_arguments
from tests.contracts.contract import load
from tests.engines.tensorrt_llm import fake_llm
from tests.engines.tensorrt_llm.fake_llm import BEHAVIOURS, FakeLlm, TorchLlmArgs

CONTRACT = {entry.at: entry for entry in load("tensorrt_llm").entries}
SAMPLING = CONTRACT["tensorrt_llm.sampling_params:SamplingParams"].parameters or {}
LLM = CONTRACT["tensorrt_llm.llmapi.llm:LLM"].parameters or {}
GENERATE = CONTRACT["tensorrt_llm.llmapi.llm:LLM.generate_async"].parameters or {}
HANDOFF = CONTRACT["tensorrt_llm.disaggregated_params:DisaggregatedParams"].fields or {}

NEWER = {"prompt_ignore_length"}
"""Fields of later releases, which are used only where they exist."""


def test_every_behaviour_of_the_fake_has_a_source_and_every_source_is_used():
    tree = ast.parse(Path(fake_llm.__file__).read_text(encoding="utf-8"))
    used = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "behaviour"
        and isinstance(node.args[0], ast.Constant)
    }
    assert used == set(BEHAVIOURS)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_source_is_a_file_of_a_commit(name):
    entry = BEHAVIOURS[name]
    assert set(entry) == {"name", "says", "file", "commit"}
    assert re.fullmatch(r"[0-9a-f]{40}", entry["commit"])
    assert re.fullmatch(r"[\w./-]+\.(py|cpp|md)", entry["file"])
    assert entry["says"].endswith(".")


def test_the_fakes_sampling_parameters_are_the_real_ones():
    for field in fields(fake_llm.SamplingParams):
        if field.name in SAMPLING:
            assert SAMPLING[field.name] == repr(field.default), field.name
    assert set(SAMPLING) - {each.name for each in fields(fake_llm.SamplingParams)} == {
        "exclude_input_from_output"
    }


def test_the_fakes_generate_async_is_the_real_one():
    parameters = inspect.signature(FakeLlm.generate_async).parameters
    for name, default in GENERATE.items():
        assert name in parameters
        if default is not None:
            assert repr(parameters[name].default) == default


def test_the_fakes_disaggregated_params_are_the_real_ones():
    for field in fields(fake_llm.DisaggregatedParams):
        assert HANDOFF[field.name] == repr(field.default)


def test_the_adapter_sets_only_fields_of_the_contract():
    sampling = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        logprobs=2,
        stop_token_ids=(3,),
        logit_bias={2: 1.0},
        presence_penalty=1.0,
        grammar="",
    )
    request = GenerateRequest(request_id="r", model="m", prompt=token_ids([1]), sampling=sampling)
    support = Support(8, 100)
    for output in ((), (4, 5, 6, 7)):
        part = next_part(request, output, support)
        assert set(sampling_arguments(request, 0, part, support)) <= set(SAMPLING) | NEWER
    spec = EngineSpec(engine="tensorrt_llm", model="/m", transfer=TransferSpec())
    arguments = llm_arguments(spec, 100, schema_of(TorchLlmArgs))
    assert set(arguments.values) <= set(LLM)
