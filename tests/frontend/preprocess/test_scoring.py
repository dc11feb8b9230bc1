"""The score and rerank endpoints: what is asked of engines, what a client gets, what is refused."""

from __future__ import annotations

import asyncio
import math
import struct
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import StepFailed
from pdserve.protocols.scoring import MAX_DOCUMENTS
from pdserve.testing.sinks import until
from tests.frontend.support import MODEL, Client, card, frontend, tokens
from tests.support.fake_backend import Script

if TYPE_CHECKING:
    from pdserve.messages.card import ModelCard
    from pdserve.messages.request import GenerateRequest

RERANK, SCORE = "/v1/rerank", "/v1/score"
PAIR_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}({{ m.content }}{{ instruction }})"
    "{% elif m.role == 'query' %}q: {{ m.content }} "
    '{% elif m.role == "document" %}d: {{ m.content }}{% endif %}{% endfor %}{{ end }}!'
)


def vector(request: GenerateRequest) -> bytes:
    """Its first token, its last one and its length."""
    return struct.pack("<3f", *numbers(request.prompt.tolist()))


def numbers(prompt: list[int]) -> list[float]:
    return [prompt[0], prompt[-1], len(prompt)]


def logit(request: GenerateRequest) -> bytes:
    """Longer prompts are more relevant."""
    return struct.pack("<f", len(request.prompt) - 10)


def embedder(**changes: Any) -> ModelCard:
    makes: dict[str, Any] = {
        "pooling": "last",
        "embedding_size": 3,
        "features": ("embeddings",),
        "max_model_len": 64,
    }
    return card(**makes | changes)


def reranker(**changes: Any) -> ModelCard:
    makes: dict[str, Any] = {
        "num_labels": 1,
        "features": ("classify",),
        "max_model_len": 64,
        "chat_template": PAIR_TEMPLATE,
    }
    return card(**makes | changes)


def serving(script: Any = None, served: ModelCard | None = None, **config: Any) -> Any:
    made = embedder() if served is None else served
    usual = Script(vector=vector if made.pooling else logit)
    return frontend(script or usual, {MODEL: made}, **config)


async def ask(client: Client, path: str, **fields: Any) -> Any:
    status, _, answer = await client.post(path, fields)
    assert status == 200, answer
    return answer


async def refused(client: Client, path: str, status: int = 400, **fields: Any) -> Any:
    found, _, answer = await client.post(path, fields)
    assert found == status, answer
    return answer["error"]


def cosine(one: str, other: str) -> float:
    a, b = numbers(tokens(one)), numbers(tokens(other))
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def prompts(client: Client) -> list[list[int]]:
    return [stream.request.prompt.tolist() for stream in client.backend.streams]


# ---------------------------------------------------------------- vectors


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_the_cosine_of_their_vectors(path: str) -> None:
    documents = ["a", "hello fox", "b c d", "hello"]
    async with serving() as client:
        answer = await ask(client, path, query="hello", documents=documents, model=MODEL)
        expected = [cosine("hello", text) for text in documents]
        results = answer["results"]
        assert [each["index"] for each in results] == sorted(
            range(4), key=lambda index: -expected[index]
        )
        assert results[0] == {
            "index": 3,
            "relevance_score": pytest.approx(1.0, abs=1e-6),
            "document": {"text": "hello"},
        }
        for each in results:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-6)
            assert each["document"]["text"] == documents[each["index"]]
        counted = sum(len(tokens(text)) for text in ["hello", *documents])
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == counted
        assert answer["model"] == MODEL
        assert answer["id"].startswith("rerank-")
        assert prompts(client) == [tokens(text) for text in ["hello", *documents]]
        asked = client.backend.streams[0].request
        assert (asked.pooling, asked.classify, asked.sampling.max_tokens) == ("last", False, 1)


async def test_only_the_best_are_sent_and_documents_if_they_are_wanted() -> None:
    documents = [{"text": "a"}, "hello", {"text": "fox"}]
    async with serving() as client:
        answer = await ask(client, RERANK, query={"text": "hello"}, documents=documents, top_n=1)
        assert [each["index"] for each in answer["results"]] == [1]
        for top_n in (0, 7, None):
            answer = await ask(client, RERANK, query="hello", documents=documents, top_n=top_n)
            assert len(answer["results"]) == 3
        answer = await ask(client, RERANK, query="hello", documents="fox", return_documents=False)
        (only,) = answer["results"]
        assert only.keys() == {"index", "relevance_score"}


async def test_equal_documents_keep_their_order() -> None:
    async with serving() as client:
        answer = await ask(client, RERANK, query="a", documents=["fox", "b", "fox"])
        places = [each["index"] for each in answer["results"]]
        assert places.index(0) + 1 == places.index(2)


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
@pytest.mark.parametrize("path", [SCORE, "/score"])
async def test_texts_are_scored_one_with_one_with_many_or_in_pairs(
    path: str, names: tuple[str, str]
) -> None:
    async with serving() as client:

        async def scores(one: Any, two: Any) -> list[float]:
            answer = await ask(client, path, **dict(zip(names, (one, two), strict=True)))
            data = answer["data"]
            assert answer["object"] == "list"
            assert [each["index"] for each in data] == list(range(len(data)))
            assert {each["object"] for each in data} == {"score"}
            return [each["score"] for each in data]

        assert await scores("hello", "fox") == pytest.approx([cosine("hello", "fox")], abs=1e-6)
        many = await scores("hello", ["a", {"text": "fox"}])
        assert many == pytest.approx([cosine("hello", "a"), cosine("hello", "fox")], abs=1e-6)
        pairs = await scores(["hello", "a"], ["fox", "hello"])
        assert pairs == pytest.approx([cosine("hello", "fox"), cosine("a", "hello")], abs=1e-6)


async def test_texts_keep_as_many_tokens_as_are_asked_for() -> None:
    long = "hello hello hello hello"
    async with serving() as client:
        await ask(client, SCORE, text_1=long, text_2=long, max_tokens_per_query=2)
        assert prompts(client) == [tokens(long)[:2], tokens(long)]
    async with serving() as client:
        await ask(
            client, SCORE, text_1=long, text_2=long, max_tokens_per_doc=2, truncate_prompt_tokens=3
        )
        assert prompts(client) == [tokens(long)[:3], tokens(long)[:2]]
    async with serving() as client:
        await ask(client, SCORE, text_1="a", text_2=long * 40, truncate_prompt_tokens=-1)
        assert prompts(client)[1] == tokens(long * 40)[:64]
        error = await refused(client, RERANK, query="a", documents=["b", long * 40])
        assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")


# ---------------------------------------------------------------- a reranker


async def test_a_reranker_reads_each_document_with_the_query() -> None:
    async with serving(served=reranker()) as client:
        answer = await ask(client, RERANK, query="hello", documents=["a", "hello fox"])
        expected = [tokens("q: hello d: a!"), tokens("q: hello d: hello fox!")]
        assert prompts(client) == expected
        asked = client.backend.streams[0].request
        assert (asked.pooling, asked.classify, asked.needs) == ("last", True, ("classify",))
        results = answer["results"]
        assert [each["index"] for each in results] == [1, 0]
        for each in results:
            wanted = sigmoid(len(expected[each["index"]]) - 10)
            assert each["relevance_score"] == pytest.approx(wanted, rel=1e-6)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        raw = await ask(client, SCORE, text_1="hello", text_2="a", use_activation=False)
        assert raw["data"][0]["score"] == len(expected[0]) - 10


async def test_a_model_may_say_that_its_scores_are_logits() -> None:
    async with serving(served=reranker(score_activation="identity")) as client:
        answer = await ask(client, SCORE, text_1="hello", text_2="a")
        assert answer["data"][0]["score"] == len(tokens("q: hello d: a!")) - 10


async def test_a_template_gets_the_instruction_and_variables() -> None:
    async with serving(served=reranker()) as client:
        fields = {"instruction": "x", "chat_template_kwargs": {"end": "."}}
        await ask(client, SCORE, queries="hello", documents="a", **fields)
        assert prompts(client) == [tokens("(xx)q: hello d: a.!")]


async def test_without_a_template_the_tokenizer_joins_the_pair() -> None:
    for plain in (None, "{{ messages[0].content }}"):
        async with serving(served=reranker(chat_template=plain)) as client:
            await ask(client, SCORE, text_1=["hello", "b"], text_2=["a", "c"])
            assert prompts(client) == [tokens("hello") + tokens("a"), tokens("b") + tokens("c")]
            error = await refused(client, SCORE, text_1="a", text_2="b", instruction="x")
            assert error["param"] == "instruction"


async def test_a_document_loses_its_end_and_the_template_stays_whole() -> None:
    long = "hello fox " * 30
    async with serving(served=reranker()) as client:
        error = await refused(client, RERANK, query="hello", documents=["a", long])
        assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
        for fields in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 20}):
            await ask(client, RERANK, query="hello", documents=[long], **fields)
            prompt = prompts(client)[-1]
            most = 64 if fields["truncate_prompt_tokens"] == -1 else 20
            assert most - 2 <= len(prompt) <= most
            assert prompt[:4] == tokens("q: hello d: " + long)[:4]
            assert prompt[-1] == tokens("!")[0]
        await ask(
            client, RERANK, query=long, documents=[long],
            max_tokens_per_query=3, max_tokens_per_doc=4,
        )  # fmt: skip
        inside = len(prompts(client)[-1]) - len(tokens("q:  d: !"))
        assert inside <= 8
        error = await refused(
            client, RERANK, query="hello", documents=[long], truncate_prompt_tokens=5
        )
        assert "leaves no room for 'documents[0]'" in error["message"]


async def test_a_query_may_not_be_repeated_without_end() -> None:
    async with serving(served=reranker(max_model_len=4096), max_body=20_000) as client:
        documents = ["a"] * 100
        await ask(client, RERANK, query="b", documents=documents)
        error = await refused(client, RERANK, query="b" * 200, documents=documents)
        assert error["param"] == "query"
        assert "query and instruction in each" in error["message"]
        for more in ({"instruction": "c" * 200}, {"chat_template_kwargs": {"end": ["c" * 200]}}):
            error = await refused(client, RERANK, query="b", documents=documents, **more)
            assert error["param"] == "query"


# ---------------------------------------------------------------- refusals and ends


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (RERANK, {"documents": ["a"]}, "query", "required"),
        (RERANK, {"query": "a"}, "documents", "required"),
        (RERANK, {"query": "a", "documents": []}, "documents", "send 1 to 2048"),
        (RERANK, {"query": "", "documents": ["a"]}, "query", "not be empty"),
        (RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]", "not be empty"),
        (RERANK, {"query": "a", "documents": [{"text": ""}]}, "documents[0]", "not be empty"),
        (RERANK, {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "required"),
        (RERANK, {"query": "a", "documents": ["b"] * (MAX_DOCUMENTS + 1)}, "documents", "2049"),
        (RERANK, {"query": ["a"], "documents": ["b"]}, "query", "expected"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", ">= 0"),
        (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["t"]}, "rank_fields", "one"),
        (RERANK, {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", "texts"),
        (SCORE, {"text_1": "a"}, "text_1", "exactly one"),
        (SCORE, {"text_1": "a", "documents": "b"}, "text_1", "exactly one"),
        (SCORE, {"text_1": "a", "text_2": "b", "items": "c"}, "text_1", "exactly one"),
        (SCORE, {"queries": "a", "documents": "b", "items": "c"}, "text_1", "exactly one"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "2 texts"),
        (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 texts"),
        (SCORE, {"text_1": "a", "text_2": "b", "label_token_ids": [5]}, "label_token_ids", "leave"),
        (SCORE, {"text_1": "a", "text_2": "b", "truncation_side": "left"}, "truncation_side", ""),
    ],
)  # fmt: skip
async def test_what_cannot_be_answered_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    async with serving() as client:
        error = await refused(client, path, **fields)
        assert error["param"] == param
        assert words in error["message"]
        assert not client.backend.streams


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pooling": "", "features": ()}, "with --pooling=mean"),
        ({"num_labels": 3, "pooling": "", "features": ("classify",)}, "3 classes"),
        ({"num_labels": 1, "pooling": "", "features": ()}, "no classification head"),
    ],
)
async def test_a_model_that_makes_no_scores_says_so(changes: Any, words: str) -> None:
    async with serving(served=embedder(**changes)) as client:
        error = await refused(client, RERANK, query="a", documents=["b"])
        assert error["param"] == "model"
        assert words in error["message"]


async def test_vectors_that_would_take_too_much_memory_are_refused_beforehand() -> None:
    async with serving(max_answer=50) as client:
        await ask(client, RERANK, query="a", documents=["b"])
        error = await refused(client, RERANK, query="a", documents=["b"] * 5)
        assert (error["param"], "send fewer texts" in error["message"]) == ("documents", True)


async def test_many_prompts_go_to_engines_a_few_at_a_time() -> None:
    most = 0

    def watched(request: GenerateRequest) -> bytes:
        nonlocal most
        most = max(most, sum(not stream.done for stream in client.backend.streams))
        return logit(request)

    async with serving(Script(vector=watched), reranker(), max_prompts=3) as client:
        answer = await ask(client, RERANK, query="a", documents=["b"] * 40)
        assert len(answer["results"]) == len(client.backend.streams) == 40
        assert most == 3


async def test_the_first_prompt_that_fails_ends_them_all() -> None:
    def script(request: GenerateRequest) -> Script:
        if request.prompt.tolist() == tokens("fox"):
            return Script(fail=StepFailed("no luck"))
        return Script(vector=vector, silent_after=0)

    async with serving(script) as client:
        error = await refused(client, RERANK, 503, query="a", documents=["b", "fox", "c"])
        assert "no luck" in error["message"]
        assert all(stream.done for stream in client.backend.streams)


async def test_a_client_that_leaves_frees_everything() -> None:
    async with serving(Script(vector=vector, silent_after=0)) as client:
        asking = asyncio.ensure_future(ask(client, RERANK, query="a", documents=["b"]))
        await until(lambda: len(client.backend.streams) == 2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not client.service.active_requests)
        assert all(stream.cancelled for stream in client.backend.streams)


async def test_a_number_that_is_none_is_never_a_score() -> None:
    """As a worker of another model answers."""
    async with serving(Script(vector=lambda request: bytes(8)), reranker()) as client:
        error = await refused(client, SCORE, 500, text_1="a", text_2="b")
        assert "2 numbers, not 1" in error["message"]


async def test_each_path_is_counted_by_its_own_name() -> None:
    async with serving() as client:
        for path in (RERANK, "/rerank", "/v2/rerank"):
            await ask(client, path, query="a", documents=["b"])
        _, _, page = await client.get("/metrics")
        for path in (RERANK, "/rerank", "/v2/rerank"):
            assert f'route="{path}",' in page.decode()
