"""The real vLLM for tests: engines that are loaded once and serve many tests.

Loading takes about 12 seconds, so a test's core takes an engine that an earlier test has loaded,
and its close only drops what it has submitted. Tests of loading and ending use the real core.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tqdm import tqdm

import pdserve
from pdserve.clock import SystemClock
from pdserve.messages.engine import EngineSpec, LoadProgress
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from pdserve_engines.vllm import core as vllm_core
from pdserve_engines.vllm import engine as vllm_engine
from pdserve_engines.vllm.core import VllmCore
from pdserve_engines.vllm.engine import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import ForkServerContext

    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.messages.engine import EngineCapabilities
    from pdserve_engines.vllm.block_names import BlockNames
    from pdserve_engines.vllm.engine import Engine
    from pdserve_engines.vllm.kv_tiers.tiers import VllmTiers

BUNDLED = Path(pdserve.__file__).parent / "bundled"
BLOCK = 32
"""The only block size, and its multiples, that vLLM's attention on CPUs takes."""
EAGER = {"enforce_eager": "true"}
"""Nothing is compiled: a compilation takes longer than all tests."""
SECRET = b"a secret of tests"

MAIN = EngineSpec(
    engine="tests.engines.vllm.real:SharedCore",
    model=str(BUNDLED),
    dtype="float32",
    block_size=BLOCK,
    max_model_len=192,
    max_batch_tokens=64,
    max_sequences=12,
    hash_secret=SECRET,
    options=EAGER | {"num_gpu_blocks_override": "41"},
)
"""Prompts are computed in several chunks; 12 sequences of full length do not fit the pool."""

MARKS = [pytest.mark.vllm, pytest.mark.timeout(300)]
"""The `pytestmark` of every file with the real vLLM."""


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def require_vllm() -> None:
    """Skip the module where there is no vLLM, unless the run asks for it."""
    if has_vllm():
        return
    if os.environ.get("PDSERVE_REQUIRE_VLLM", "") not in ("", "0"):
        pytest.fail("PDSERVE_REQUIRE_VLLM is set, and there is no vLLM", pytrace=False)
    pytest.skip("needs the environment of `make vllm`", allow_module_level=True)


# ---------------------------------------------------------------- engines that stay


class _Loaded:
    """An engine, and the core that has it at the moment."""

    def __init__(self, spec: EngineSpec) -> None:
        self.owner: SharedCore | None = None
        self.stages: list[LoadProgress] = []
        with quiet(), forked_workers(spec):
            moves = spec.transfer is not None
            self.engine = load_engine(spec, self.stages.append, self._on_failure, moves)
        _start_threads(self.engine)

    def _on_failure(self) -> None:
        if self.owner is not None:
            self.owner._on_executor_failure()


_LOADED: dict[bytes, _Loaded] = {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of vLLM and of what it loads are not errors."""
    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # or it starts a thread that stays
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.monitor_interval = interval


@contextlib.contextmanager
def forked_workers(spec: EngineSpec) -> Iterator[None]:
    """vLLM's worker processes of these engines are forks of one that has imported vLLM; each that
    vLLM spawns takes nine seconds for that. So they are no children of this process, and do not
    follow it at once."""
    vllm_engine._set_environment(spec)  # before the import
    from vllm.v1.executor import multiproc_executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", _fork_server)
        yield


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker"])
    return context


def loaded(spec: EngineSpec) -> _Loaded:
    """The engine of a spec; the first call loads it. The core opens its tiers, and decides what
    its connector is for."""
    spec = msgspec.structs.replace(spec, tiers=None)
    if spec.transfer is not None:
        must = msgspec.structs.replace(spec.transfer, optional=False)
        spec = msgspec.structs.replace(spec, transfer=must)
    key = msgspec.msgpack.encode(spec)
    if key not in _LOADED:
        _LOADED[key] = _Loaded(spec)
    return _LOADED[key]


def unload(*specs: EngineSpec) -> None:
    """End the engines of these specs, or all, as the fixture `engines` does. They end at the same
    time, since each waits some seconds for its worker process."""
    keys = [msgspec.msgpack.encode(spec) for spec in specs] or [*_LOADED]
    ending = [_LOADED.pop(key).engine for key in keys]
    with ThreadPoolExecutor(max(1, len(ending))) as threads:
        list(threads.map(lambda engine: engine.close(), ending))


def _start_threads(engine: Engine) -> None:
    """vLLM's threads for grammars start when they are first used, which would look like a leak of
    the test that does."""
    manager = engine._core.structured_output_manager
    for name in ("executor", "executor_for_fillmask"):
        pool = getattr(manager, name, None)
        if pool is None:
            continue
        together = threading.Barrier(pool._max_workers)
        for waiting in [pool.submit(together.wait, 10.0) for _ in range(pool._max_workers)]:
            waiting.result(10.0)


class SharedCore(VllmCore):
    """The core under test, around an engine that is already loaded."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self._loaded: _Loaded | None = None

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        self._loaded = one = loaded(spec)
        one.owner = self
        for stage in one.stages:
            progress(stage)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm_core, "load_engine", lambda *_: one.engine)
            return super().open(spec, progress)

    def shutdown(self) -> int:
        """Leave the engine as it was loaded: no requests, no cached blocks, no events."""
        self._stop_threads()
        engine, self._engine = self._engine, None
        self._choices.clear()
        self._submissions_here.clear()
        if engine is None or self._loaded is None:
            return 0
        self._loaded.owner = None
        self._end_tiers(engine)
        settle(engine)
        return engine.block_counts()["blocks_used"]

    def _end_tiers(self, engine: Engine) -> None:
        """Requests that load keep their blocks until the tiers have let them go."""
        if self._tiers is None:
            return
        engine.abort(list(engine._scheduler.requests))
        deadline = time.monotonic() + 30.0
        while engine.has_work:
            engine.step()
            for done in self._tiers.advance(self.clock.now()):
                engine.end_load(done.key, done.local, done.loaded, whole=done.whole)
            assert time.monotonic() < deadline, "a load does not end"
        engine.core.scheduler.connector.tiers = None
        self._close_tiers()

    @property
    def tiers(self) -> VllmTiers:
        """The tiers below its cache."""
        assert self._tiers is not None
        return self._tiers

    @property
    def engine(self) -> Engine:
        """What it drives."""
        return self._vllm

    @property
    def names(self) -> BlockNames:
        """The names of its blocks."""
        assert self._names is not None
        return self._names


def settle(engine: Engine) -> None:
    """End what an engine has, and drop what it has cached."""
    engine.abort(list(engine._scheduler.requests))
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
    engine.take_kv_events()
    if engine.core.scheduler.connector is not None:
        engine.core.scheduler.connector.planner.take_events()
    assert engine.faulty() == []


# ---------------------------------------------------------------- requests


def request(prompt: Sequence[int] = (17, 42, 8), **changes: Any) -> GenerateRequest:
    """A greedy request; keyword arguments go to it or to its sampling parameters."""
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return GenerateRequest(
        request_id="real",
        model="model",
        prompt=token_ids(prompt),
        sampling=SamplingParams(**(defaults | sampling)),
        **changes,
    )


class RealEngine(InlineEngine):
    """A core in the test's own thread. Requests that wait for a grammar or for their images are
    waited for."""

    def run(self) -> None:
        """Step until nothing is left to do."""
        deadline = time.monotonic() + 120.0
        core: Any = self.core
        while self.core.has_work or len(core._images) or self.core.wake_at() is not None:
            if not self.core.has_work and len(core._images):
                time.sleep(0.001)
                continue
            if not self.core.has_work:
                time.sleep(max(0.0, (self.core.wake_at() or 0.0) - time.monotonic()))
                continue
            self.step()
            assert self.failure is None, f"the core failed: {self.failure}"
            assert time.monotonic() < deadline, "the core makes no progress"


def inline(spec: EngineSpec = MAIN, mover: KvConnector | None = None) -> InlineEngine:
    """A core in the test's own thread."""
    core = SharedCore()
    if mover is not None:
        core.use_connector(mover)
    return RealEngine(core, spec)


def answer(engine: InlineEngine, **changes: Any) -> list[list[int]]:
    """The tokens of one request, alone."""
    return engine.generate([request(**changes)])[0]


def keeps(*specs: EngineSpec) -> Any:
    """A fixture for a module: its engines are loaded before the first test looks for leaks."""

    @pytest.fixture(scope="module", autouse=True)
    def engines_of_this_file(engines: None) -> None:
        for spec in specs:
            loaded(spec)

    return engines_of_this_file
