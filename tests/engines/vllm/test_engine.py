"""Loading vLLM, over a fake of it: what is passed on, what is refused and how."""

from __future__ import annotations

import builtins
import os
import shutil
import struct
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.messages.lora import LoraAdapter
from pdserve_engines.vllm import engine as vllm_engine
from pdserve_engines.vllm.engine import Engine, _executor, load_engine, visible_device
from tests.engines.vllm import fake_vllm
from tests.engines.vllm.real import BUNDLED
from tests.engines.vllm.test_core import SPEC, Inline, request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What loading sets of the environment is taken back."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        monkeypatch.delenv(name)


def spec(**changes: Any) -> EngineSpec:
    return EngineSpec(**({name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | changes))


def load(**changes: Any) -> Engine:
    engine = load_engine(spec(**changes), lambda _: None, lambda: None)
    engine.close()
    return engine


def arguments(engine: Engine) -> Any:
    return engine._config.arguments


# ------------------------------------------------------------------ the executor


@pytest.mark.parametrize(
    ("device", "transfer", "keeps"),
    [
        ("cuda", TransferSpec(backends=("cuda_ipc",)), True),
        ("cuda", TransferSpec(), False),
        ("cuda", TransferSpec(backends=("tcp",)), False),
        ("cuda", None, False),
        ("cpu", TransferSpec(), False),
    ],
)
def test_room_is_kept_only_for_staging_on_the_device(
    device: str, transfer: TransferSpec | None, keeps: bool
):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, distributed_executor_backend="uni"),
        device_config=SimpleNamespace(device_type=device),
    )
    assert hasattr(_executor(config, transfer), "kept_for_staging") is keeps


@pytest.mark.parametrize(("backend", "ahead"), [("uni", None), ("mp", []), ("ray", None)])
def test_a_step_is_computed_elsewhere_only_by_worker_processes_that_would_wait(backend, ahead):
    engine = load()
    engine._config.parallel_config.distributed_executor_backend = backend
    engine._core.batch_queue = ahead
    execute = engine._core.model_executor.execute_model
    engine.while_computing(lambda: None)
    assert engine._core.model_executor.execute_model == execute


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize(
    ("device", "visible", "left"),
    [
        ("cuda:0", "", "0"),
        ("cuda:1", "", "1"),
        ("cuda:1", "4, 6", "6"),
        ("cuda:0", "GPU-ab", "GPU-ab"),
    ],
)
def test_a_device_is_the_one_of_that_number_among_the_visible(device, visible, left) -> None:
    assert visible_device(device, visible) == left


def test_a_device_that_is_not_visible_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        visible_device("cuda:2", "4,6")


@pytest.mark.parametrize(
    ("option", "seen"), [("tensor-parallel-size", None), ("enforce_eager", "1")]
)
def test_an_engine_over_several_devices_sees_all(option, seen, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm_engine, "_VISIBLE", "")
    vllm_engine._set_environment(spec(device="cuda:1", options={option: "2"}))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


# ------------------------------------------------------------------ refusals


def test_a_machine_without_vllm_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("vllm"):
            raise ImportError("no vllm")
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install"):
        load()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"quantization": "bogus"}}, "Unknown quantization method"),
        ({"options": {"quantisation": "fp8"}}, "did you mean 'quantization'"),
        ({"options": {"block_size": "16"}}, "--block-size"),
        ({"device": "cuda"}, "computes on cpu"),
        ({"device": "cuda:1"}, "computes on cpu"),
        ({"model": "/nowhere"}, "config.json"),
    ],
)
def test_what_cannot_be_loaded_says_why(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(**changes)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_of_vllm_while_loading_is_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """A worker process's error arrives as a RuntimeError."""

    def fail(*_: Any, **__: Any) -> None:
        raise kind("no common block size\n  for 16")

    monkeypatch.setattr(fake_vllm.InprocClient, "__init__", fail)
    with pytest.raises(ConfigError, match="no common block size for 16"):
        load()


@pytest.mark.parametrize("kind", [RuntimeError, Exception])
@pytest.mark.parametrize("works", [False, True])
def test_a_model_that_sees_says_that_torchvision_is_missing(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], works: bool
) -> None:
    """vLLM says only that a worker process could not start."""

    def fail(self: Any, config: Any, *_: Any, **__: Any) -> None:
        config.model_config.multimodal_config = object()
        raise kind("WorkerProc initialization failed")

    monkeypatch.setattr(fake_vllm.InprocClient, "__init__", fail)
    found = "torchvision.transforms.v2.functional"
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", found):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if works else None)
    with pytest.raises(kind if works and kind is Exception else ConfigError) as caught:
        load()
    assert "WorkerProc initialization failed" in str(caught.value)
    assert ("install the release and the build of torchvision" in str(caught.value)) is not works


def test_a_model_without_images_says_nothing_of_torchvision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(fake_vllm.InprocClient, "__init__", fail)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ConfigError, match=r"^vLLM cannot load this model: no memory$"):
        load()


# ------------------------------------------------------------------ what is passed on


def test_loading_reports_its_stages() -> None:
    stages: list[str] = []
    load_engine(spec(), lambda stage: stages.append(stage.stage), lambda: None).close()
    assert stages == ["importing vLLM", "loading the model into vLLM"]


def test_the_device_that_is_meant_is_taken() -> None:
    for device in ("auto", "cpu"):
        assert load(device=device).capabilities.device == "cpu"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_memory": 1000}, 1000),
        ({"kv_memory": 1000, "kv_share": 0.5}, 500),
        ({"kv_memory": 1000, "kv_cap": 600}, 600),
        ({"kv_memory": 1000, "kv_share": 0.5, "kv_cap": 600}, 500),
    ],
)
def test_memory_for_kv(changes: dict[str, Any], expected: int) -> None:
    assert arguments(load(**changes)).kv_cache_memory_bytes == expected


def test_a_host_gives_a_part_of_its_free_memory() -> None:
    """Without --kv-memory; vLLM would take nearly all of it."""
    assert arguments(load()).kv_cache_memory_bytes > 1 << 20
    assert arguments(load(kv_cap=12345)).kv_cache_memory_bytes == 12345


def test_what_the_user_has_set_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    load()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_capabilities_are_vllms() -> None:
    found = load(options={"num_blocks": "10"}).capabilities
    assert (found.max_model_len, found.vocab_size, found.block_size) == (120, fake_vllm.VOCAB, 4)
    assert (found.num_blocks, found.max_batch_tokens, found.max_sequences) == (9, 32, 8)
    assert (found.dtype, found.eos_token_ids, found.embedding_size) == ("float32", (3,), 0)
    assert {"bans", "thinking", "grammar"} <= set(found.features)
    assert not {"lora", "embeddings"} & set(found.features)
    assert found.untested == ""


def test_an_unknown_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import version

    monkeypatch.setattr(version, "__version__", "9.0.0")
    assert "9.0.0" in load().capabilities.untested


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    shutil.copy(BUNDLED / "config.json", tmp_path)
    assert "grammar" not in load(model=str(tmp_path)).capabilities.features


def test_adapters_are_a_feature() -> None:
    adapter = LoraAdapter(name="a", path="/adapters/a", revision="1", rank=8)
    engine = load(loras=(adapter,))
    assert "lora" in engine.capabilities.features
    assert arguments(engine).enable_lora is True


# ------------------------------------------------------------------ which blocks are equal


def test_blocks_of_other_models_and_formats_are_others(tmp_path: Path) -> None:
    """Workers whose blocks hold other numbers must not share their names."""
    weights = tmp_path / "model.safetensors"
    shutil.copy(BUNDLED / "config.json", tmp_path)
    weights.write_bytes(bytes(1 << 18))
    model = str(tmp_path)
    same = load(model=model).capabilities.compat_hash
    assert load(model=model).capabilities.compat_hash == same
    assert load(model=model, max_sequences=3, kv_memory=5).capabilities.compat_hash == same
    others = {load(model=model, block_size=8).capabilities.compat_hash}
    others.add(load(model=model, options={"quantization": "fp8"}).capabilities.compat_hash)
    weights.write_bytes(bytes((1 << 18) - 1) + b"\1")
    others.add(load(model=model).capabilities.compat_hash)
    weights.write_bytes(bytes((1 << 18) + 1))
    others.add(load(model=model).capabilities.compat_hash)
    assert len(others | {same}) == 5


# ------------------------------------------------------------------ requests


def test_a_pooling_request_gives_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vllm.InprocClient, "tasks", ("embed",))
    with Inline() as engine:
        assert "embeddings" in engine.capabilities.features
        assert engine.capabilities.embedding_size == 4
        ledger = engine.submit(request(pooling="last", max_tokens=1))
        engine.run()
        assert ledger.finishes[0] is not None
        expected = fake_vllm.logits_of([17, 42, 8], None)[:4]
        assert struct.unpack("<4f", ledger.finishes[0].embedding) == pytest.approx(expected)
        engine.assert_empty()


def test_another_pooling_than_vllms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vllm.InprocClient, "tasks", ("embed",))
    with Inline() as engine:
        ledger = engine.submit(request(pooling="mean", max_tokens=1))
        engine.step()
        assert isinstance(ledger.error, InvalidRequest)
        assert "--pooling=last" in ledger.error.message


def test_a_model_without_embeddings_refuses_them() -> None:
    with Inline() as engine:
        ledger = engine.submit(request(pooling="last", max_tokens=1))
        engine.step()
        assert isinstance(ledger.error, InvalidRequest)


def test_a_classifier_gives_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_vllm.InprocClient, "tasks", ("classify",))
    with Inline() as engine:
        told = engine.capabilities
        assert (told.num_labels, told.embedding_size) == (4, 0)
        assert "classify" in told.features
        ledger = engine.submit(request(pooling="last", classify=True, max_tokens=1))
        engine.run()
        assert ledger.finishes[0] is not None
        expected = fake_vllm.logits_of([17, 42, 8], None)[:4]
        assert struct.unpack("<4f", ledger.finishes[0].embedding) == pytest.approx(expected)
        plain = engine.submit(request(pooling="last", max_tokens=1))
        engine.step()
        assert isinstance(plain.error, InvalidRequest)


def test_a_classifier_of_segments_is_not_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As BERT, whose prompt needs to say which text a token belongs to."""
    create = fake_vllm.EngineArgs.create_engine_config

    def with_types(self: Any) -> Any:
        config = create(self)
        config.model_config.hf_config.type_vocab_size = 2
        return config

    monkeypatch.setattr(fake_vllm.EngineArgs, "create_engine_config", with_types)
    monkeypatch.setattr(fake_vllm.InprocClient, "tasks", ("classify",))
    with Inline() as engine:
        assert engine.capabilities.num_labels == 0
        ledger = engine.submit(request(pooling="last", classify=True, max_tokens=1))
        engine.step()
        assert isinstance(ledger.error, InvalidRequest)
        assert "no classification head" in ledger.error.message


def test_bad_words_do_not_occur() -> None:
    with Inline() as engine:
        ((plain,),) = engine.generate([request(max_tokens=6)])
        ((other,),) = engine.generate([request(max_tokens=6, bad_words=((plain[0], plain[1]),))])
        assert other[0] == plain[0]
        assert other[1] != plain[1]


@pytest.mark.parametrize("name", ["salt", "lora"])
def test_requests_of_others_do_not_find_ones_blocks(name: str) -> None:
    adapter = LoraAdapter(name="a", path="/adapters/a", revision="1", rank=8)
    changes = {"salt": {"cache_salt": "tenant"}, "lora": {"lora": "a@1"}}[name]
    prompt = tuple(range(4, 30))
    with Inline(loras=(adapter,)) as engine:
        cached = []
        for each in ({}, {}, changes, changes):
            ledger = engine.submit(request(prompt, **each))
            engine.run()
            assert ledger.finishes[0] is not None
            cached.append(ledger.finishes[0].cached_tokens)
        assert cached == [0, 24, 0, 24]


# ------------------------------------------------------------------ the warm-up


def test_a_warm_up_computes_logprobs_for_one_and_for_two_and_leaves_nothing() -> None:
    engine = load_engine(spec(), lambda _: None, lambda: None)
    batches: list[list[int | None]] = []
    step = engine._core.step_fn

    def noted() -> Any:
        running = engine._scheduler.requests.values()
        batches.append([request.sampling.logprobs for request in running])
        return step()

    engine._core.step_fn = noted
    engine.warm_up()
    assert [1, 1] in batches
    assert [1] in batches
    assert not engine.has_requests
    assert engine.take_kv_events() == []
    assert engine.block_counts()["blocks_used"] == 0
    engine.close()


def test_a_model_that_refuses_logprobs_is_served_without_a_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = load_engine(spec(), lambda _: None, lambda: None)

    def refuses(*_: Any) -> None:
        raise InvalidRequest("vLLM refuses this request: max_logprobs is 0")

    monkeypatch.setattr(engine, "submit", refuses)
    engine.warm_up()
    assert not engine.has_requests
    engine.close()


@pytest.mark.parametrize(("device", "warm"), [("cuda", True), ("cpu", False)])
def test_an_engine_is_warmed_up_while_it_loads_where_nothing_watches_its_steps(
    device: str, warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Engine, "warm_up", lambda self: calls.append(self.version))
    describe = Engine._describe

    def described(self: Engine, wanted: EngineSpec) -> Any:
        return replace(describe(self, wanted), device=device)

    monkeypatch.setattr(Engine, "_describe", described)
    with Inline() as engine:
        assert ("warming up" in engine.stages) == warm
    assert len(calls) == warm
