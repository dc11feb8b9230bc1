"""Vectors from real processes, by OpenAI's own client, aggregated and disaggregated, against
`transformers`; and a worker that is killed while it computes them."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.e2e.model import write_model
from tests.e2e.openai_client import client_of
from tests.e2e.readme import wait_sound
from tests.e2e.server import PATIENCE, Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.long(whole_file=True, one_in=2)
HIDDEN = 64
TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 40, "a"]
MODULES = ("Transformer", "Pooling", "Normalize")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made for embeddings, as its files say: the last token's hidden state, with length 1, after a
    tokenizer that ends every text with a token of its own; its vectors may be cut."""
    folder = write_model(tmp_path_factory.mktemp("model") / "embedder")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(MODULES)
    ]
    modules[0]["path"] = ""
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    parts: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
    parts.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def oracle(model: Path) -> Callable[[list[int]], np.ndarray]:
    """Hidden states of a prompt after the final norm."""
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # they come with a thread that outlives the test
    llama = transformers.LlamaForCausalLM.from_pretrained(model).model

    def hidden_states(prompt: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = llama(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        return found

    return hidden_states


def tokens_of(model: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids


def unit(vector: np.ndarray) -> np.ndarray:
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


@pytest.mark.timeout(120)
def test_the_official_client_gets_what_transformers_computes(embedder: Path) -> None:
    flags = ("--threads", "1", "--served-model-name", "e", "--max-batch-tokens", "256")
    with serving(embedder, *flags) as server, client_of(server.url) as client:
        answer = client.embeddings.create(model="e", input=TEXTS)  # it asks for base64 by itself
        prompts = [tokens_of(embedder, text) for text in TEXTS]
        assert all(prompt[-1] == 1 for prompt in prompts), "the tokenizer ends texts"
        hidden_states = oracle(embedder)
        expected = [unit(hidden_states(prompt)[-1]) for prompt in prompts]
        found = [np.array(each.embedding) for each in answer.data]
        assert [each.index for each in answer.data] == [0, 1, 2, 3]
        for ours, theirs in zip(found, expected, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4
            assert ours @ theirs > 1 - 1e-5
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))

        plain = client.embeddings.create(model="e", input=TEXTS[0], encoding_format="float")
        assert np.abs(np.array(plain.data[0].embedding) - found[0]).max() < 1e-5
        by_id = client.embeddings.create(model="e", input=[prompts[1], prompts[3]])
        assert np.abs(np.array(by_id.data[1].embedding) - found[3]).max() < 1e-5
        small = client.embeddings.create(model="e", input=TEXTS[0], dimensions=16)
        assert np.abs(np.array(small.data[0].embedding) - unit(found[0][:16])).max() < 1e-5

        again = client.embeddings.with_raw_response.create(model="e", input=TEXTS[2])
        details = json.loads(again.text)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= len(prompts[2]) - 33, "it was computed before"
        assert np.abs(np.array(again.parse().data[0].embedding) - found[2]).max() < 1e-5

        text = client.completions.create(model="e", prompt="hello", max_tokens=3)
        assert text.usage is not None
        assert text.usage.completion_tokens <= 3, "it generates all the same"
        with pytest.raises(openai.BadRequestError, match="'dimensions' is 65"):
            client.embeddings.create(model="e", input="a", dimensions=65)


@pytest.fixture
def cluster(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, dict[str, Server]]]:
    """A frontend over a prefill worker and two decode workers that would have every prompt
    prefilled elsewhere; their model does not say how it makes vectors, their settings do."""
    home = {"XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("home"))}
    with Server(None, "--role=router", "--listen=127.0.0.1:0", **home) as router:
        join = "--join=" + router.wait_for_line(r"router \S+ at (\S+)")[1]
        limits = ("--threads=1", "--kv-memory=64MiB", "--max-batch-tokens=256")
        worker = ("--role=worker", "--pooling=mean", *limits, join)
        decode = ("--mode=decode", "--disagg=always")
        with (
            Server(tiny_model, *worker, "--mode=prefill", "--node-name=p", **home) as prefill,
            Server(tiny_model, *worker, *decode, "--node-name=left", **home) as left,
            Server(tiny_model, *worker, *decode, "--node-name=right", **home) as right,
            Server(None, "--role=frontend", join, **home) as front,
        ):
            for server in (prefill, left, right, front):
                server.wait_for_line("ready: ")
            wait_sound(front, 2)
            yield front, {"left": left, "right": right}


@pytest.mark.timeout(240)
def test_vectors_outlive_their_worker_and_are_computed_where_they_are_wanted(
    cluster: tuple[Server, dict[str, Server]], tiny_model: Path
) -> None:
    front, workers = cluster
    rng = random.Random(3)
    with client_of(front.url) as client:
        raw = client.embeddings.with_raw_response.create(
            model="tiny", input=[5, 6, 7, 8] * 40, encoding_format="float"
        )
        assert raw.headers["x-pdserve-prefill"].startswith("local; ")
        assert "reason=embedding" in raw.headers["x-pdserve-prefill"]

        prompts = [[rng.randrange(3, 200) for _ in range(1200)] for _ in range(40)]
        answers: list[Any] = []

        def ask() -> None:
            answer = client.embeddings.with_raw_response.create(model="tiny", input=prompts)
            answers.append(answer)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for_work(workers["left"])
        workers["left"].end(signal.SIGKILL)
        asking.join(PATIENCE * 2)
        (answer,) = answers
        found = [np.array(each.embedding) for each in answer.parse().data]
        told = json.loads(answer.text)["usage"]
    assert len(found) == len(prompts)
    hidden_states = oracle(tiny_model)
    for index in (0, 1, 20, 38, 39):
        theirs = hidden_states(prompts[index]).mean(0)
        assert np.abs(found[index] - theirs).max() < 1e-4
    assert told["prompt_tokens"] == 40 * 1200
    assert told["prompt_tokens_details"]["cached_tokens"] == 0
    assert told["pdserve"]["migrations"] >= 1
    assert front.metric('pdserve_migrations_total{outcome="completed",reason="worker_lost"}') >= 1


def wait_for_work(worker: Server) -> None:
    """Until its engine computes: it takes the processor."""
    core = worker.core()
    before, end = core.cpu_times().user, time.monotonic() + PATIENCE
    while core.cpu_times().user - before < 0.1:
        assert time.monotonic() < end
        time.sleep(0.01)
