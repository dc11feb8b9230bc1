"""The core passes the conformance suite with a fake SGLang; checks notice each planted bug."""

from __future__ import annotations

import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from pdserve.clock import SystemClock
from pdserve.engine.client import CoreClient
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import ConfigError, InvalidRequest, StepFailed
from pdserve.messages.engine import (
    ClearCache,
    CoreFailed,
    EngineSpec,
    KvEvents,
    Rejected,
    SetHashSecret,
    Stats,
    StepOutput,
    Submit,
)
from pdserve.messages.kv_events import BlockStored, PoolCleared
from pdserve.messages.lora import LoraAdapter
from pdserve.testing.engine_conformance import EngineConformance
from pdserve.testing.sinks import CheckingSink, until
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve_engines.sglang import choices, core, params
from pdserve_engines.sglang.engine import SglangPackage
from tests.conformance.test_engines import write_model
from tests.contracts.contract import load
from tests.contracts.source import SourceReader
from tests.contracts.wheels import find_wheel
from tests.engines.sglang import fake_sglang
from tests.engines.sglang.fake_sglang import ENGINE, ENGINES, FAKED, FakeTokenizerManager, greedy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from pdserve.engine.port import Engine
    from pdserve.messages.engine import Event
    from pdserve.messages.kv_events import KvEvent

E = TypeVar("E")

SEEDED = {"enable_deterministic_inference": "true"}


class TestSglang(EngineConformance):
    prompt = (17, 42, 8)
    changes: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self.spec = spec_of(tmp_path, **self.changes)

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)


class TestSglangWithoutPrefixCache(TestSglang):
    changes: ClassVar[dict[str, Any]] = {"prefix_cache": False}


class TestSglangWithWholeOutputs(TestSglang):
    """A release that ignored the wish for deltas would be served as well."""

    @pytest.fixture(autouse=True)
    def _whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send_whole_outputs(monkeypatch)


def spec_of(path: Path, **changes: Any) -> EngineSpec:
    write_model(path)
    fields: dict[str, Any] = {"block_size": 4, "max_sequences": 8, "options": SEEDED} | changes
    return EngineSpec(engine=ENGINE, model=str(path), **fields)


def send_whole_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    init = FakeTokenizerManager.__init__

    def whole(self: Any, arguments: dict[str, Any]) -> None:
        init(self, arguments | {"incremental_streaming_output": False})

    monkeypatch.setattr(FakeTokenizerManager, "__init__", whole)


class Running(EngineConformance):
    """The suite's tools, and one engine."""

    prompt = (17, 42, 8)

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def make_engine(self) -> Engine:
        return CoreClient(self.spec, make_launcher=ThreadLauncher)

    @property
    def manager(self) -> FakeTokenizerManager:
        return ENGINES[0].tokenizer_manager


class Direct:
    """A core that the test drives itself."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.core = fake_sglang.create()
        self.events: list[Event] = []
        self._woken = threading.Event()

    def __enter__(self) -> Direct:
        self.core.wake = self._woken.set
        self.core.load(self.spec, lambda progress: None)
        return self

    def __exit__(self, *error: object) -> None:
        assert self.core.close() == 0
        assert ENGINES == []

    @property
    def manager(self) -> FakeTokenizerManager:
        return ENGINES[0].tokenizer_manager

    @property
    def kv_events(self) -> list[KvEvent]:
        return [each for event in self.of(KvEvents) for each in event.events]

    @property
    def finished(self) -> int:
        deltas = [delta for event in self.of(StepOutput) for delta in event.deltas]
        return sum(delta.finish is not None for delta in deltas)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def submit(self, handle: int, **changes: Any) -> None:
        request = Running(self.spec).request(**changes)
        self.core.handle(Submit(handle=handle, request=request))

    def until(self, done: Callable[[], bool]) -> None:
        """Step as the host does until something is true."""
        deadline = SystemClock().now() + 10
        while not done():
            assert SystemClock().now() < deadline
            if not self.core.has_work:
                self._woken.wait(0.1)
                self._woken.clear()
            self.events += self.core.step()


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[Running]:
    yield Running(spec_of(tmp_path))
    assert ENGINES == []


# ---------------------------------------------------------------- planted bugs


async def check_deltas(sglang: Running) -> None:
    async with sglang.running() as engine:
        ledger = await sglang.complete(engine, max_tokens=12)
        assert ledger.tokens == [greedy(sglang.prompt, 12)]


async def check_aborts(sglang: Running) -> None:
    """The first request's abort leaves the ones after it alone."""
    async with sglang.running() as engine:
        manager = sglang.manager
        manager.pause_at = 3
        sinks = [CheckingSink(engine, sglang.request(max_tokens=9)) for _ in range(12)]
        assert str(sinks[9].handle).startswith(str(sinks[0].handle))
        await sinks[0].some()
        sinks[0].abort()
        await until(lambda: bool(manager.aborts))
        manager.pause_at = None
        for sink in sinks[1:]:
            ledger = await sink.wait()
            assert ledger.error is None, ledger.error


async def check_usage(sglang: Running) -> None:
    async with sglang.running() as engine:
        whole = (await sglang.complete(engine, max_tokens=10)).tokens[0]
        ledger = await sglang.complete(engine, max_tokens=10, output=[whole[:4]])
        assert ledger.finishes[0] is not None
        assert ledger.finishes[0].completion_tokens == 10
        assert ledger.finishes[0].prompt_tokens == 3


async def check_seeds(sglang: Running) -> None:
    async with sglang.running() as engine:
        ledger = await sglang.complete(engine, n=3, temperature=1.0, seed=5)
        assert len(set(map(tuple, ledger.tokens))) == 3


async def check_stop(sglang: Running) -> None:
    async with sglang.running() as engine:
        stop = (await sglang.complete(engine)).tokens[0][4]
        ledger = await sglang.complete(engine, stop_token_ids=(stop,))
        assert ledger.tokens[0][-1] == stop


def take_chunks_as_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    send_whole_outputs(monkeypatch)
    monkeypatch.setattr(choices.SglangChoice, "_new_tokens", lambda self, ids, meta: list(ids))


def abort_by_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choices, params):
        monkeypatch.setattr(module, "request_id", lambda handle, choice: str(handle))


def count_given_output_as_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    init = choices.SglangChoice.__init__

    def forget(self: Any, *args: Any) -> None:
        init(self, *args)
        self.made = max(0, self.made - 1)

    monkeypatch.setattr(choices.SglangChoice, "__init__", forget)


def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "choice_seed", lambda seed, prompt_index, choice: seed)


def leave_out_the_stop_token(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = choices.SglangChoice._cut

    def shorter(self: Any, tokens: list[int]) -> Any:
        kept, end = cut(self, tokens)
        return (kept[:-1] if end is not None and end[0] == "stop" else kept), end

    monkeypatch.setattr(choices.SglangChoice, "_cut", shorter)


BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Running], Awaitable[None]]]]
BUGS = {
    "whole outputs taken as deltas": (take_chunks_as_deltas, check_deltas),
    "abort by prefix id": (abort_by_prefix, check_aborts),
    "usage off by one on continuation": (count_given_output_as_prompt, check_usage),
    "one seed for all choices": (one_seed, check_seeds),
    "stop token not in output": (leave_out_the_stop_token, check_stop),
}
"""Of the bugs that are planted elsewhere: the list that is not copied in test_choices, the killed
child and the signal handler that stays in test_process_guard."""


@pytest.mark.parametrize("bug", BUGS)
async def test_the_checks_hold(sglang: Running, bug: str):
    await BUGS[bug][1](sglang)


@pytest.mark.parametrize("bug", BUGS)
async def test_planted_bugs_are_noticed(sglang: Running, bug: str, monkeypatch: pytest.MonkeyPatch):
    plant, check = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await check(sglang)


# ---------------------------------------------------------------- requests


async def test_each_choice_is_a_request_and_the_others_wait_for_the_first(sglang: Running):
    async with sglang.running() as engine:
        await sglang.complete(engine, n=3, prompt=sglang.prompt * 3, temperature=1.0)
        manager = sglang.manager
        seeds = [each["sampling_params"]["sampling_seed"] for each in manager.seen]
        assert seeds == [0, 1, 2]
        assert len({len(each["rid"]) for each in manager.seen}) == 1
        later = await sglang.complete(engine, n=3, prompt=sglang.prompt * 5, temperature=1.0)
        assert [start.cached_tokens for start in later.starts if start] == [8, 12, 12]


async def test_priorities_and_salts_are_passed_on(sglang: Running):
    async with sglang.running() as engine:
        await sglang.complete(engine, priority=7, cache_salt="tenant")
        await sglang.complete(engine)
        first, second = sglang.manager.seen
        assert (first["priority"], second["priority"]) == (7, 0)
        assert first["cache_salt"] != second["cache_salt"]
        assert "tenant" not in first["cache_salt"]


async def test_an_early_stop_ends_the_request_in_sglang(sglang: Running):
    """With end tokens ignored SGLang would go on to the length."""
    async with sglang.running() as engine:
        stop = (await sglang.complete(engine)).tokens[0][2]
        await sglang.complete(engine, stop_token_ids=(stop,), max_tokens=90)
        manager = sglang.manager
        await until(lambda: not manager.rid_to_state and not manager.running)
        assert len(manager.aborts) == 1


async def test_an_abort_reaches_sglang(sglang: Running):
    async with sglang.running() as engine:
        manager = sglang.manager
        manager.pause_at = 3
        sink = CheckingSink(engine, sglang.request(max_tokens=9, n=2))
        await sink.some()
        sink.abort()
        await until(lambda: bool(manager.aborts))
        manager.pause_at = None
        await until(lambda: not manager.rid_to_state and not manager.running)


async def test_what_sglang_refuses_is_an_invalid_request(sglang: Running):
    async with sglang.running() as engine:
        error = await sglang.error(engine, sglang.request(repetition_penalty=3.0))
        assert (type(error), error.param) == (InvalidRequest, "repetition_penalty")

        def refuse(sampling: dict[str, Any]) -> None:
            raise ValueError("no such thing")

        sglang.manager._verify = refuse
        error = await sglang.error(engine, sglang.request())
        assert type(error) is InvalidRequest
        assert "no such thing" in error.message


async def test_what_breaks_in_sglang_fails_the_request_for_others_to_try(
    sglang: Running, caplog: pytest.LogCaptureFixture
):
    async with sglang.running() as engine:

        def broken(request: Any) -> None:
            raise KeyError("state")

        sglang.manager._validate = broken
        error = await sglang.error(engine, sglang.request(n=2))
        assert type(error) is StepFailed
        await sglang.nothing_left(engine)
    assert "failed in SGLang" in caplog.text


def test_too_many_sequences_are_refused(tmp_path: Path):
    with Direct(spec_of(tmp_path, max_sequences=1, max_waiting=1)) as direct:
        for handle in range(4):
            direct.submit(handle, max_tokens=100)
        direct.until(lambda: len(direct.of(Rejected)) == 2)
        assert {event.kind for event in direct.of(Rejected)} == {"Overloaded"}


async def test_adapters_are_named_by_their_id(tmp_path: Path):
    adapter = LoraAdapter(name="law", path="/adapters/law", revision="ab12", rank=8)
    sglang = Running(spec_of(tmp_path, loras=(adapter,)))
    async with sglang.running() as engine:
        assert "lora" in sglang.capabilities(engine).features
        await sglang.complete(engine, lora=adapter.id)
        assert sglang.manager.seen[0]["lora_path"] == adapter.id


def test_another_adapter_is_refused(tmp_path: Path):
    with Direct(spec_of(tmp_path)) as direct:
        direct.submit(1, lora="other")
        direct.until(lambda: bool(direct.of(Rejected)))
        (rejected,) = direct.of(Rejected)
        assert rejected.kind == "InvalidRequest"
        assert "'other'" in rejected.message


async def test_a_grammar_goes_to_sglang_and_is_replayed_on_continuation(sglang: Running):
    async with sglang.running() as engine:
        grammar = "start: /[a-z]+/"
        whole = await sglang.complete(engine, grammar=grammar, max_tokens=9)
        ledger = await sglang.complete(
            engine, grammar=grammar, max_tokens=9, output=[whole.tokens[0][:4]]
        )
        assert ledger.tokens == whole.tokens
        first, second = sglang.manager.seen
        assert first["sampling_params"]["ebnf"].endswith(grammar)
        assert first["input_ids"] == second["input_ids"]


async def test_what_is_not_exact_is_counted_and_named(
    sglang: Running, caplog: pytest.LogCaptureFixture
):
    async with sglang.running() as engine:
        given = (await sglang.complete(engine)).tokens[0][:3]
        for _ in range(2):
            await sglang.complete(engine, output=[given], presence_penalty=0.5)
        await until(lambda: engine.stats().inexact_continuations == 2)
    assert caplog.text.count("SGLang does presence_penalty only nearly") == 1


# ---------------------------------------------------------------- events and statistics


async def test_lost_events_clear_the_pool_and_blocks_are_learnt_anew(sglang: Running):
    events: list[KvEvent] = []
    async with sglang.running() as engine:
        engine.subscribe_kv(events.extend)
        await sglang.complete(engine, prompt=sglang.prompt * 2)
        publisher = sglang.manager.publisher
        publisher.dropped = publisher.forgotten = {publisher.number}
        await sglang.complete(engine, prompt=(1, 2, 3, 4, 5, 6))
        await sglang.complete(engine, prompt=(9, 8, 7, 6, 5, 4))
        await until(lambda: any(isinstance(event, PoolCleared) for event in events))
        await until(lambda: isinstance(events[-1], BlockStored))


def test_the_cache_is_cleared_in_sglang(tmp_path: Path):
    with Direct(spec_of(tmp_path)) as direct:
        direct.submit(1, prompt=[5] * 9)
        direct.until(lambda: direct.finished == 1 and not direct.manager.running)
        assert direct.manager.pages
        direct.core.handle(ClearCache())
        direct.until(lambda: PoolCleared() in direct.kv_events)
        assert not direct.manager.pages


def test_another_secret_renames_the_blocks(tmp_path: Path):
    with Direct(spec_of(tmp_path)) as direct:
        direct.submit(1, prompt=[5] * 9)
        direct.until(lambda: direct.finished == 1)
        direct.core.handle(SetHashSecret(hash_secret=b"x" * 32))
        direct.submit(2, prompt=[5] * 9)
        direct.until(lambda: direct.finished == 2 and PoolCleared() in direct.kv_events)
        first, second = (each["cache_salt"] for each in direct.manager.seen)
        assert first != second


def test_the_load_becomes_statistics(tmp_path: Path):
    with Direct(spec_of(tmp_path)) as direct:
        total = fake_sglang.POOL_TOKENS // 4
        direct.until(lambda: direct.core.stats().blocks_total == total)

        async def load() -> list[Any]:
            return [
                SimpleNamespace(num_used_tokens=9, num_waiting_uncached_tokens=5),
                SimpleNamespace(num_used_tokens=99, num_waiting_uncached_tokens=55),
            ]

        direct.manager.get_loads = load
        direct.until(lambda: any(event.stats.blocks_used == 3 for event in direct.of(Stats)))
        stats = direct.core.stats()
        assert (stats.blocks_free, stats.uncomputed_tokens, stats.kv_tokens) == (total - 3, 5, 9)


def test_a_broken_task_ends_the_core(tmp_path: Path):
    """The node starts another one."""
    with Direct(spec_of(tmp_path)) as direct:

        async def broken() -> None:
            raise RuntimeError("the sockets are gone")

        assert direct.core._loop is not None
        direct.core._loop.submit(broken(), "sglang-kv-events")
        direct.until(lambda: bool(direct.of(CoreFailed)))
        assert "the sockets are gone" in direct.of(CoreFailed)[0].message


def test_statistics_and_a_cache_that_fail_do_not_end_the_core(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Each is said once, and statistics go on when they come again."""
    with Direct(spec_of(tmp_path)) as direct:
        asked = 0

        async def broken() -> list[Any]:
            nonlocal asked
            asked += 1
            raise RuntimeError("busy")

        direct.manager.get_loads = direct.manager.flush_cache = broken
        direct.core.handle(ClearCache())
        direct.until(lambda: asked > 3)
        direct.submit(1, prompt=[5] * 9)
        direct.until(lambda: direct.finished == 1)
        assert not direct.of(CoreFailed)

        async def load() -> list[Any]:
            return [SimpleNamespace(num_used_tokens=9, num_waiting_uncached_tokens=5)]

        direct.manager.get_loads = load
        direct.until(lambda: any(event.stats.kv_tokens == 9 for event in direct.of(Stats)))
    said = [record.message for record in caplog.records if "busy" in record.message]
    assert len([line for line in said if "load" in line]) == 1
    assert len([line for line in said if "cache" in line]) == 1


# ---------------------------------------------------------------- what it is


async def test_what_the_card_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_sglang, "POOL_TOKENS", 100)
    sglang = Running(spec_of(tmp_path))
    async with sglang.running() as engine:
        capabilities = sglang.capabilities(engine)
        assert capabilities.features == ("grammar",)
        assert capabilities.kv_events
        assert capabilities.untested == ""
        assert capabilities.max_model_len == 98
        assert "pool holds 100 tokens, fewer than the context of 120" in capabilities.reduced


async def test_another_release_starts_as_untested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_sglang, "VERSION", "0.9.1")
    sglang = Running(spec_of(tmp_path))
    async with sglang.running() as engine:
        assert "SGLang 0.9.1 is untested" in sglang.capabilities(engine).untested
        await sglang.complete(engine)


def test_an_option_that_sglang_refuses_ends_the_start(tmp_path: Path):
    made = fake_sglang.create()
    fields = (*fake_sglang.FIELDS, "tpx")
    made._find = lambda: SglangPackage(fake_sglang.FakeEngine, fields, "0.5.23")
    with pytest.raises(ConfigError, match=r"refuses this configuration: Unexpected .*'tpx'"):
        made.load(spec_of(tmp_path, options={"tpx": "1"}), lambda progress: None)
    assert made.close() == 0


def test_other_children_of_the_process_are_a_reason_to_refuse(tmp_path: Path):
    made = core.SglangCore(
        SystemClock(), find=lambda: pytest.fail("imported"), children=lambda: frozenset({4})
    )
    made._find = fake_sglang.create()._find
    with pytest.raises(ConfigError, match="an engine process of its own"):
        made.load(spec_of(tmp_path), lambda progress: None)
    assert made.close() == 0


def test_without_the_package_the_remedy_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[sglang\]'"):
        load_core("pdserve_engines.sglang:create", SystemClock()).load(
            spec_of(tmp_path), lambda progress: None
        )


# ---------------------------------------------------------------- the fake


def behaviours() -> list[dict[str, str]]:
    text = Path(__file__).with_name("behaviours.toml").read_text("utf-8")
    found: list[dict[str, str]] = tomllib.loads(text)["behaviour"]
    return found


def test_every_behaviour_of_the_fake_has_a_source():
    names = [each["name"] for each in behaviours()]
    assert len(names) == len(set(names))
    assert set(names) == FAKED
    assert all(each["says"] and ":" in each["at"] for each in behaviours())


def test_the_sources_of_behaviours_are_in_the_wheel():
    reader = SourceReader(find_wheel("sglang", "0.5.23"))
    try:
        assert [each["at"] for each in behaviours() if not reader.exists(each["at"])] == []
    finally:
        reader.close()


def test_the_fake_takes_only_arguments_that_sglang_has():
    (entry,) = [entry for entry in load("sglang").entries if entry.at.endswith(":ServerArgs")]
    assert set(fake_sglang.FIELDS) <= set(entry.fields or ())
