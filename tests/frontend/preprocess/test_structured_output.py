"""From a request's fields to the one grammar that its answer follows, or to a 400 that says why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
import tracemalloc
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.preprocess.input_processor import PlanContext, plan_chat, plan_completion
from pdserve.frontend.preprocess.structured_output import grammar_source_of
from pdserve.protocols.request_decoder import CHAT, COMPLETION
from pdserve.text.grammar.grammar_compiler import GrammarCompiler
from pdserve.text.grammar.grammar_source import from_regex, from_schema
from pdserve.text.reasoning_parsers import reasoning_format
from pdserve.text.text_pool import TextPool
from tests.frontend.support import HELLO, card

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
STRICT: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"},
        {"begin": "<b=x>", "schema": {"const": "y"}, "end": "</b>"},
    ],
    "triggers": ["<a", "<b="],
}


@pytest.fixture(scope="module")
def process():
    """For all tests of the module, since starting children takes most of their time. Both that it
    may keep run before the first test begins, so that no slow grammar starts one."""
    process = GrammarCompiler()
    served = model()
    source = from_regex("warm", "x")
    process.compile(served.tokenizer, served.card.vocab_size, source)
    first = process._borrow(b"", "")
    process._prepare(served.tokenizer, served.card.vocab_size)
    process._give_back(first)
    yield process
    process.close()


@pytest.fixture
async def pool(process, monkeypatch):
    pool = TextPool(grammars=process)
    yield pool
    monkeypatch.setattr(process, "close", lambda: None)
    await pool.close()


@pytest.fixture
async def own_pool():
    """With a process of its own, which may be killed."""
    pool = TextPool()
    yield pool
    await pool.close()


def model(**changes):
    features = changes.pop("features", ("grammar", "thinking", "bans"))
    return PreparedModel.from_card(card(features=features, **changes))


def context(pool, served=None):
    return PlanContext(
        model=served or model(), config=FrontendConfig(), pool=pool, request_id="req-1"
    )


async def sampling_of(pool, served=None, **fields):
    request = CHAT.decode(json.dumps(HELLO | fields).encode()).request
    plan = await plan_chat(request, context(pool, served))
    return plan.requests[0].sampling


async def refusal(pool, served=None, **fields):
    with pytest.raises(InvalidRequest) as caught:
        await sampling_of(pool, served, **fields)
    return caught.value


def fits(grammar: str, text: str, served: PreparedModel) -> bool:
    tokenizer = LLTokenizer(served.tokenizer.json.decode(), n_vocab=served.card.vocab_size)
    matcher = LLMatcher(tokenizer, grammar)
    tokens = served.tokenizer.encode(text, add_special_tokens=False).tolist()
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}

FITTING = [
    ({"response_format": {"type": "json_object"}}, ['{"x": [1, "y"]}', "{}"], ["[]", "1", ""]),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        ['{"a":1}', '{\n  "a": 1,\n  "b": null\n}'],
        ["{}", '{"a":"1"}', '{"a":1} '],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": True}}},
        ["1", '"x"'],
        ["x"],
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS}},
        ["free text", 'see <a>12</a> and <b=x>"y"</b>.', "<a>1</a><a>2</a>"],
        ["<a>x</a>", "<b=z>", "<a", "<a>1"],
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    ({"structured_outputs": {"regex": r"[a-c]{2}/\d"}}, ["ab/1"], ["ab1", "ab/1x"]),
    ({"structured_outputs": {"regex": "^(yes|no)$"}}, ["yes"], ["maybe"]),
    ({"structured_outputs": {"regex": "a\\\\/\n"}}, ["a\\/\n"], ["a/"]),
    (
        {"structured_outputs": {"choice": ['a"b', "c\\d/", "x\ny", "é日", "{}", "|"]}},
        ['a"b', "c\\d/", "x\ny", "é日", "{}", "|"],
        ["a", "", "x"],
    ),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/+'}}, ["a12"], ["a"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, ["a12"], ["a"]),
    ({"structured_outputs": {"structural_tag": TAGS}}, ["x <a>1</a>"], ["<a>x</a>"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, ["x"], ["<a>x</a>"]),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        ['{"a":1}'],
        ['{"a": 1}'],
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        ['{"a":1}', '{"a": 1}'],
        ['{"a":  1}'],
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        ['{"a":1}'],
        ['{"a":1,"b":2}'],
    ),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FITTING)
async def test_an_answer_fits_what_was_asked_for_and_nothing_else(pool, fields, good, bad):
    served = model()
    grammar = (await sampling_of(pool, served, **fields)).grammar
    assert [text for text in good if not fits(grammar, text, served)] == []
    assert [text for text in bad if fits(grammar, text, served)] == []


async def test_completions_take_the_same_fields(pool):
    body = {"prompt": "hi", "structured_outputs": {"choice": ["a", "b"]}}
    request = COMPLETION.decode(json.dumps(body).encode()).request
    served = model()
    plan = await plan_completion(request, context(pool, served))
    assert fits(plan.requests[0].sampling.grammar, "b", served)
    assert plan.requests[0].sampling.thinking is None


async def test_text_is_text(pool):
    assert (await sampling_of(pool, response_format={"type": "text"})).grammar == ""
    assert (await sampling_of(pool)).grammar == ""


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def schema_format(schema) -> dict:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    }


ROOT = "response_format.json_schema.schema"
REFUSED = [
    (schema_format({"type": "foo"}), ROOT, "foo"),
    (schema_format(False), ROOT, ""),
    (
        schema_format({"properties": {"a": {"items": {"not": {}}}}}),
        f"{ROOT}.properties.a.items",
        "not",
    ),
    (
        schema_format({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "(?=a)"}]}),
        f"{ROOT}.anyOf[1]",
        "look-ahead",
    ),
    (
        schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": True}}}),
        f"{ROOT}.$defs.a",
        "uniqueItems",
    ),
    (schema_format({"$ref": "#"}), ROOT, ""),
    (schema_format({"$ref": "http://example.com/schema"}), ROOT, ""),
    (
        schema_format({"type": "string", "x-guidance": {"lenient": True}, "format": "odd"}),
        ROOT,
        "odd",
    ),
    (schema_format(deep(150)), ROOT, ""),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    (schema_format(None), ROOT, "required"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "required"),
    (
        {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["<a", "<b", "<c"]}},
        "response_format.triggers[2]",
        "begins none",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["<a"]}},
        "response_format.structures[1].begin",
        "begins with none",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a{1000000}"}}, "structured_outputs.regex", "enforced"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "empty"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", ""),
    ({"structured_outputs": {"grammar": '{"grammars": []}'}}, "structured_outputs.grammar", ""),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "schema"),
    (
        {"structured_outputs": {"structural_tag": {"type": "x", "format": {}}}},
        "structured_outputs.structural_tag.structures",
        "",
    ),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "exclude",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "bad_words": ["x"]},
        "bad_words",
        "exclude",
    ),
]


@pytest.mark.parametrize(("fields", "param", "word"), REFUSED)
async def test_what_cannot_be_enforced_is_refused_by_its_place(pool, fields, param, word):
    error = await refusal(pool, **fields)
    assert error.param == param
    assert word in error.message
    assert len(error.message) < 800


HOSTILE = {
    "many values": schema_format({"enum": [f"{i} value" for i in range(30_000)]}),
    "many properties": schema_format({"properties": {f"p{i}": {} for i in range(9_000)}}),
    "a large divisor": schema_format({"type": "integer", "multipleOf": 10**9 + 7}),
    "many divisors": schema_format(
        {"anyOf": [{"type": "integer", "multipleOf": p} for p in range(49_900, 50_100)]}
    ),
    "branches of branches": schema_format(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(5)]} for i in range(9)
            ]
        }
    ),
    "a long pattern": schema_format({"type": "string", "pattern": "a" * 10**6}),
    "nested counts": {"structured_outputs": {"regex": r"(((\w{1,50}){1,50}){1,50}){1,50}"}},
    "brackets": {"structured_outputs": {"regex": "(" * 30_000 + ")" * 30_000}},
    "lark brackets": {"structured_outputs": {"grammar": "start: " + "(" * 90_000}},
    "a divisor in lark": {
        "structured_outputs": {
            "grammar": 'start: %json {"type":"integer","multiple\\u004ff": 1000000007}'
        }
    },
}


LONG = [f"<{number:03}{'-' * 500}" for number in range(128)]
HUGE: dict[str, Any] = {
    "triggers": {
        "type": "structural_tag",
        "triggers": LONG,
        "structures": [{"begin": begin, "schema": {}, "end": ">"} for begin in LONG],
    },
    "white space": {
        "type": "structural_tag",
        "triggers": ["<"],
        "structures": [{"begin": "<", "schema": {}, "end": ">"}] * 128,
    },
    "choices": {"choice": ["-" * 4000] * 1000},
    "a schema": {"json": {"enum": ["-" * 4_000_000]}, "disable_additional_properties": True},
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_too_large_is_refused_before_it_is_written_down(name):
    """A body of some hundred kilobytes may come to gigabytes otherwise."""
    fields: dict[str, Any] = HUGE[name]
    if "type" in fields:
        fields = {"structural_tag": fields, "whitespace_pattern": " " * 20_000}
    body: dict[str, Any] = HELLO | {"structured_outputs": fields}
    request = CHAT.decode(json.dumps(body).encode()).request
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="the limit is 262144"):
            grammar_source_of(request, model())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12e6


async def test_large_tools_are_read_in_a_thread(own_pool):
    values = [f"value {number}" for number in range(20_000)]
    parameters = {"properties": {"a": {"enum": values}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = await refusal(own_pool, caller(), tools=[tool], tool_choice="required", max_tokens=1)
    assert "come to a grammar" in error.message
    assert own_pool.stats().handed_over == 2  # the prompt is the other one


@pytest.mark.timeout(120)
@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_hostile_ends_soon_and_blocks_nobody(own_pool, name):
    """It is refused, or compiled within the bounds; the loop goes on meanwhile."""
    worst, done = 0.0, False

    async def watch() -> None:
        nonlocal worst
        while not done:
            before = time.monotonic()
            await asyncio.sleep(0.002)
            worst = max(worst, time.monotonic() - before)

    watching = asyncio.create_task(watch())
    body: dict[str, Any] = HELLO | HOSTILE[name]
    request = CHAT.decode(json.dumps(body).encode()).request
    (outcome,) = await asyncio.gather(plan_chat(request, context(own_pool)), return_exceptions=True)
    done = True
    await watching
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, InvalidRequest)
        assert str(outcome.param).startswith(("response_format", "structured_outputs"))
    assert worst < 2  # no measurement: a loop that waits would stand still for all of it


def test_a_process_that_somebody_kills_is_no_grammars_fault():
    """The next try, with the same grammar, has a process of its own."""
    process, served = GrammarCompiler(), model()
    source = from_schema({"type": "integer"}, "x")
    quick = from_regex("quick", "x")
    assert process.compile(served.tokenizer, served.card.vocab_size, quick)
    child = process._idle[0]._child
    assert child is not None
    os.kill(child._process.pid, signal.SIGSTOP)  # lest it be done before
    killer = threading.Timer(0.2, os.kill, (child._process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(Unavailable, match="try again"):
        process.compile(served.tokenizer, served.card.vocab_size, source)
    killer.join()
    assert process.known(served.tokenizer, served.card.vocab_size, source) is None
    assert process.killed == 0
    assert process.compile(served.tokenizer, served.card.vocab_size, source)
    process.close()


async def test_a_grammar_is_compiled_once(pool):
    fields = {"structured_outputs": {"regex": "once [a-z]+"}}
    await sampling_of(pool, **fields)
    handed_over = pool.stats().handed_over
    await sampling_of(pool, **fields)
    assert pool.stats().handed_over == handed_over + 1  # the field is read, not compiled


async def test_an_engine_without_grammars_is_promised_nothing(pool):
    served = model(features=("bans",))
    assert (await refusal(pool, served, response_format={"type": "json_object"})).param == (
        "response_format"
    )


# ---------------------------------------------------------------- tools and reasoning


def caller(**changes):
    return model(tool_parser="hermes", **changes)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, [CALL], ["hello", "{}"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            [CALL],
            ["hello"],
        ),
        ({"tools": [STRICT]}, [CALL, "hello"], [CALL.replace("Rome", "Bonn")]),
        ({"response_format": {"type": "json_object"}}, [CALL, '{"a":1}'], ["hello"]),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            [CALL],
            ['{"a":1}'],
        ),
        (
            {"tool_choice": "none", "response_format": {"type": "json_object"}},
            ['{"a":1}'],
            [CALL],
        ),
    ],
)
async def test_calls_are_enforced(pool, fields, good, bad):
    served = caller()
    grammar = (await sampling_of(pool, served, **({"tools": [TOOL]} | fields))).grammar
    assert [text for text in good if not fits(grammar, text, served)] == []
    assert [text for text in bad if fits(grammar, text, served)] == []


async def test_tools_that_may_be_called_leave_the_answer_free(pool):
    assert (await sampling_of(pool, caller(), tools=[TOOL])).grammar == ""


async def test_a_strict_tool_that_cannot_be_enforced_is_refused(pool):
    function = {**STRICT["function"], "parameters": {"type": "object", "not": {}}}
    error = await refusal(pool, caller(), tools=[{"type": "function", "function": function}])
    assert error.param == "tools[0].function.parameters"
    assert "%json" not in error.message


async def test_the_tool_whose_schema_is_wrong_is_named_with_the_place_in_it(pool):
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    function = {"name": "second", "strict": True, "parameters": bad}
    tools = [STRICT, {"type": "function", "function": function}]
    error = await refusal(pool, caller(), tools=tools)
    assert error.param == "tools[1].function.parameters.properties.a"
    lost = {"name": "lost", "parameters": {"$ref": "#/nowhere"}}
    many = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(40)]
    error = await refusal(pool, caller(), tools=[*many, tools[1]], tool_choice="required")
    assert error.param == "tools[40].function.parameters.properties.a"
    tools = [TOOL, {"type": "function", "function": lost}]
    error = await refusal(pool, caller(), tools=tools, tool_choice="required")
    assert error.param == "tools[1].function.parameters"
    assert "/nowhere" in error.message


async def test_the_reasoning_goes_before_the_grammar(pool):
    served = model(reasoning_parser="think")
    sampling = await sampling_of(pool, served, response_format={"type": "json_object"})
    think = reasoning_format("think")
    assert sampling.thinking is not None
    assert served.tokenizer.decode(sampling.thinking.start) == think.start
    assert served.tokenizer.decode(sampling.thinking.end) == think.end
    assert (sampling.thinking.begun, sampling.thinking.budget) == (False, None)


@pytest.mark.parametrize(
    ("fields", "marker"),
    [
        ({"tools": [TOOL]}, "<tool_call>"),
        ({"tools": [STRICT], "tool_choice": "required"}, "<tool_call>"),
        ({"tools": [TOOL], "tool_choice": "none"}, ""),
        ({}, ""),
    ],
)
async def test_the_marker_of_a_call_ends_the_reasoning_where_there_are_tools(pool, fields, marker):
    served = caller(reasoning_parser="think")
    thinking = (await sampling_of(pool, served, **fields)).thinking
    assert thinking is not None
    assert served.tokenizer.decode(thinking.call) == marker


async def test_a_bound_on_the_reasoning_reaches_the_engine(pool):
    opened = "{{ messages[0].content }}<think>\n"
    served = model(reasoning_parser="think", chat_template=opened)
    sampling = await sampling_of(pool, served, thinking_token_budget=7)
    assert sampling.thinking is not None
    assert (sampling.thinking.begun, sampling.thinking.budget) == (True, 7)
    lacking = model(reasoning_parser="think", features=())
    assert (await refusal(pool, lacking, thinking_token_budget=7)).param == "thinking_token_budget"
