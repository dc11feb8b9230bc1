"""Scores and rankings from real processes: against the cosines of `/v1/embeddings`, and against
`transformers` for a reranker with a head of its own and for one that judges by two tokens."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from openai.types import CreateEmbeddingResponse
from tokenizers import Tokenizer

from pdserve.client import Client, InvalidRequest
from pdserve.protocols.scoring import RerankDocument
from tests.e2e.model import write_model
from tests.e2e.openai_client import client_of
from tests.e2e.server import serving

if TYPE_CHECKING:
    from pathlib import Path

QUERY = "Which fox is quick?"
DOCUMENTS = ["The quick brown fox", "a lazy dog. " * 60, "a", "Foxes are quick, dogs are lazy."]
FLAGS = ("--threads", "1", "--served-model-name", "judge", "--max-batch-tokens", "256")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}<s>Query: {{ m.content }}\n"
    "{% elif m.role == 'document' %}Document: {{ m.content }}</s>{% endif %}{% endfor %}Relevant?"
)


def prompt_of(document: str) -> str:
    return f"<s>Query: {QUERY}\nDocument: {document}</s>Relevant?"


def ids_of(folder: Path, text: str) -> list[int]:
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return found


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def judge_of(folder: Path) -> Any:
    """A classifier with the body of the language model in `folder`, in whose place it is saved."""
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # they come with a thread that outlives the test
    torch.manual_seed(2)
    judge = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        judge.score.weight.normal_(0.0, 0.2)
    judge.config.pad_token_id = 0
    judge.save_pretrained(folder)
    return judge.eval()


@pytest.mark.timeout(180)
async def test_an_embedding_model_ranks_by_cosine(tiny_model: Path) -> None:
    turns = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": "The brown."}]
    with serving(tiny_model, *FLAGS, "--pooling", "mean") as server:
        with client_of(server.url) as client:
            bare: dict[str, Any] = {"model": "judge", "encoding_format": "float"}
            chat = client.post(
                "/embeddings", body=bare | {"messages": turns}, cast_to=CreateEmbeddingResponse
            )
            plain = client.embeddings.create(
                input=f"<s>user: {QUERY}</s><s>assistant: The brown.</s>",
                extra_body={"add_special_tokens": False},
                **bare,
            )
            texts = client.embeddings.create(
                model="judge", input=[QUERY, *DOCUMENTS], encoding_format="float"
            )
        query, *others = (np.array(each.embedding, float) for each in texts.data)
        sizes = [np.linalg.norm(query) * np.linalg.norm(each) for each in others]
        cosines = [query @ each / size for each, size in zip(others, sizes, strict=True)]
        async with Client(server.url) as client:
            ranked = await client.rerank(QUERY, DOCUMENTS, top_n=3)
            scored = await client.score(QUERY, DOCUMENTS)
            paired = await client.score([QUERY] * 4, DOCUMENTS)
        invoked = server.post("/invocations", {"query": QUERY, "documents": DOCUMENTS, "top_n": 3})
    assert chat.usage.prompt_tokens == plain.usage.prompt_tokens
    assert chat.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert [each["index"] for each in invoked["results"]] == [each.index for each in ranked.results]
    assert [each.score for each in scored.data] == pytest.approx(cosines, abs=1e-5)
    assert [each.score for each in paired.data] == pytest.approx(cosines, abs=1e-5)
    best = sorted(range(4), key=lambda index: -cosines[index])[:3]
    assert [each.index for each in ranked.results] == best
    for each in ranked.results:
        assert each.relevance_score == pytest.approx(cosines[each.index], abs=1e-5)
        assert each.document == RerankDocument(text=DOCUMENTS[each.index])
    assert ranked.usage.prompt_tokens == texts.usage.prompt_tokens


@pytest.mark.timeout(180)
async def test_a_reranker_scores_as_transformers_does(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "judge", template=TEMPLATE)
    judge = judge_of(folder)
    prompts = [ids_of(folder, prompt_of(document)) for document in DOCUMENTS]
    with torch.inference_mode():
        logits = [float(judge(torch.tensor([prompt])).logits) for prompt in prompts]
    assert max(logits) - min(logits) > 0.1, "scores that differ"
    with serving(folder, *FLAGS) as server:
        async with Client(server.url) as client:
            ranked = await client.rerank(QUERY, DOCUMENTS)
            raw = await client.score(QUERY, DOCUMENTS, use_activation=False)
            cut = await client.rerank(QUERY, [DOCUMENTS[1]], max_tokens_per_doc=20)
            with pytest.raises(InvalidRequest, match="no output layer"):
                await client.complete("hello", max_tokens=3)
            with pytest.raises(InvalidRequest, match="makes no vectors"):
                await client.embed("hello")
            again = await client.rerank(QUERY, DOCUMENTS)
    best = sorted(range(4), key=lambda index: -logits[index])
    assert [each.index for each in ranked.results] == best
    for each in ranked.results:
        assert each.relevance_score == pytest.approx(sigmoid(logits[each.index]), abs=1e-4)
    assert [each.score for each in raw.data] == pytest.approx(logits, abs=1e-3)
    assert ranked.usage.prompt_tokens == sum(map(len, prompts))
    assert 20 < cut.usage.prompt_tokens < 80
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens > 0, "the query is computed once"


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_a_language_model_judges_by_two_of_its_tokens(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "judge")
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    no, yes = "n", "y"
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "CrossEncoder", "activation_fn": "torch.nn.Sigmoid"})
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    prompts = [ids_of(folder, prompt_of(document)) for document in DOCUMENTS]
    with torch.inference_mode():
        last = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    pair = [tokenizer.token_to_id(each) for each in (no, yes)]
    shares = [float(each[pair].softmax(0)[1]) for each in last]
    tokens = ("--engine-option", f"classifier_from_token={no},{yes}")
    template = ("--chat-template", str(tmp_path / "pairs.jinja"))
    with serving(folder, *FLAGS, *tokens, *template) as server:
        async with Client(server.url) as client:
            scored = await client.score(QUERY, DOCUMENTS)
            said = await client.complete("hello", max_tokens=3)
    assert [each.score for each in scored.data] == pytest.approx(shares, abs=1e-4)
    assert said.usage is not None
    assert said.usage.completion_tokens > 0, "it generates all the same"
