"""Grammars and reasoning in the real vLLM: pdserve's states mask its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from pdserve.errors import InvalidRequest
from pdserve.messages.request import Thinking
from tests.engines.vllm import real

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.request import GenerateRequest
    from pdserve.testing.inline_engine import InlineEngine

real.require_vllm()
pytestmark = real.MARKS
engines_of_this_file = real.keeps(real.MAIN)

END = 3
TOKENIZER = Tokenizer.from_file(str(real.BUNDLED / "tokenizer.json"))
PROMPT = tuple(TOKENIZER.encode("Give me an answer in JSON: ").ids)
FRONTEND = Path(__file__).parents[3] / ".venv" / "bin" / "python"
"""The environment of the frontend, whose llguidance is of another release."""

SHORT = {"type": "string", "maxLength": 5}


def thing(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    {"const": 42},
    {"enum": ["red", "green", "blue"]},
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "integer", "minimum": -50, "maximum": -10},
    SHORT,
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "enum": ['"quoted"', "back\\slash", "new\nline"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [SHORT, {"type": "null"}], "minItems": 2, "maxItems": 2}
    | {"items": False},
    {"anyOf": [{"const": 1}, {"const": "one"}]},
    thing(),
    thing(a={"const": True}),
    thing(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    thing(inner=thing(x={"enum": [1, 2]}, y=thing(z={"type": "null"}))),
    thing(list={"type": "array", "items": thing(k={"enum": ["a", "b"]}), "maxItems": 2}),
    {"$ref": "#/$defs/pair", "$defs": {"pair": thing(l={"const": 1}, r={"const": 2})}},
    {"type": "object", "properties": {"o": {"const": 1}}, "additionalProperties": False},
]


@pytest.fixture
def engine() -> Iterator[InlineEngine]:
    with real.inline() as inline:
        yield inline


def grammar_of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})


def constrained(grammar: str, **changes: Any) -> GenerateRequest:
    shape: dict[str, Any] = {"max_tokens": 90, "eos_token_ids": (END,), "ignore_eos": False}
    shape |= {"temperature": 0.8, "grammar": grammar}
    return real.request(PROMPT, **(shape | changes))


def text_of(output: list[int]) -> str:
    assert output[-1] == END, "it was cut off"
    return str(TOKENIZER.decode(output[:-1], skip_special_tokens=False))


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Read by llguidance's own parser, from the start to the end, and as JSON."""
    json.loads(text)
    jsonschema = pytest.importorskip("jsonschema")
    return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))


def test_there_are_twenty_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 20


def test_answers_fit_their_schemas_all_in_one_batch(engine: InlineEngine) -> None:
    """More than vLLM runs at once, each with a state of its own, beside requests without one."""
    requests = [constrained(grammar_of(schema), seed=i) for i, schema in enumerate(SCHEMAS)]
    plain = real.request(PROMPT)
    answers = engine.generate([plain, *requests, plain])
    for schema, (output,) in zip(SCHEMAS, answers[1:-1], strict=True):
        text = text_of(output)
        assert is_valid(schema, text), (schema, text)
    assert answers[0] == answers[-1] == engine.generate([plain])[0]


def test_choices_of_a_grammar_differ_and_fit(engine: InlineEngine) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 99999}
    outputs = engine.generate([constrained(grammar_of(schema), n=4, temperature=1.5)])[0]
    assert all(is_valid(schema, text_of(output)) for output in outputs)
    assert len({tuple(output) for output in outputs}) > 1


def test_a_cut_answer_is_continued(engine: InlineEngine) -> None:
    request = constrained(grammar_of(SCHEMAS[15]), temperature=0.0)
    ((whole,),) = engine.generate([request])
    for cut in range(len(whole)):
        ((again,),) = engine.generate(
            [constrained(grammar_of(SCHEMAS[15]), temperature=0.0, output=[whole[:cut]])]
        )
        assert again == whole


def test_a_preempted_answer_fits_its_schema(engine: InlineEngine) -> None:
    """The pool does not hold all at full length, and a preempted request keeps its state."""
    schema = thing(text={"type": "string", "minLength": 200, "maxLength": 260})
    requests = [
        constrained(grammar_of(schema), seed=seed, max_tokens=170, priority=seed)
        for seed in range(12)
    ]
    answers = engine.generate(requests)
    assert engine.core.stats().preemptions > 0  # type: ignore[attr-defined]
    fitting = [output for (output,) in answers if output[-1] == END]
    assert len(fitting) >= 4
    assert all(is_valid(schema, text_of(output)) for output in fitting)


# ------------------------------------------------------------------ reasoning


MARKS: dict[str, Any] = {
    name: tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)
    for name, text in (("start", "<think>"), ("end", "</think>"))
}


def split(output: list[int]) -> tuple[list[int], list[int]]:
    """(reasoning, answer)."""
    end = list(MARKS["end"])
    for at in range(len(output)):
        if output[at : at + len(end)] == end:
            return output[:at], output[at + len(end) :]
    raise AssertionError("the reasoning did not end")


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_reasoning_budget_is_kept(engine: InlineEngine, budget: int) -> None:
    thinking = Thinking(**MARKS, begun=True, budget=budget)
    request = real.request(PROMPT, max_tokens=60, thinking=thinking, temperature=1.0)
    ((output,),) = engine.generate([request])
    reasoning, _ = split(output)
    assert len(reasoning) <= budget


def test_a_grammar_follows_the_reasoning(engine: InlineEngine) -> None:
    thinking = Thinking(**MARKS, begun=True, budget=6)
    requests = [
        constrained(grammar_of(schema), thinking=thinking, seed=seed)
        for seed, schema in enumerate(SCHEMAS[:8])
    ]
    for schema, (output,) in zip(SCHEMAS, engine.generate(requests), strict=False):
        reasoning, answer = split(output)
        assert len(reasoning) <= 6
        assert is_valid(schema, text_of(answer))


def test_the_least_length_holds_with_a_budget(engine: InlineEngine) -> None:
    thinking = Thinking(**MARKS, begun=True, budget=50)
    shape: dict[str, Any] = {"logit_bias": {END: 60.0}, "min_tokens": 5, "max_tokens": 9}
    shape |= {"eos_token_ids": (END,), "ignore_eos": False, "thinking": thinking}
    ((output,),) = engine.generate([real.request(PROMPT, **shape)])
    assert output.index(END) == 5


# ------------------------------------------------------------------ faults


def test_a_grammar_that_does_not_compile_fails_alone(engine: InlineEngine) -> None:
    faulty = engine.submit(constrained("start: nonsense"))
    good = engine.submit(constrained(grammar_of(SCHEMAS[1])))
    engine.run()
    assert faulty.error is not None
    assert "compile" in faulty.error.message
    assert good.error is None
    assert is_valid(SCHEMAS[1], text_of(good.tokens[0]))


def test_given_output_that_does_not_fit_fails_alone(engine: InlineEngine) -> None:
    faulty = engine.submit(constrained(grammar_of({"const": 1}), output=[[700, 701]]))
    engine.run()
    assert isinstance(faulty.error, InvalidRequest)


def test_an_abort_while_the_grammar_compiles_leaves_nothing(engine: InlineEngine) -> None:
    schema = thing(**{f"field_{i}": SHORT for i in range(60)})
    for _ in range(5):
        ledger = engine.submit(constrained(grammar_of(schema), n=2))
        engine.step()
        engine.abort(ledger)
    engine.run()
    assert engine.core.stats().blocks_used == 0  # type: ignore[attr-defined]


# ------------------------------------------------------------------ two releases


COMPILE = """
import json, sys
from importlib.metadata import version
from pdserve.text.grammar.grammar_source import from_schema
texts = [from_schema(schema, "x").text for schema in json.load(sys.stdin)]
json.dump({"version": version("llguidance"), "texts": texts}, sys.stdout)
"""


def test_grammars_of_the_frontends_release_compile_here(
    engine: InlineEngine, record_property: Any
) -> None:
    """The frontend and vLLM pin other releases of llguidance; what one writes the other reads."""
    if not FRONTEND.exists():
        pytest.skip("there is no frontend's environment")
    made = subprocess.run(
        [FRONTEND, "-c", COMPILE],
        input=json.dumps(SCHEMAS).encode(),
        capture_output=True,
        check=True,
        timeout=60,
        cwd=FRONTEND.parents[2],
    )
    found = json.loads(made.stdout)
    record_property("llguidance of the frontend", found["version"])
    record_property("llguidance of vLLM", version("llguidance"))
    print(f"llguidance: frontend {found['version']}, vLLM {version('llguidance')}", file=sys.stderr)
    requests = [constrained(text, seed=i) for i, text in enumerate(found["texts"])]
    for schema, (output,) in zip(SCHEMAS, engine.generate(requests), strict=True):
        assert is_valid(schema, text_of(output)), schema
