import json
from typing import Any

import msgspec
import pytest

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.access.api_keys import ApiKey
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.preprocess.input_processor import (
    PlanContext,
    chat_tokens,
    plan_chat,
    plan_completion,
    prompt_list,
)
from pdserve.protocols.completion_requests import Message, TokenizeRequest
from pdserve.protocols.request_decoder import CHAT, COMPLETION
from pdserve.text.text_pool import TextPool
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.frontend.support import HELLO, TOKENIZER, card, tokens


@pytest.fixture
async def pool():
    pool = TextPool()
    yield pool
    await pool.close()


def context(pool, key=None, model=None, **config: Any):
    return PlanContext(
        model=PreparedModel.from_card(model or card()),
        config=FrontendConfig(**config),
        pool=pool,
        request_id="req-1",
        key=key,
        deadline=60.0,
    )


def chat(**fields):
    return CHAT.decode(json.dumps(HELLO | fields).encode()).request


def completion(**fields):
    return COMPLETION.decode(json.dumps(fields).encode()).request


def prompt_text(plan):
    return TOKENIZER.decode(plan.prompts[0].tokens, skip_special_tokens=False)


async def refused(coroutine):
    with pytest.raises(InvalidRequest) as caught:
        await coroutine
    return caught.value


async def test_the_template_writes_the_prompt_with_its_special_tokens(pool):
    plan = await plan_chat(chat(), context(pool))
    assert prompt_text(plan) == "<s>user: hello</s><s>assistant: "
    assert plan.prompts[0].tokens[0] == 0
    assert plan.answer_id == "chatcmpl-req-1"
    (request,) = plan.requests
    assert (request.request_id, request.deadline, request.n) == ("req-1", 60.0, 1)


async def test_parts_roles_and_template_arguments_reach_the_template(pool):
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": "c", "name": "bot"},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    plan = await plan_chat(chat(messages=messages, add_generation_prompt=False), context(pool))
    assert prompt_text(plan) == "<s>system: a\nb</s><s>assistant: c</s><s>tool: d</s>"
    named = card(chat_template="{{ greeting }}{{ messages[0].content }}")
    plan = await plan_chat(
        chat(chat_template_kwargs={"greeting": "hi "}), context(pool, model=named)
    )
    assert prompt_text(plan) == "hi hello"


async def test_a_final_message_can_be_continued(pool):
    messages = [*HELLO["messages"], {"role": "assistant", "content": "I think"}]
    plan = await plan_chat(chat(messages=messages, continue_final_message=True), context(pool))
    assert prompt_text(plan).endswith("<s>assistant: I think")
    assert plan.continues_text


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
async def test_a_message_without_content_is_refused_and_an_empty_one_is_not(pool, role):
    """Left out or misspelt, it would be answered as if nothing had been said."""
    for message in ({"role": role}, {"role": role, "content": None}):
        error = await refused(
            plan_chat(chat(messages=[*HELLO["messages"], message]), context(pool))
        )
        assert (error.param, error.message) == (
            "messages[1].content",
            "'messages[1].content' is required",
        )
    await plan_chat(chat(messages=[{"role": role, "content": ""}]), context(pool))


async def test_an_assistants_message_may_be_without_content(pool):
    call = {"function": {"name": "f", "arguments": "{}"}}
    for message in ({"role": "assistant"}, {"role": "assistant", "tool_calls": [call]}):
        await plan_chat(chat(messages=[*HELLO["messages"], message]), context(pool))


async def test_what_a_template_cannot_take_is_the_requests_fault(pool):
    sound = [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]
    error = await refused(plan_chat(chat(messages=sound), context(pool)))
    assert error.param == "messages[0].content[0].type"
    none = context(pool, model=card(chat_template=None))
    assert "no chat template" in (await refused(plan_chat(chat(), none))).message


async def test_an_empty_prompt_is_refused(pool):
    nothing = context(pool, model=card(chat_template="{% if x %}x{% endif %}"))
    error = await refused(plan_chat(chat(), nothing))
    assert error.param == "messages"
    assert error.message == "the chat template writes nothing for these 'messages'"
    assert (await refused(plan_completion(completion(prompt=""), context(pool)))).param == "prompt"


async def test_a_template_in_the_request_is_refused_unless_trusted(pool):
    request = chat(chat_template="{{ messages[0].content }}!")
    assert (await refused(plan_chat(request, context(pool)))).param == "chat_template"
    trusted = context(pool, trust_request_chat_template=True)
    assert prompt_text(await plan_chat(request, trusted)) == "hello!"
    loop = chat(chat_template="{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}")
    assert (await refused(plan_chat(loop, trusted))).http_status == 400
    broken = chat(chat_template="{% for")
    assert "does not compile" in (await refused(plan_chat(broken, trusted))).message


async def test_a_template_of_the_model_is_chosen_by_name_without_trust(pool):
    named = [{"name": "short", "template": "{{ messages[0].content }}?"}]
    config = json.dumps({"chat_template": named}).encode()
    model = card(tokenizer_config_json=config)
    plan = await plan_chat(chat(chat_template="short"), context(pool, model=model))
    assert prompt_text(plan) == "hello?"


async def test_a_trusted_template_that_never_ends_is_refused(pool):
    endless = "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}"
    endless += "{% endfor %}{{ n.x }}"
    trusted = context(pool, trust_request_chat_template=True)
    error = await refused(plan_chat(chat(chat_template=endless), trusted))
    assert error.param == "chat_template"
    assert "takes over" in error.message


async def test_a_model_with_several_templates_can_be_asked_for_one_by_name(pool):
    config = json.dumps(
        {"chat_template": [{"name": "rag", "template": "rag:{{ messages[0].content }}"}]}
    )
    several = context(pool, model=card(tokenizer_config_json=config.encode()))
    assert prompt_text(await plan_chat(chat(chat_template="rag"), several)) == "rag:hello"
    assert prompt_text(await plan_chat(chat(), several)).startswith("<s>user")
    assert (await refused(plan_chat(chat(chat_template="rog"), several))).param == "chat_template"


async def test_structure_is_refused_where_the_engine_follows_no_grammar(pool):
    request = chat(response_format={"type": "json_object"})
    assert (await refused(plan_chat(request, context(pool)))).param == "response_format"


async def test_stream_options_need_a_stream(pool):
    request = chat(stream_options={"include_usage": True})
    assert (await refused(plan_chat(request, context(pool)))).param == "stream_options"


async def test_every_prompt_is_a_submission_with_its_index(pool):
    plan = await plan_completion(completion(prompt=["a", "bc"], n=2), context(pool))
    assert [request.prompt_index for request in plan.requests] == [0, 1]
    assert [request.prompt.tolist() for request in plan.requests] == [tokens("a"), tokens("bc")]
    assert len({request.sampling.seed for request in plan.requests}) == 1
    assert {request.n for request in plan.requests} == {2}


async def test_token_ids_are_taken_as_they_are(pool):
    plan = await plan_completion(completion(prompt=[5, 6]), context(pool))
    assert [prompt.tokens.tolist() for prompt in plan.prompts] == [[5, 6]]
    plan = await plan_completion(completion(prompt=[[5], [6]], echo=True), context(pool))
    assert [prompt.echo for prompt in plan.prompts] == [
        TOKENIZER.decode([5]),
        TOKENIZER.decode([6]),
    ]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([["a"]], None),
        ([5, 10_000], "prompt[1]"),
        ([[5], [6, 10_000]], "prompt[1][1]"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([5, "a"], "prompt[0]"),
        ([[5], "a"], "prompt[1]"),
    ],
)
async def test_a_bad_prompt_is_named_with_its_place(pool, prompt, param):
    if param is None:
        with pytest.raises(InvalidRequest):
            completion(prompt=prompt)
        return
    error = await refused(plan_completion(completion(prompt=prompt), context(pool)))
    assert error.param == param


@pytest.mark.parametrize("chars", [300_000, 8_000_000])
async def test_a_text_that_cannot_fit_is_refused_without_being_encoded(pool, chars, monkeypatch):
    long = "x " * (chars // 2)
    given = context(pool)
    await plan_chat(chat(), given)
    monkeypatch.setattr(Tokenizer, "encode_batch", None)  # would be called
    error = await refused(plan_completion(completion(prompt=["a", long]), given))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt[1]")
    assert f"{chars} characters" in error.message
    error = await refused(plan_completion(completion(prompt=long), given))
    assert error.param == "prompt"
    error = await refused(plan_chat(chat(messages=[{"role": "user", "content": long}]), given))
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


async def test_counting_the_tokens_of_a_long_chat_is_not_refused(pool):
    request = TokenizeRequest(messages=[Message(role="user", content="x " * 150_000)])
    assert len(await chat_tokens(request, context(pool))) > 150_000


async def test_prompts_and_choices_are_bounded(pool):
    many = completion(prompt=["a"] * 5)
    assert (await refused(plan_completion(many, context(pool, max_prompts=4)))).param == "prompt"
    assert (await refused(plan_completion(many, context(pool, max_choices=4)))).param == "n"


async def test_logprobs_of_many_prompts_are_counted_together(pool):
    echo = {"echo": True, "logprobs": 20, "n": 16, "prompt": [[5] * 250] * 8}
    error = await refused(plan_completion(completion(**echo), context(pool, max_choices=128)))
    assert error.param == "logprobs"
    one = completion(**echo | {"prompt": [5] * 250})
    assert (await plan_completion(one, context(pool))).n == 16


async def test_a_tenant_with_isolation_gets_its_own_salt(pool):
    key = ApiKey(digest=b"", tenant="t", cache_isolation=True)
    plan = await plan_chat(chat(cache_salt="mine"), context(pool, key))
    assert plan.requests[0].cache_salt == "tenant:t\0mine"
    plan = await plan_chat(chat(cache_salt="mine", priority=3), context(pool))
    assert (plan.requests[0].cache_salt, plan.requests[0].priority) == ("salt:mine", 3)


async def test_every_prompt_takes_the_wish_to_its_worker(pool):
    plan = await plan_chat(chat(cache_ttl=60, cache_scope="shared"), context(pool))
    assert [(one.cache_ttl, one.cache_scope) for one in plan.requests] == [(60.0, "shared")]
    asked = completion(prompt=["a", "b"], prompt_cache_retention="24h")
    plan = await plan_completion(asked, context(pool))
    assert [one.cache_ttl for one in plan.requests] == [86400.0, 86400.0]
    plan = await plan_chat(chat(), context(pool))
    assert (plan.requests[0].cache_ttl, plan.requests[0].cache_scope) == (0.0, "")


async def test_what_one_tenant_sent_is_tokenised_anew_for_another(pool, monkeypatch):
    """The time that it takes would tell that somebody had sent it."""
    monkeypatch.setattr("pdserve.accel.NATIVE", False)
    served = PreparedModel.from_card(card())
    segments = served.tokenizer.segments
    assert segments is not None
    long = chat(messages=[{"role": "user", "content": "a long text " * 20}])
    keys = [
        ApiKey(digest=b"1", tenant="a"),
        ApiKey(digest=b"2", tenant="b"),
        ApiKey(digest=b"3", tenant="c", cache_isolation=False),
        ApiKey(digest=b"4", tenant="d", cache_isolation=False),
    ]
    hits = []
    for key in (*keys, *keys):
        before = segments.hits
        await plan_chat(long, msgspec.structs.replace(context(pool, key), model=served))
        hits.append(segments.hits > before)
    assert hits == [False, False, False, True, True, True, True, True]


@pytest.mark.parametrize("kind", ["chat", "completion", "tokenize"])
async def test_a_text_that_cannot_fit_is_never_encoded_as_a_whole(kind, pool, monkeypatch):
    """Tokenizers need 150 bytes a character, whatever becomes of the text."""
    monkeypatch.setattr("pdserve.frontend.preprocess.input_processor._MAX_CHARS", 20_000)
    monkeypatch.setattr("pdserve.text.tokenization.tokenizer._SLICE_CHARS", 5000)
    monkeypatch.setattr(Tokenizer, "fewest_tokens", lambda self, chars: 0)  # nothing is certain
    given, encode = [], Tokenizer._encode_at_once

    def watch(self, texts, add_special_tokens):
        given.append(sum(map(len, texts)))
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode_at_once", watch)
    text = "some words " * 20_000
    messages = [{"role": "user", "content": text}]
    if kind == "chat":
        error = await refused(plan_chat(chat(messages=messages), context(pool)))
    elif kind == "completion":
        error = await refused(plan_completion(completion(prompt=["a", text]), context(pool)))
    else:
        request = TokenizeRequest(messages=[Message(role="user", content=text)])
        error = await refused(chat_tokens(request, context(pool)))
    assert error.param == {"chat": "messages", "completion": "prompt[1]"}.get(kind, "messages")
    assert sum(given) <= 25_000
    assert max(given, default=0) <= 5000


async def test_long_text_leaves_the_event_loop(pool, monkeypatch):
    """Here that of `tokenizers`; `test_text_cost.py` has the extension's."""
    monkeypatch.setattr(Tokenizer, "is_fast", False)
    await plan_chat(chat(), context(pool))
    assert pool.stats().handed_over == 0
    await plan_chat(chat(messages=[{"role": "user", "content": "x " * 3000}]), context(pool))
    assert pool.stats().handed_over == 1
    many = chat(messages=[{"role": "user", "content": ""}] * 200)
    await plan_chat(many, context(pool))
    assert pool.stats().handed_over == 2


def test_the_four_forms_become_lists():
    assert prompt_list("a") == ["a"]
    assert prompt_list(["a", "b"]) == ["a", "b"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], [2]]) == [[1], [2]]


async def test_too_many_ids_are_refused_before_they_are_looked_at(pool, monkeypatch):
    monkeypatch.setattr("pdserve.frontend.preprocess.input_processor.prompt_list", None)
    for count in (card().max_model_len, 100_000):
        error = await refused(
            plan_completion(completion(model="m", prompt=[5] * count), context(pool))
        )
        assert isinstance(error, ContextLengthExceeded)
        assert (error.param, str(count) in error.message) == ("prompt", True)


async def test_ids_that_are_cut_may_be_more_than_the_context(pool):
    request = completion(model="m", prompt=[5] * 100_000, truncate_prompt_tokens=3)
    plan = await plan_completion(request, context(pool))
    assert plan.prompts[0].tokens.tolist() == [5, 5, 5]
