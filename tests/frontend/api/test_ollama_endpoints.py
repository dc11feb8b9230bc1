"""What Ollama's clients ask about a server and its models before they use them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve import __version__
from pdserve.messages.card import GenerationDefaults
from pdserve.messages.lora import LoraSummary
from tests.frontend.reasoning_frontend import PLAIN, answering
from tests.frontend.support import card, frontend

if TYPE_CHECKING:
    from tests.frontend.support import Client

KEYS = "[[key]]\nkey = 'a-key-of-the-test'\ntenant = 'a'\nmodels = ['tiny']\n"
KEY = {"Authorization": "Bearer a-key-of-the-test"}


async def read(client: Client, path: str, **headers: str) -> tuple[int, Any]:
    status, _, body = await client.get(path, headers)
    return status, json.loads(body)


async def test_models_are_listed_under_all_their_names():
    tiny = card(
        aliases=("small",), dtype="bfloat16", loras=(LoraSummary(name="sql", revision="1"),)
    )
    async with frontend(models=dict.fromkeys(("tiny", "small", "sql"), tiny)) as client:
        _, listed = await read(client, "/api/tags")
        _, running = await read(client, "/api/ps")
    names = [model["name"] for model in listed["models"]]
    assert names == [model["model"] for model in listed["models"]] == ["tiny", "small", "sql"]
    first, alias, adapter = listed["models"]
    assert first["digest"] == alias["digest"] != adapter["digest"]
    assert len(first["digest"]) == 64
    assert first["details"]["quantization_level"] == "bfloat16"
    assert adapter["details"]["parent_model"] == "tiny"
    assert [model["name"] for model in running["models"]] == names
    assert running["models"][0]["context_length"] == 4096
    assert running["models"][0]["expires_at"] > "2999"


async def test_a_model_is_shown_with_what_it_can():
    async with answering(PLAIN) as client:
        status, _, shown = await client.post("/api/show", {"model": "tiny:latest"})
    assert status == 200
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 4096


async def test_a_models_recommendations_are_shown_in_ollamas_words():
    able = card(
        pooling="last",
        embedding_size=4,
        features=("embeddings",),
        defaults=GenerationDefaults(temperature=0.5, repetition_penalty=1.25, max_tokens=9),
    )
    async with frontend(models={"tiny": able}) as client:
        _, _, shown = await client.post("/api/show", {"name": "tiny", "verbose": True})
    lines = set(shown["parameters"].splitlines())
    assert lines == {"temperature 0.5", "repeat_penalty 1.25", "num_predict 9"}
    assert shown["capabilities"] == ["completion", "embedding"]
    assert shown["model_info"]["pdserve.embedding_length"] == 4


async def test_a_model_that_is_not_there_is_a_404():
    async with frontend() as client:
        status, _, answer = await client.post("/api/show", {"model": "other"})
        assert (status, "is not served here" in answer["error"]) == (404, True)
        status, _, answer = await client.post("/api/show", {})
        assert (status, answer["error"]) == (400, "'model' is required")


async def test_a_key_sees_its_models(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    models = {"tiny": card(), "other": card(name="other")}
    async with frontend(models=models, api_keys_file=file) as client:
        _, listed = await read(client, "/api/tags", **KEY)
        assert [model["name"] for model in listed["models"]] == ["tiny"]
        for path in ("/api/tags", "/api/ps"):
            status, answer = await read(client, path)
            assert (status, set(answer)) == (401, {"error"})
        status, _, _ = await client.post("/api/show", {"model": "other"}, KEY)
        assert status == 403
        for path in ("/", "/api/version"):
            status, _, _ = await client.get(path)
            assert status == 200


async def test_the_version_is_that_of_the_api():
    async with frontend() as client:
        _, answer = await read(client, "/api/version")
        assert answer["pdserve"] == __version__
        assert tuple(map(int, answer["version"].split("."))) >= (0, 13)
        async with client.http.head(client.url + "/") as reply:
            assert reply.status == 200
        _, _, body = await client.get("/")
        assert body == b"pdserve is running"


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete"])
async def test_models_are_not_managed_by_clients(path):
    method = "DELETE" if path == "delete" else "POST"
    async with (
        frontend() as client,
        client.http.request(method, f"{client.url}/api/{path}", json={"model": "x"}) as reply,
    ):
        answer = await reply.json()
    assert (reply.status, "workers bring them" in answer["error"]) == (404, True)


async def test_errors_of_all_paths_have_ollamas_shape():
    async with frontend() as client:
        status, answer = await read(client, "/api/nothing")
        assert (status, isinstance(answer["error"], str)) == (404, True)
        status, answer = await read(client, "/api/chat")
        assert (status, isinstance(answer["error"], str)) == (405, True)
