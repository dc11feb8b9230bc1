"""Images through a cluster of real processes: two workers with the real vLLM and a model that sees.

Its engines take a while to load; `tests/frontend/images` and the tests of `image_reader` cover the
parts in every run.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.chaos.cluster import eventually
from tests.e2e.openai_client import client_of
from tests.e2e.server import PATIENCE
from tests.e2e.vllm.cluster import VllmCluster, require_vllm
from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import openai

    from tests.chaos.cluster import Node

require_vllm()
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.long(one_in=8, turn=2)]

vision_model = pytest.importorskip("tests.engines.vllm.vision_model")
families = pytest.importorskip("tests.engines.vllm.vision_families")
MODELS = ("idefics3", "mistral3", "qwen2_5_vl", "qwen3_vl")
"""How many tokens an image takes, and how a template writes one, differs among them."""
DRAWN = MODELS if is_long() else (MODELS[number_for(run_seed(), "seeing") % len(MODELS)],)
TEXT = "what does this picture show, and what is the colour of the house on its left side? "


def folder_of(model: str) -> Path:
    made = vision_model.vision_checkpoint() if model == "idefics3" else None
    folder: Path = (made or families.family_checkpoint(model))[0]
    return folder


@pytest.fixture(scope="module", params=DRAWN)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmCluster]:
    folder = folder_of(request.param)
    with VllmCluster(tmp_path_factory.mktemp("seeing"), folder) as cluster:
        cluster.router()
        for name in ("left", "right"):
            cluster.with_vllm(name, "--max-batch-tokens", "256")
        cluster.front = cluster.frontend(
            "--allowed-media-domains", "*", "--max-image-pixels", "1000000"
        )
        cluster.wait_whole()
        yield cluster


@pytest.fixture
def client(cluster: VllmCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster.front.url) as client:
        yield client


def url_of(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def question(*files: bytes, text: str = TEXT) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url_of(file)}} for file in files]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> tuple[Any, str]:
    """(answer, the worker that gave it)."""
    usual: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    fields = usual | {"messages": messages} | fields
    raw = client.chat.completions.with_raw_response.create(**fields)
    return raw.parse(), raw.headers["x-pdserve-worker"]


def test_answers_depend_on_the_picture(client: openai.OpenAI) -> None:
    cat, dog = vision_model.picture(1), vision_model.picture(2)
    first, _ = ask(client, question(cat))
    again, _ = ask(client, question(cat))
    other, _ = ask(client, question(dog))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert first.choices[0].message.content != other.choices[0].message.content
    assert first.usage.prompt_tokens == other.usage.prompt_tokens
    text = [{"role": "user", "content": TEXT}]
    bare, _ = ask(client, text)
    assert first.usage.prompt_tokens - bare.usage.prompt_tokens >= 6, "the picture's tokens count"


def test_a_picture_goes_to_the_worker_that_has_it(client: openai.OpenAI) -> None:
    """Every prompt has the same tokens; only pictures tell them apart."""
    files = [vision_model.picture(seed) for seed in range(10, 22)]
    first = [ask(client, question(file)) for file in files]
    workers = [worker for _, worker in first]
    assert set(workers) == {"left", "right"}, "the pictures are spread"
    texts = {answer.choices[0].message.content for answer, _ in first}
    assert len(texts) > len(files) // 2
    elsewhere = 0
    for file, (answer, worker) in reversed(list(zip(files, first, strict=True))):
        again, there = ask(client, question(file))
        assert again.choices[0].message.content == answer.choices[0].message.content
        if there == worker:
            assert again.usage.prompt_tokens_details.cached_tokens
        elsewhere += there != worker
    # Prompts this short may go where a first token is predicted a millisecond sooner.
    assert elsewhere <= 2, "by chance it would be six"


def test_a_conversation_with_pictures_goes_on_where_it_began(client: openai.OpenAI) -> None:
    one, two = vision_model.picture(31), vision_model.picture(32, 112, 84)
    messages = question(one)
    answer, worker = ask(client, messages)
    text = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": text}, *question(two, text="and this? ")]
    longer, there = ask(client, messages)
    assert there == worker
    assert longer.usage.prompt_tokens_details.cached_tokens >= 32


def test_other_apis(cluster: VllmCluster, client: openai.OpenAI) -> None:
    file = vision_model.picture(41)
    text = ask(client, question(file))[0].choices[0].message.content
    responses = client.responses.create(
        model="tiny",
        temperature=0,
        max_output_tokens=8,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url_of(file), "detail": "auto"},
                    {"type": "input_text", "text": TEXT},
                ],
            }
        ],
    )
    assert responses.output_text == text
    source = {"type": "base64", "media_type": "image/png", "data": url_of(file).partition(",")[2]}
    messages = cluster.front.post(
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 8,
            "temperature": 0,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": source},
                        {"type": "text", "text": TEXT},
                    ],
                }
            ],
        },
    )
    assert messages["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://127.0.0.1:1/a.png", "not public"),
        ("http://localhost:1/a.png", "not public"),
        ("http://2130706433/a.png", "no usual host name"),
        ("http://[::ffff:127.0.0.1]/a.png", "not public"),
        ("data:image/png;base64,AAAA", "is no picture"),
        ("data:text/html;base64,AAAA", "'text/html'"),
    ],
)
def test_hostile_images(cluster: VllmCluster, url: str, words: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    assert words in refusal(cluster.front, content)


def test_a_bomb_and_a_broken_file(cluster: VllmCluster) -> None:
    bomb = vision_model.picture(1, 2000, 600)
    content = [{"type": "image_url", "image_url": {"url": url_of(bomb)}}]
    assert "1000000 are allowed" in refusal(cluster.front, content)
    broken = vision_model.picture(1)[:-60]
    content = [{"type": "image_url", "image_url": {"url": url_of(broken)}}]
    assert "cannot be decoded" in refusal(cluster.front, content)


def refusal(front: Node, content: list[Any]) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    with pytest.raises(urllib.error.HTTPError) as caught:
        front.post("/v1/chat/completions", body)
    with caught.value as error:
        assert error.code == 400
        return str(json.loads(error.read())["error"]["message"])


def test_a_stream_goes_on_when_its_worker_dies(cluster: VllmCluster, client: openai.OpenAI) -> None:
    """The frontend still has the picture, and the other worker reads it again."""
    messages = question(vision_model.picture(51))
    whole, _ = ask(client, messages, max_tokens=60, extra_body={"ignore_eos": True})
    body = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    data = json.dumps(body).encode()
    text = ""
    with urllib.request.urlopen(
        f"{cluster.front.url}/v1/chat/completions", data, PATIENCE
    ) as answer:
        worker = answer.headers["x-pdserve-worker"]
        while line := answer.readline():
            event = line.decode().removeprefix("data: ").strip()
            if not event.startswith("{"):
                continue
            chunk = json.loads(event)
            assert "error" not in chunk, chunk
            text += chunk["choices"][0]["delta"].get("content") or ""
            if text and not cluster.workers[worker].killed:
                cluster.workers[worker].kill()
    assert text == whole.choices[0].message.content
    eventually(lambda: len(cluster.sound()) == 1, cluster.sound)
