import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.protocols import request_decoder
from pdserve.protocols.anthropic_messages import COUNT_TOKENS, MESSAGES
from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.request_decoder import CHAT, COMPLETION, MAX_STRUCTURE, MAX_VALUES, TOKENIZE
from pdserve.protocols.responses_api import RESPONSES

USER = {"role": "user", "content": "hi"}
GOOD = {"messages": [USER]}


def body(**fields):
    return json.dumps(GOOD | fields).encode()


def refused(raw, decoder=CHAT, strict=False):
    with pytest.raises(InvalidRequest) as caught:
        decoder.decode(raw, strict=strict)
    return caught.value


def test_every_field_of_the_contract_is_decoded():
    request = CHAT.decode(
        body(
            model="m",
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_tokens=5,
            max_completion_tokens=6,
            temperature=0,
            top_p=0.5,
            n=2,
            stop=["a", "b"],
            seed=-1,
            user="u",
            frequency_penalty=-2,
            presence_penalty=2,
            logit_bias={"5": -100},
            logprobs=True,
            top_logprobs=20,
            response_format={"type": "text"},
            top_k=-1,
            min_p=0.1,
            repetition_penalty=1.1,
            min_tokens=1,
            ignore_eos=True,
            stop_token_ids=[7],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            chat_template_kwargs={"a": [1]},
            add_generation_prompt=False,
            continue_final_message=True,
            add_special_tokens=True,
            priority=-3,
            request_id="r",
            cache_salt="s",
            return_token_ids=True,
        )
    ).request
    assert request.logit_bias == {5: -100.0}
    assert request.stop == ["a", "b"]
    assert request.stream_options is not None
    assert request.stream_options.continuous_usage_stats
    assert request.temperature == 0.0


def test_null_is_the_same_as_absent_for_every_optional_field():
    fields = {field for field in ChatRequest.__struct_fields__ if field != "messages"}
    decoded = CHAT.decode(body(**dict.fromkeys(fields)))
    assert decoded.request == CHAT.decode(body()).request
    assert decoded.unknown == []


def test_an_integer_may_be_written_with_a_point():
    """Where a language has one kind of number, 5 is sent as 5.0."""
    fields = {"max_tokens": 5.0, "seed": -3e2, "logit_bias": {"7": 1.0}, "temperature": 1.0}
    decoded = CHAT.decode(body(**fields, stop_token_ids=[4.0], color=2.0))
    request = decoded.request
    assert (request.max_tokens, request.seed, request.stop_token_ids) == (5, -300, [4])
    assert (request.logit_bias, request.temperature) == ({7: 1.0}, 1.0)
    assert decoded.unknown == ["color"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 2**70}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[*]"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {}}, "response_format.type"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"watermarking": True}, "watermarking"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"audio": {}}, "audio"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_a_bad_field_is_named_with_its_path(fields, param):
    error = refused(body(**fields))
    assert error.param == param
    assert param.split("[")[0] in error.message
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "1"}, "'temperature': expected number | null, got string"),
        ({"n": True}, "'n': expected integer | null, got boolean"),
        ({"stop": [1]}, "'stop[0]': expected string, got integer"),
        ({"top_p": 0}, "'top_p': expected number > 0.0"),
        ({"logit_bias": {"x": 1}}, "'logit_bias', in the key 'x': expected integer, got string"),
        ({"logit_bias": {"-1": 1}}, "'logit_bias', in the key '-1': expected integer >= 0"),
        (
            {"logit_bias": {"9999999999": 1}},
            "'logit_bias', in a key: expected integer <= 2147483647",
        ),
        ({"top_k": 1.5}, "'top_k': expected integer | null, got number"),
        ({"top_k": 5.0, "n": "1"}, "'n': expected integer | null, got string"),
        ({"top_k": -5.0}, "'top_k': expected integer >= -1"),
        ({"top_k": 1e300}, "'top_k': expected integer | null, got number"),
        ({"logit_bias": {"1": "a"}}, "'logit_bias[*]': expected number, got string"),
    ],
)
def test_a_bad_field_is_described_in_jsons_words(fields, message):
    assert refused(body(**fields)).message == message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \n", "the body is empty; send a JSON object"),
        (b"\xef\xbb\xbf" + body(), "begins with a byte order mark; send UTF-8 without one"),
        (b"{", "not valid JSON"),
        (b'{"messages": [{"role": "user"}] x', "not valid JSON"),
        (b"[]", "expected object"),
        (b"null", "expected object"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "UTF-8"),
        (b'{"messages": [{"role": "user"}], "x": "\xff"}', "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\udc00x"}]}', "surrogate"),
        (b'{"messages": [{"role": "user"}], "x": "\\ud800\\u0041"}', "surrogate"),
        (b'{"messages": [{"role": "user"}], "temperature": NaN}', "NaN"),
        (b'{"messages": [{"role": "user"}], "temperature": -Infinity}', "-Infinity"),
        (b'{"messages": [{"role": "user"}], "seed": 1, "seed": 1}', "'seed' appears twice"),
        (b'{"messages": [{"role": "user", "role": "user"}]}', "'role' appears twice"),
        (b'{"messages": [{"role": "user"}], "x": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"messages": [{"role": "user"}], "temperature": 1e999}', "out of range"),
        (b'{"messages": [{"role": "user"}], "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "deep"),
        (b'{"messages": [{"role": "user"}], "chat_template_kwargs": ' + b'{"a":' * 50_000, "deep"),
    ],
)
def test_what_is_not_json_is_said_in_words(raw, words):
    assert words in refused(raw).message


MANY = MAX_STRUCTURE + 10


@pytest.mark.parametrize(
    "part",
    [
        '"x": [' + "[]," * MANY + "[]]",
        '"chat_template_kwargs": {"a": [' + "{}," * MANY + "{}]}",
        ",".join(f'"k{number}": 0' for number in range(MANY)),
        '"x": [' + "1," * (MAX_VALUES + 1) + "1]",
    ],
)
def test_a_body_of_too_many_small_values_is_refused(part):
    raw = b'{"messages": [{"role": "user"}], ' + part.encode() + b"}"
    assert "send less" in refused(raw).message


def test_structure_inside_strings_does_not_count():
    text = '{"a": [1, 2], "b\\\\": {}}' * MAX_STRUCTURE
    decoded = CHAT.decode(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    assert decoded.request.messages[0].content == text


def test_an_endless_string_is_looked_through_once():
    raw = b'{"x": "' + b"\\a" * (1 << 22) + b":" * MANY
    assert "not valid JSON" in refused(raw).message or "send less" in refused(raw).message


def test_an_endless_string_of_escaped_quotes_is_looked_through_once():
    """Quadratic work would take days."""
    raw = b"{" * MANY + b'"' + b'\\"' * (1 << 22)
    assert "send less" in refused(raw).message


class Pieces:
    """A pattern that remembers how many bytes it was given at once."""

    def __init__(self, pattern):
        self._pattern = pattern
        self.largest = 0

    def sub(self, by, data):
        self.largest = max(self.largest, len(data))
        return self._pattern.sub(by, data)


def test_strings_are_looked_through_in_small_pieces(monkeypatch):
    """No other thread runs during one call of a regular expression, the event loop's neither."""
    pieces = Pieces(request_decoder._STRINGS)
    monkeypatch.setattr(request_decoder, "_STRINGS", pieces)
    raw = b'{"messages": [{"role": "user"}], "x": [' + b'"{",' * MANY + b'""]}'
    assert CHAT.decode(raw).unknown == ["x"]
    assert pieces.largest <= 64 * 1024


@pytest.mark.parametrize("number", ["1.5", "1e5", "1" * 4000])
def test_what_makes_many_numbers_lets_other_threads_run(number):
    """They get their turn when a function written in Python begins."""
    begun = []
    raw = f'{{"messages": [{{"role": "user"}}], "x": [{number}, "{"a" * MAX_STRUCTURE}"]}}'
    sys.setprofile(lambda frame, event, arg: begun.append(frame.f_code.co_name))
    try:
        CHAT.decode(raw.encode())
    finally:
        sys.setprofile(None)
    assert {"_float", "_int"} & set(begun)


def test_many_small_integers_let_other_threads_run_too(monkeypatch):
    monkeypatch.setattr(request_decoder, "_MANY_VALUES", 100)
    calls: list[str] = []

    def parse(text: str) -> int:
        calls.append(text)
        return int(text)

    monkeypatch.setattr(request_decoder, "_LONG", request_decoder._decoder(float, parse))
    numbers = ", ".join(["7"] * 102)
    padding = "a" * MAX_STRUCTURE
    CHAT.decode(
        f'{{"messages": [{{"role": "user"}}], "x": [{numbers}], "y": "{padding}"}}'.encode()
    )
    assert len(calls) == 102


def test_a_long_number_is_found_wherever_it_stands():
    """Also where two slices meet; other threads run between the slices."""
    size = request_decoder._AT_ONCE
    for at in (0, size - 64, size - 63, size - 1, size, 2 * size):
        assert request_decoder._has_slow_numbers(b" " * at + b"1234567890123456" * 4), at
    assert not request_decoder._has_slow_numbers(b" " * (size - 30) + b"9" * 63 + b"a" + b"9" * 63)


def test_unknown_fields_are_listed_and_harmless_ones_are_not():
    decoded = CHAT.decode(body(temprature=1, store=True, metadata={"a": "b"}, zzz=None))
    assert decoded.unknown == ["temprature", "zzz"]


def test_strict_refuses_unknown_fields_with_the_nearest_name():
    error = refused(body(temprature=1), strict=True)
    assert error.param == "temprature"
    assert "did you mean 'temperature'?" in error.message
    assert "leave it out" in refused(body(qqqqqq=1), strict=True).message


def test_a_misspelt_stream_option_is_unknown_too():
    """It would be a stream without the usage that was asked for."""
    options = {"include_usages": True, "include_obfuscation": False, "include_usage": True}
    wrong = body(stream=True, stream_options=options)
    assert CHAT.decode(wrong).unknown == ["stream_options.include_usages"]
    error = refused(wrong, strict=True)
    assert error.param == "stream_options.include_usages"
    assert "did you mean 'stream_options.include_usage'?" in error.message


def test_a_field_without_effect_may_be_long():
    assert CHAT.decode(body(user="u" * 5000)).request.user == "u" * 5000


def test_strict_takes_what_is_known():
    assert CHAT.decode(body(store=True, tools=None, temperature=1), strict=True).unknown == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"modalities": ["text"]},
        {"stream_interval": 1},
    ],
)
def test_a_refused_field_that_asks_for_nothing_is_accepted(fields):
    assert CHAT.decode(body(**fields)).unknown == []


ASKED = (
    '"max_tokens": 1, "input": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}]'
)
"""Each API finds in it what it needs."""


@pytest.mark.parametrize(
    "field",
    [
        *(
            '"grammar": "root ::= 1"',
            '"json_schema": {}',
            '"lora_path": "a"',
            '"lora": [{"id": 0}]',
        ),
        *('"min_new_tokens": 5', '"typical_p": 0.5', '"mirostat": 2', '"guided_json": {}'),
    ],
)
def test_what_asks_another_server_for_another_answer_is_refused_everywhere(field):
    for decoder in (CHAT, COMPLETION, RESPONSES, MESSAGES, COUNT_TOKENS):
        error = refused(f"{{{field}, {ASKED}}}".encode(), decoder)
        assert f'"{error.param}"' in field
        assert re.search("use |merge", error.message)


def test_what_asks_another_server_for_nothing_is_accepted():
    fields = {"grammar": "", "lora": [], "min_new_tokens": 0, "typical_p": 1.0, "mirostat": 0}
    assert CHAT.decode(body(**fields, json_schema=None)).unknown == []


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "lora_path", "reasoning_effort"])
def test_a_prompt_that_would_be_another_is_not_counted(field):
    assert refused(json.dumps({"prompt": "a", field: 5}).encode(), TOKENIZE).param == field


@pytest.mark.parametrize("field", ["enable_thinking", "thinking"])
def test_each_api_has_its_own_word_for_thinking(field):
    asked = json.dumps({"input": "a", field: False}).encode()
    assert "reasoning.effort" in refused(asked, RESPONSES).message


def test_a_neutral_value_of_another_type_is_not_neutral():
    assert refused(body(use_beam_search=0)).param == "use_beam_search"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_all_four_forms_of_a_prompt_are_decoded(prompt):
    raw = json.dumps({"prompt": prompt}).encode()
    assert COMPLETION.decode(raw).request.prompt == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(fields, param):
    assert refused(json.dumps(fields).encode(), COMPLETION).param == param


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
NAMES = st.sampled_from([*ChatRequest.__struct_fields__, "tools", "store", "nobody"])


@given(st.dictionaries(NAMES, JSON), st.booleans(), st.booleans())
def test_any_json_object_is_decoded_or_refused(fields, ascii_only, strict):
    text = json.dumps(fields, ensure_ascii=ascii_only)
    raw = text.encode("utf-8", "surrogatepass")
    try:
        CHAT.decode(raw, strict=strict)
    except InvalidRequest as error:
        json.dumps([error.message, error.param]).encode()


@given(st.binary())
def test_any_bytes_are_decoded_or_refused(raw):
    assert refused(raw).message


@given(JSON)
def test_good_requests_stay_good_whatever_unknown_fields_say(value):
    text = json.dumps(GOOD | {"nobody": value})
    plain = "\\ud" not in text and not any(word in text for word in ("NaN", "Infinity"))
    if plain:
        assert CHAT.decode(text.encode()).unknown == ["nobody"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "x"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "function"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "function"),
        ({"response_format": {"type": "x"}}, "response_format.type", "text, json_object"),
        ({"reasoning_effort": "x"}, "reasoning_effort", "none, minimal, low"),
        ({"messages": [USER, {"role": "x"}]}, "messages[1].role", "system, developer"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_ones(fields, param, words):
    error = refused(body(**fields))
    assert error.param == param
    told = error.message.partition("expected one of ")[2].split(", ")
    assert set(words.split(", ")) <= set(told)
