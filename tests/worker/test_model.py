"""Finding a model: directories, the bundled one, and a hub on this machine's loopback."""

import asyncio
import errno
import hashlib
import json

import psutil
import pytest
from aiohttp import web

import pdserve
from pdserve.errors import ConfigError
from pdserve.worker import download
from pdserve.worker.model import HubModel, LocalModel, fetch, locate
from tests.support.patience import PATIENCE, eventually

REPO = "tiny/model"
COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"\0" * 300_000,
    "modeling_evil.py": b"raise SystemExit",
    "consolidated.safetensors": b"\0" * 9,
    "tokenizer.model.v3": b"\0",
}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_directory_is_served_under_its_own_name(checkpoint):
    assert locate(str(checkpoint)) == LocalModel(checkpoint.resolve(), "some-model")


def test_without_a_model_the_bundled_one_is_meant(monkeypatch, tmp_path, checkpoint):
    monkeypatch.setattr(pdserve, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ConfigError, match="carries no bundled model: name one with --model"):
        locate("")
    checkpoint.rename(tmp_path / "bundled")
    assert locate("") == LocalModel(tmp_path / "bundled", "bundled")


def test_a_hub_id_may_name_a_revision():
    assert locate("org/name") == HubModel("org/name")
    assert locate("org/name@v1.0") == HubModel("org/name", "v1.0")


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "justaname"])
def test_what_cannot_be_a_model_is_refused_at_once(model):
    with pytest.raises(ConfigError, match="no such directory"):
        locate(model)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_an_incomplete_directory_names_what_is_missing(checkpoint, missing):
    (checkpoint / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}: a Hugging Face checkpoint"):
        locate(str(checkpoint))


def test_a_tekken_file_does_for_the_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").rename(checkpoint / "tekken.json")
    assert locate(str(checkpoint)) == LocalModel(checkpoint, checkpoint.name)


def test_the_parent_of_a_checkpoint_gets_a_hint(checkpoint):
    with pytest.raises(ConfigError, match=r"did you mean .*some-model"):
        locate(str(checkpoint.parent))


def test_gguf_and_sentencepiece_get_a_hint(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"convert tokenizer\.model first.*: python -c"):
        locate(str(checkpoint))
    (checkpoint / "tokenizer.model").rename(checkpoint / "tokenizer.model.v3")
    with pytest.raises(ConfigError, match=r"copy it to tokenizer\.model, then python -c"):
        locate(str(checkpoint))
    (checkpoint / "weights.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF files are not supported"):
        locate(str(checkpoint))


def test_a_file_is_not_a_model(checkpoint):
    with pytest.raises(ConfigError, match="is a file: give the directory"):
        locate(str(checkpoint / "config.json"))
    (checkpoint / "m.gguf").touch()
    with pytest.raises(ConfigError, match="is a file: GGUF files are not supported"):
        locate(str(checkpoint / "m.gguf"))


@pytest.mark.parametrize(
    ("missing", "instead", "says"),
    [
        ("config.json", "adapter_config.json", "a LoRA adapter.*merge it into its base model"),
        ("config.json", "params.json", "in Mistral's own format"),
        ("tokenizer.json", "tiktoken.model", "tiktoken.model alone is not supported: give"),
        ("tokenizer.json", "qwen.tiktoken", "qwen.tiktoken alone is not supported: give"),
    ],
)
def test_what_else_is_there_is_named(checkpoint, missing, instead, says):
    (checkpoint / missing).unlink()
    (checkpoint / instead).touch()
    with pytest.raises(ConfigError, match=f"has no {missing}: .*{says}"):
        locate(str(checkpoint))


def test_a_tiktoken_vocabulary_that_was_not_downloaded_is_named(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')
    with pytest.raises(ConfigError, match="a tiktoken vocabulary alone is not supported: give"):
        locate(str(checkpoint))


class Hub:
    """The few routes of a model hub that a download needs."""

    def __init__(self) -> None:
        self.requests = 0
        self.asked_for_file = asyncio.Event()
        self.stall = asyncio.Event()
        self.stall.set()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self.info)
        application.router.add_get("/api/models/{owner}/{name}/tree/{revision}", self.tree)
        application.router.add_get("/{owner}/{name}/resolve/{revision}/{file}", self.file)
        return application

    async def info(self, request: web.Request) -> web.Response:
        self.requests += 1
        owner = request.match_info["owner"]
        if owner == "missing":
            return web.json_response({}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        if owner == "gated":
            return web.json_response({}, status=403, headers={"X-Error-Code": "GatedRepo"})
        if request.match_info["revision"] not in ("main", COMMIT):
            return web.json_response({}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in FILES]
        return web.json_response({"id": REPO, "sha": COMMIT, "siblings": siblings})

    async def tree(self, request: web.Request) -> web.Response:
        return web.json_response(
            [
                {"type": "file", "path": name, "size": len(body), "oid": "0" * 40}
                for name, body in FILES.items()
            ]
        )

    async def file(self, request: web.Request) -> web.Response:
        self.requests += 1
        body = FILES[request.match_info["file"]]
        if request.method == "GET":
            self.asked_for_file.set()
            await self.stall.wait()
        etag = hashlib.sha256(body).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        return web.Response(body=body, headers=headers)


@pytest.fixture
async def hub(monkeypatch, tmp_path):
    """A hub that the download's child process finds through its environment."""
    hub = Hub()
    runner = web.AppRunner(hub.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.stall.set()
    await runner.cleanup()


async def test_a_hub_model_is_downloaded_once_and_then_found_offline(hub, monkeypatch):
    stages = []
    model = await fetch(HubModel(REPO), lambda stage, fraction: stages.append((stage, fraction)))
    assert model.name == REPO
    assert (model.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (model.path / "modeling_evil.py").exists()
    assert not (model.path / "consolidated.safetensors").exists()
    assert (model.path / "tokenizer.model.v3").exists()
    assert stages
    assert all(stage == f"downloading {REPO}" for stage, _ in stages)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = hub.requests
    again = await fetch(HubModel(REPO), lambda stage, fraction: None)
    assert again == model
    assert hub.requests == before


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (HubModel("missing/model"), "was not found on the hub"),
        (HubModel("gated/model"), "is gated: accept its terms"),
        (HubModel(REPO, "v9"), "no such revision"),
    ],
)
async def test_a_refused_download_names_cause_and_remedy(hub, model, says):
    with pytest.raises(ConfigError, match=says):
        await fetch(model, lambda stage, fraction: None)


async def test_without_network_the_message_says_what_to_do(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"check the network.*--model DIRECTORY"):
        await fetch(HubModel(REPO), lambda stage, fraction: None)


@pytest.mark.timeout(2 * PATIENCE)
async def test_a_cancelled_download_ends_its_process(hub):
    hub.stall.clear()
    before = set(psutil.Process().children())
    task = asyncio.create_task(fetch(HubModel(REPO), lambda stage, fraction: None))
    await asyncio.wait_for(hub.asked_for_file.wait(), PATIENCE)
    (child,) = set(psutil.Process().children()) - before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not child.is_running(), "the end of the download's process")


def test_a_full_disk_points_to_another_place():
    error = OSError(errno.ENOSPC, "No space left on device")
    assert "choose another place with --download-dir" in download.explain(REPO, error)


def test_an_unforeseen_error_stays_one_line():
    assert "\n" not in download.explain(REPO, RuntimeError("a\nb"))


def test_progress_rises_over_several_bars(capsys, monkeypatch):
    monkeypatch.setattr(download, "_REPORT_EVERY", 0.0)
    reporter = download._Reporter(REPO)
    reporter.note("it", 1, 4)
    reporter.note("B", 60, 100)
    reporter.note("B", 10, 100)
    reporter.note("B", 5, None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["fraction"] for line in lines] == [0.25, 0.6, 0.6]
