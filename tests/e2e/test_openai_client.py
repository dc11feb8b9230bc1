"""The official client against a real process: what users of the OpenAI API rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.e2e.openai_client import client_of
from tests.e2e.server import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = [{"role": "user", "content": "hello there"}]
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """One server for all of this module."""
    with serving(tiny_model, "--served-model-name", "tiny,default", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


def chat(client, **fields):
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(**fields)


def complete(client, **fields):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields
    return client.completions.create(**fields)


def joined(stream):
    """(text per choice, finish reason per choice, usage) of a chat stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    with stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


# ---------------------------------------------------------------------- chat


def test_a_chat_answers_with_text_reason_and_usage(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_carries_the_same_text_and_its_usage_on_request(client):
    whole = chat(client)
    texts, reasons, usage = joined(
        chat(client, stream=True, stream_options={"include_usage": True})
    )
    assert texts == {0: whole.choices[0].message.content}
    assert reasons == {0: "length"}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_stream_has_no_usage_unless_asked(client):
    assert joined(chat(client, stream=True))[2] is None


def test_several_choices_differ_and_each_one_ends(client):
    answer = chat(client, n=3, temperature=1.0, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    texts, reasons, _ = joined(chat(client, n=3, temperature=1.0, seed=3, stream=True))
    assert texts == {choice.index: choice.message.content for choice in answer.choices}
    assert reasons == dict.fromkeys(range(3), "length")


def test_the_same_seed_gives_the_same_answer_and_another_one_another(client):
    first, again, other = (
        chat(client, temperature=1.0, seed=seed).choices[0].message.content for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_logprobs_come_with_alternatives_in_order(client):
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        ranked = [alternative.logprob for alternative in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert entry.logprob == pytest.approx(ranked[0])  # greedy takes the likeliest
    joined_bytes = b"".join(bytes(entry.bytes) for entry in content)
    assert joined_bytes.decode(errors="replace").startswith(answer.choices[0].message.content[:4])


def test_a_stop_string_ends_the_answer_before_it(client):
    text = chat(client, max_tokens=24).choices[0].message.content
    stop = text[4:7]
    before = text[: text.index(stop)]
    answer = chat(client, max_tokens=24, stop=[stop])
    assert answer.choices[0].message.content == before
    assert answer.choices[0].finish_reason == "stop"
    texts, reasons, _ = joined(chat(client, max_tokens=24, stop=[stop], stream=True))
    assert (texts, reasons) == ({0: before}, {0: "stop"})


def test_logit_bias_can_force_a_token(client):
    banned = complete(client, max_tokens=1, logprobs=1)
    forced = complete(client, max_tokens=3, logit_bias={"300": 100})
    assert forced.choices[0].text != banned.choices[0].text
    again = complete(client, max_tokens=3, logit_bias={"300": 100}, temperature=1.0)
    assert again.choices[0].text == forced.choices[0].text


def test_max_completion_tokens_means_max_tokens(client):
    answer = chat(client, max_tokens=None, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_a_repeated_prompt_is_taken_from_the_prefix_cache(client):
    prompt = "A long beginning that repeats. " * 20
    first = complete(client, prompt=prompt, max_tokens=4)
    again = complete(client, prompt=prompt, max_tokens=4)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_every_answer_has_an_id_and_a_caller_may_choose_it(client):
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"


# ---------------------------------------------------------------------- completions


def test_every_form_of_a_prompt_is_taken(client, server):
    ids = server.post("/tokenize", {"model": "tiny", "prompt": PROMPT})["tokens"]
    text = complete(client, prompt=PROMPT).choices[0].text
    assert complete(client, prompt=[PROMPT]).choices[0].text == text
    assert complete(client, prompt=ids).choices[0].text == text
    several = complete(client, prompt=[ids, ids])
    assert [choice.text for choice in several.choices] == [text, text]
    strings = complete(client, prompt=[PROMPT, "another", PROMPT])
    assert [choice.index for choice in strings.choices] == [0, 1, 2]
    assert strings.choices[0].text == strings.choices[2].text == text
    assert strings.usage.completion_tokens == 36


def test_echo_repeats_the_prompt(client):
    plain = complete(client).choices[0].text
    echoed = complete(client, echo=True)
    assert echoed.choices[0].text == PROMPT + plain


def test_echo_with_logprobs_scores_the_prompt(client):
    answer = complete(client, echo=True, max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens).startswith(PROMPT)
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.tokens) == answer.usage.total_tokens


def test_a_completion_streams(client):
    whole = complete(client).choices[0].text
    with complete(client, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


# ---------------------------------------------------------------------- models and errors


def test_models_and_aliases_are_listed_and_answer(client):
    assert {model.id for model in client.models.list()} == {"tiny", "default"}
    assert client.models.retrieve("default").id == "default"
    assert chat(client, model="default").choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"top_logprobs": 3}, openai.BadRequestError, "logprobs"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, openai.BadRequestError, "2048"),
    ],
)
def test_a_mistake_is_the_exception_that_openai_raises_for_it(client, fields, error, says):
    with pytest.raises(error) as caught:
        chat(client, **fields)
    assert says in caught.value.message
    assert caught.value.body["message"]


def test_a_route_that_does_not_exist_is_a_404_in_openais_shape(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.moderations.create(input="x")
    assert caught.value.type == "not_found_error"


def test_too_long_a_prompt_says_so_by_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"


# ---------------------------------------------------------------------- afterwards


def test_when_all_is_answered_no_block_is_held(server, client):
    for _ in range(2):
        complete(client, prompt="What is counted here is asked here. " * 20, max_tokens=60)
    server.wait_for_metric("pdserve_kv_blocks_used", 0)
    assert server.metric("pdserve_num_requests_running") == 0
    assert server.metric("pdserve_http_requests_in_flight") == 0
    assert server.metric("pdserve_generation_tokens_total") > 100
    assert server.metric("pdserve_cached_prompt_tokens_total") >= 32


def test_health_is_good_and_the_loop_was_never_blocked(server):
    status, health = server.get("/health")
    assert (status, health["status"]) == (200, "ok")
    # A machine that is busy elsewhere delays every loop now and then, so the lag says little here:
    # what would block this one for long is not even in its process.
    assert server.metric("pdserve_event_loop_lag_max_seconds") < 5.0 + server.starved()
    assert not uses_torch(psutil.Process(server.process.pid))
    assert uses_torch(server.core())


def uses_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def test_texts_are_scored_as_lm_eval_asks(client, tiny_model):
    """Its whole request, and what it makes of the answer: token ids in batches, echoed with their
    logprobs; the sum from the context's end to the last token but one, which is the generated one.
    """
    config = transformers.LlamaConfig.from_pretrained(str(tiny_model))
    model: Any = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(load_file(tiny_model / "model.safetensors"))
    texts, contexts = [[5, 60, 70, 80, 90], [7, 60, 61], [100, 99, 98, 97, 96, 95]], [2, 1, 5]
    answer = client.post(
        "/completions",
        cast_to=dict[str, Any],
        body={
            "model": "tiny",
            "prompt": texts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    )
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for ids, context, choice in zip(texts, contexts, choices, strict=True):
        told = choice["logprobs"]
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[context - 1 : -1]
        own = rows.gather(1, torch.tensor(ids[context:]).unsqueeze(1))
        assert sum(told["token_logprobs"][context:-1]) == pytest.approx(float(own.sum()), abs=1e-3)
        greedy = [
            score == max(top.values())
            for score, top in zip(
                told["token_logprobs"][context:-1], told["top_logprobs"][context:-1], strict=True
            )
        ]
        assert greedy == (own.squeeze(1) == rows.amax(-1)).tolist()


def test_what_may_be_said_is_the_callers_to_choose(client):
    """By the engine itself: of two tokens one is said, until a bad word leaves but the other."""
    allowed = {"allowed_token_ids": [70, 80], "return_token_ids": True}
    (choice,) = complete(client, extra_body=allowed).choices
    assert set(choice.token_ids) <= {70, 80}
    both = allowed | {"bad_words": [choice.text[:1]], "logprob_token_ids": [5, 6]}
    (other,) = complete(client, extra_body=both, logprobs=0).choices
    first, second = choice.token_ids[0], other.token_ids[0]
    assert {first, second} == {70, 80}
    assert set(other.token_ids) == {second}
    assert all(len(top) == 3 for top in other.logprobs.top_logprobs)  # the two, and what was said


def test_a_prompt_is_scored_beside_the_answer_as_an_echo_scores_it(client):
    (echoed,) = complete(client, echo=True, logprobs=0).choices
    (scored,) = complete(client, extra_body={"prompt_logprobs": 0}).choices
    first, *rest = scored.prompt_logprobs
    assert first is None
    told = [entry["logprob"] for scores in rest for entry in scores.values()]
    assert told == echoed.logprobs.token_logprobs[1 : len(rest) + 1]
