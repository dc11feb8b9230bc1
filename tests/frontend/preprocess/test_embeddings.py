"""`/v1/embeddings`: what is asked of engines, what a client gets, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import Overloaded, StepFailed
from pdserve.frontend.output.embedding_format import EmbeddingFormat
from pdserve.frontend.preprocess.embeddings import truncate_input
from pdserve.protocols.embeddings import MAX_INPUTS
from pdserve.testing.sinks import until
from pdserve.token_ids import token_ids
from tests.frontend.support import MODEL, Client, card, frontend, tokens
from tests.support.fake_backend import Script
from tests.text import builders

if TYPE_CHECKING:
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import GenerateRequest

SIZE = 4
PATH = "/v1/embeddings"


def vector(request: GenerateRequest) -> bytes:
    """Tells prompts apart: their first, second and last token, and their length."""
    prompt = request.prompt
    return struct.pack("<4f", prompt[0], prompt[min(1, len(prompt) - 1)], prompt[-1], len(prompt))


def numbers(prompt: list[int]) -> list[float]:
    return [prompt[0], prompt[min(1, len(prompt) - 1)], prompt[-1], len(prompt)]


def embedder(**changes: Any) -> ModelCard:
    makes: dict[str, Any] = {
        "pooling": "last",
        "embedding_size": SIZE,
        "features": ("embeddings",),
        "max_model_len": 64,
    }
    return card(**makes | changes)


def serving(script: Script | Any = None, models: Any = None, **config: Any) -> Any:
    served = {MODEL: embedder()} if models is None else models
    return frontend(script or Script(vector=vector), served, **config)


async def embed(client: Client, given: Any, **fields: Any) -> Any:
    status, _, answer = await client.post(PATH, {"input": given} | fields)
    assert status == 200, answer
    return answer


async def refused(client: Client, given: Any, status: int = 400, **fields: Any) -> Any:
    found, _, answer = await client.post(PATH, {"input": given} | fields)
    assert found == status, answer
    return answer["error"]


async def test_a_text_becomes_a_vector_and_its_tokens_are_counted() -> None:
    async with serving(Script(vector=vector, cached_tokens=2)) as client:
        answer = await embed(client, "hello", model=MODEL)
        prompt = tokens("hello")
        assert answer["object"] == "list"
        assert answer["model"] == MODEL
        assert answer["data"] == [{"object": "embedding", "index": 0, "embedding": numbers(prompt)}]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (len(prompt), len(prompt))
        assert usage["completion_tokens"] == 0
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        (stream,) = client.backend.streams
        asked = stream.request
        assert (asked.pooling, asked.n, asked.sampling.max_tokens) == ("last", 1, 1)
        assert asked.deadline is not None


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["a", "bc", "hello"], [tokens("a"), tokens("bc"), tokens("hello")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7], [8, 9, 10]], [[5, 6], [7], [8, 9, 10]]),
    ],
)
async def test_every_kind_of_input_is_answered_in_order(given: Any, prompts: Any) -> None:
    async with serving() as client:
        answer = await embed(client, given)
        assert [each["index"] for each in answer["data"]] == list(range(len(prompts)))
        assert [each["embedding"] for each in answer["data"]] == [numbers(p) for p in prompts]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_a_conversation_becomes_one_vector() -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with serving() as client:

        async def prompt(**fields: Any) -> list[int]:
            status, _, answer = await client.post(PATH, {"messages": messages} | fields)
            assert status == 200, answer
            (each,) = answer["data"]
            found = client.backend.streams[-1].request.prompt.tolist()
            assert each["embedding"] == numbers(found)
            assert answer["usage"]["prompt_tokens"] == len(found)
            return found

        chat = tokens("<s>user: hello</s>")
        assert await prompt() == chat
        assert await prompt(add_generation_prompt=True) == chat + tokens("<s>assistant: ")
        assert await prompt(continue_final_message=True) == tokens("<s>user: hello")
        assert await prompt(truncate_prompt_tokens=3) == chat[:3]
        assert await prompt(input=None, encoding_format="float") == chat
        for fields in ({"input": "a"}, {"messages": None}):
            status, _, answer = await client.post(PATH, {"messages": messages} | fields)
            assert (status, answer["error"]["param"]) == (400, "input")
        long = [{"role": "user", "content": "hello " * 99}]
        status, _, answer = await client.post(PATH, {"messages": long})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        template = {"chat_template": "{{ 7 }}"}
        status, _, answer = await client.post(PATH, {"messages": messages} | template)
        assert (status, answer["error"]["param"]) == (400, "chat_template")
    async with serving(models={MODEL: embedder(chat_template="{{ x }}")}) as client:
        assert await prompt(chat_template_kwargs={"x": "fox"}) == tokens("fox")
        status, _, answer = await client.post(PATH, {"messages": messages})
        assert "writes nothing" in answer["error"]["message"]
    async with serving(models={MODEL: embedder(chat_template=None)}) as client:
        status, _, answer = await client.post(PATH, {"messages": messages})
        assert "no chat template" in answer["error"]["message"]


async def test_base64_holds_the_same_numbers() -> None:
    async with serving() as client:
        answer = await embed(client, "hello", encoding_format="base64")
        raw = base64.b64decode(answer["data"][0]["embedding"])
        assert list(struct.unpack("<4f", raw)) == numbers(tokens("hello"))


async def test_vectors_have_length_1_if_the_model_says_so() -> None:
    async with serving(models={MODEL: embedder(normalize=True)}) as client:
        found = (await embed(client, "hello"))["data"][0]["embedding"]
        whole = numbers(tokens("hello"))
        assert math.hypot(*found) == pytest.approx(1.0, abs=1e-6)
        assert found == pytest.approx([n / math.hypot(*whole) for n in whole], rel=1e-6)


async def test_a_matryoshka_vector_is_cut_and_has_length_1_again() -> None:
    async with serving(models={MODEL: embedder(dimensions=(0,))}) as client:
        found = (await embed(client, [3, 4, 7], dimensions=2))["data"][0]["embedding"]
        assert found == pytest.approx([0.6, 0.8], rel=1e-6)
        whole = (await embed(client, [3, 4, 7], dimensions=SIZE))["data"][0]["embedding"]
        assert whole == [3, 4, 7, 3]
        assert (await refused(client, "a", dimensions=5))["param"] == "dimensions"
    async with serving(models={MODEL: embedder(dimensions=(2,))}) as client:
        await embed(client, "a", dimensions=2)
        assert "may have 2 or 4 numbers" in (await refused(client, "a", dimensions=3))["message"]
    async with serving() as client:
        assert "leave 'dimensions' out" in (await refused(client, "a", dimensions=2))["message"]


@pytest.mark.parametrize(
    ("given", "fields", "param", "words"),
    [
        ("", {}, "input", "must not be empty"),
        ([], {}, "input", "send 1 to 2048"),
        (["a", ""], {}, "input[1]", "must not be empty"),
        ([[1], []], {}, "input[1]", "must not be empty"),
        (["a", 3], {}, "input[1]", "not a mixture"),
        ([3, [4]], {}, "input[0]", "not a mixture"),
        (["a"] * (MAX_INPUTS + 1), {}, "input", "2049 inputs"),
        ([10**6], {}, "input[0]", "there is no token 1000000"),
        ([[3], [10**6]], {}, "input[1][0]", "there is no token 1000000"),
        ([3] * 65, {}, "input", "65 tokens"),
        ("a", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ("a", {"encoding_format": "hex"}, "encoding_format", "one of base64, float"),
        ("a", {"dimensions": 0}, "dimensions", ">= 1"),
        ({"a": 1}, {}, "input", "expected"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(
    given: Any, fields: Any, param: str, words: str
) -> None:
    async with serving() as client:
        error = await refused(client, given, **fields)
        assert error["param"] == param
        assert words in error["message"].lower()
        assert not client.backend.streams


async def test_a_model_that_makes_none_says_what_helps() -> None:
    for made in ({"features": ()}, {"pooling": ""}):
        async with serving(models={MODEL: embedder(**made)}) as client:
            error = await refused(client, "a")
            assert error["param"] == "model"
            assert "--pooling=mean" in error["message"]


async def test_an_answer_that_would_be_too_large_is_refused_beforehand() -> None:
    async with serving(max_answer=200) as client:
        assert "base64" in (await refused(client, ["a", "b", "c"]))["message"]
        await embed(client, ["a", "b", "c"], encoding_format="base64")


async def test_a_text_is_cut_at_its_end_and_keeps_the_tokenizers_own_tokens() -> None:
    raw = builders.byte_level()
    prefixed = json.loads(raw.to_str())
    prefixed["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    served = embedder(tokenizer_json=json.dumps(prefixed).encode())
    text = "hello hello hello"
    bare = tokens(text)
    async with serving(models={MODEL: served}) as client:

        async def prompt(given: Any = text, **fields: Any) -> list[int]:
            await embed(client, given, **fields)
            return client.backend.streams[-1].request.prompt.tolist()

        assert await prompt() == [*bare, 1]
        assert await prompt(add_special_tokens=False) == bare
        assert await prompt(truncate_prompt_tokens=4) == [*bare[:3], 1]
        assert await prompt(truncate_prompt_tokens=4, add_special_tokens=False) == bare[:4]
        assert await prompt(truncate_prompt_tokens=1000) == [*bare, 1]
        assert await prompt(text * 30, truncate_prompt_tokens=-1) == [*tokens(text * 30)[:63], 1]
        assert await prompt([5, 6, 7, 8], truncate_prompt_tokens=2) == [5, 6]
        error = await refused(client, text, truncate_prompt_tokens=1)
        assert error["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("ids", "bare", "keep", "left"),
    [
        ([0, 5, 6, 7, 1], [5, 6, 7], 3, [0, 5, 1]),
        ([0, 5, 6, 7], [5, 6, 7], 2, [0, 5]),
        ([5, 6, 7, 1], [5, 6, 7], 2, [5, 1]),
        ([5, 6, 7], [5, 6, 7], 2, [5, 6]),
        ([0, 5, 1], [5], 3, [0, 5, 1]),
    ],
)
def test_special_tokens_stay_around_what_is_left(
    ids: list[int], bare: list[int], keep: int, left: list[int]
) -> None:
    assert truncate_input(token_ids(ids), token_ids(bare), keep).tolist() == left


async def test_many_inputs_go_to_engines_a_few_at_a_time() -> None:
    most = 0

    def watched(request: GenerateRequest) -> bytes:
        nonlocal most
        most = max(most, sum(not stream.done for stream in client.backend.streams))
        return vector(request)

    async with serving(Script(vector=watched), max_prompts=3) as client:
        answer = await embed(client, [[n] for n in range(3, 43)])
        assert [each["embedding"][0] for each in answer["data"]] == list(range(3, 43))
        assert len(client.backend.streams) == 40
        assert most == 3


async def test_the_first_input_that_fails_ends_them_all() -> None:
    def script(request: GenerateRequest) -> Script:
        if request.prompt.tolist() == [9]:
            return Script(fail=StepFailed("no luck"))
        return Script(vector=vector, silent_after=0 if request.prompt[0] > 9 else None)

    async with serving(script) as client:
        error = await refused(client, [[n] for n in range(3, 30)], status=503)
        assert "no luck" in error["message"]
        assert all(stream.done for stream in client.backend.streams)


async def test_an_input_that_no_worker_takes_refuses_the_request() -> None:
    async with serving(Script(refuse=Overloaded("full", retry_after=1.0))) as client:
        status, headers, answer = await client.post(PATH, {"input": ["a", "b"]})
        assert (status, headers["Retry-After"]) == (429, "1"), answer


async def test_tokens_instead_of_a_vector_are_never_taken_for_one() -> None:
    """As a worker answers that knows nothing of vectors, and one of another model."""
    async with serving(Script(tokens=[5])) as client:
        assert "release" in (await refused(client, "a", status=500))["message"]
    async with serving(Script(vector=lambda request: b"1234")) as client:
        assert "1 numbers, not 4" in (await refused(client, "a", status=500))["message"]


async def test_a_request_that_takes_too_long_says_how_far_it_came() -> None:
    def script(request: GenerateRequest) -> Script:
        return Script(vector=vector, silent_after=0 if request.prompt.tolist() == [4] else None)

    async with serving(script, request_timeout=0.3) as client:
        error = await refused(client, [[3], [4]], status=504)
        assert "computing vectors, 1 of 2 done" in error["message"]


async def test_a_client_that_leaves_frees_everything() -> None:
    async with serving(Script(vector=vector, silent_after=0)) as client:
        asking = asyncio.ensure_future(client.post(PATH, {"input": ["a", "b"]}))
        await until(lambda: len(client.backend.streams) == 2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not client.service.active_requests)
        assert all(stream.cancelled for stream in client.backend.streams)


async def test_a_mean_is_not_looked_for_where_its_blocks_are() -> None:
    async with serving(models={MODEL: embedder(pooling="mean")}) as client:
        await embed(client, "hello")
        (stream,) = client.backend.streams
        assert (stream.request.pooling, stream.request.block_names) == ("mean", b"")


async def test_it_counts_as_a_request_and_not_as_tokens() -> None:
    async with serving() as client:
        await embed(client, "hello")
        _, _, page = await client.get("/metrics")
        text = page.decode()
        assert 'route="/v1/embeddings"' in text
        first = next(
            line for line in text.splitlines() if "time_to_first_token_seconds_count" in line
        )
        assert first.endswith(" 0.0")


def test_zeros_have_no_direction() -> None:
    shape = EmbeddingFormat(made=2, kept=2, normalize=True, base64=False)
    assert shape.written(bytes(8)) == [0.0, 0.0]
