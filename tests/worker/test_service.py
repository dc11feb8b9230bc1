import asyncio
import os

import pytest
from msgspec.structs import replace

from pdserve.blocks.hashing import hash_secret_id
from pdserve.engine.port import EngineState
from pdserve.errors import ConfigError, Draining, EngineDied, NotReady
from pdserve.messages.engine import EngineCapabilities, EngineRank, EngineStats, LoadProgress
from pdserve.messages.status import RankStatus, TierReport
from pdserve.messages.tiers import LaneLoad, PlanStats, TierStats
from pdserve.observe.exposition import render
from pdserve.observe.metrics import Metrics
from pdserve.observe.tier_metrics import LaneSample, MissSample, PlanSample, TierSample
from pdserve.worker import service as service_module
from pdserve.worker.config import WorkerConfig
from pdserve.worker.service import WorkerService
from tests.frontend.support import until
from tests.support.metrics_page import find


class FakeEngine:
    """The engine port under a test's control."""

    def __init__(self, spec):
        self.spec = spec
        self.state = EngineState.NEW
        self.state_reason = "not started"
        self.models = []
        self.secrets = []
        self.restarts = 0
        self.stalls = 0
        self.stalled_for = 0.0
        self.pid = None
        self.capabilities = None
        self.reported = EngineStats()
        self.stopped = 0
        self.may_become_ready = asyncio.Event()
        self.may_become_ready.set()
        self.failure = None

    def set_model(self, path, loras=()):
        assert self.state is EngineState.NEW
        self.models.append(path)
        self.loras = loras

    async def start(self, on_progress=None):
        self.state = EngineState.LOADING
        on_progress(LoadProgress(stage="reading weights", fraction=0.5))
        await self.may_become_ready.wait()
        if self.failure is not None:
            raise self.failure
        self.become_ready()

    def become_ready(self):
        self.state, self.state_reason = EngineState.READY, "ready"
        self.capabilities = EngineCapabilities(
            engine="fake",
            model_type="llama",
            dtype="float32",
            device="cpu",
            max_model_len=128,
            vocab_size=100,
            block_size=self.spec.block_size,
            num_blocks=8,
            block_bytes=1,
            max_batch_tokens=64,
            max_sequences=4,
        )

    def die(self, state, reason):
        self.state, self.state_reason = state, reason
        self.capabilities = None
        self.reported = EngineStats()

    async def stop(self):
        self.stopped += 1

    def stats(self):
        return self.reported

    def rekey(self, hash_secret):
        self.secrets.append(hash_secret)


class World:
    """A service around a fake engine."""

    def __init__(self, model, **settings):
        self.metrics = Metrics()
        self.engines = []
        config = WorkerConfig(model=str(model), **settings)
        self.service = WorkerService(config, self.make, self.metrics)
        self.progress = []

    def make(self, spec):
        self.engines.append(FakeEngine(spec))
        return self.engines[-1]

    @property
    def engine(self):
        (engine,) = self.engines
        return engine

    async def start(self):
        await self.service.start(lambda stage, fraction: self.progress.append((stage, fraction)))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    return folder


async def test_there_is_one_engine_from_beginning_to_end(model):
    world = World(model)
    assert not world.engine.models
    await world.start()
    assert world.engine.models == [str(model)]
    assert world.engines == [world.service.engine]
    await world.service.stop()


@pytest.mark.parametrize(
    ("prefix_cache", "capabilities", "tells"),
    [
        (True, {}, True),
        (True, {"kv_events": False}, False),
        (False, {"kv_events": False}, True),  # nothing is kept, and nothing is told
        (True, {"kv_events": False, "num_blocks": 0}, True),
    ],
)
async def test_a_pool_is_told_when_events_say_all(model, prefix_cache, capabilities, tells):
    world = World(model, prefix_cache=prefix_cache)
    assert world.service.tells_kv is None
    await world.start()
    world.engine.capabilities = replace(world.engine.capabilities, **capabilities)
    assert world.service.tells_kv is tells
    world.engine.die(EngineState.RESTARTING, "killed")
    assert world.service.tells_kv is None
    await world.service.stop()


async def test_a_started_worker_serves_its_model_under_every_name(model):
    world = World(model, served_model_name=("main", "alias"), threads=3)
    assert world.service.unready_reason() == "starting: not started"
    await world.start()
    assert set(world.service.cards()) == {"main", "alias"}
    assert world.service.cards()["alias"].name == "main"
    assert world.service.unready_reason() is None
    assert world.progress == [("reading weights", 0.5)]
    assert world.engine.spec.threads == 3
    await world.service.stop()


async def test_a_secret_reaches_the_engine_whenever_it_comes(model):
    world = World(model)
    assert world.service.names_id == b""
    world.service.rekey(b"before")
    await world.start()
    world.service.rekey(b"after")
    assert world.engine.secrets == [b"before", b"after"]
    assert world.service.names_id == hash_secret_id(b"after")
    await world.service.stop()


async def test_the_models_folder_names_it_unless_told_otherwise(model):
    world = World(model)
    await world.start()
    assert list(world.service.cards()) == ["tiny"]
    await world.service.stop()


async def test_while_loading_it_says_what_it_does_and_refuses(model):
    world = World(model)
    with pytest.raises(NotReady, match="starting: not started"):
        world.service.check_accepts()
    world.engine.may_become_ready.clear()
    start = asyncio.create_task(world.start())
    await asyncio.sleep(0)
    assert world.service.unready_reason() == "starting: reading weights"
    assert not world.service.cards()
    world.service.check_accepts()  # from here on its engine says itself that it is not ready
    world.engine.may_become_ready.set()
    await start
    await world.service.stop()


async def test_a_restart_shows_in_health_and_metrics_and_keeps_the_card(model):
    world = World(model)
    await world.start()
    world.engine.reported = EngineStats(output_tokens=7, running=2)
    assert world.service.sample().output_tokens == 7
    world.engine.die(EngineState.RESTARTING, "killed by SIGKILL")
    assert world.service.unready_reason() == "the engine is restarting: killed by SIGKILL"
    assert list(world.service.cards()) == ["tiny"]
    sample = world.service.sample()
    assert (sample.ready, sample.running, sample.output_tokens) == (False, 0, 7)
    world.engine.restarts = 1
    world.engine.become_ready()
    world.engine.reported = EngineStats(output_tokens=3)
    sample = world.service.sample()
    assert (sample.ready, sample.restarts, sample.output_tokens) == (True, 1, 10)
    assert find(render(world.metrics.families()).decode(), "pdserve_engine_restarts_total") == 1
    world.engine.stalls, world.engine.stalled_for = 2, 3.5
    page = render(world.metrics.families()).decode()
    labels = '{model="tiny",mode="aggregated"}'
    assert find(page, f"pdserve_engine_stalls_total{labels}") == 2
    assert find(page, f"pdserve_engine_stalled_seconds{labels}") == 3.5
    assert world.service.unready_reason() is None
    await world.service.stop()


async def test_tiers_are_told_in_bytes_and_over_restarts(model):
    world = World(model)
    await world.start()
    block = world.engine.capabilities.block_bytes
    disk = TierStats(
        tier=2,
        blocks_total=9,
        blocks_valid=4,
        blocks_filling=2,
        blocks_claimed=1,
        hit_tokens=50,
        failed=1,
        retention=8.0,
        trouble="full",
    )
    host = TierStats(tier=1, early_starts=6, early_failed=2)
    lane = LaneLoad(lane="h2d", backlog=3, bandwidth=2e9, latency=0.001)
    plans = PlanStats(source="disk", plans=2, predicted=0.5, actual=1.0, gained=3.0, lost=0.25)
    world.engine.reported = EngineStats(
        steps=5, tiers=(host, disk), lanes=(lane,), plans=(plans,), missed_blocks={"deadline": 7}
    )
    sample = world.service.sample()
    ended = PlanSample(plans=2, predicted=0.5, actual=1.0, gained=3.0, lost=0.25)
    assert sample.plans == {"disk": ended}
    assert sample.misses == {"deadline": MissSample(blocks=7)}
    assert sample.tiers == {
        "host": TierSample(early_starts=6, early_failed=2),
        "disk": TierSample(
            capacity=9 * block,
            valid=4 * block,
            filling=2 * block,
            claimed=block,
            hit_tokens=50,
            failed=1,
            retention=8.0,
            trouble=1,
        ),
    }
    assert sample.lanes == {"h2d": LaneSample(backlog=3, bandwidth=2e9, latency=0.001)}
    world.engine.reported = EngineStats(tiers=(replace(disk, hit_tokens=5),))
    assert world.service.tiers()[1] == TierReport(
        name="disk",
        capacity=9 * block,
        valid=4 * block,
        retention=8.0,
        hit_tokens=55,
        failed=2,
        trouble="full",
    )
    await world.service.stop()


async def test_a_defect_in_what_is_told_each_second_costs_no_counters(model, monkeypatch):
    monkeypatch.setattr(service_module, "_WATCH_INTERVAL", 0.01)
    world = World(model)
    calls = []

    def fails():
        calls.append(1)
        raise ValueError("a defect")

    world.service.on_second = fails
    await world.start()
    await until(lambda: calls)
    world.engine.reported = EngineStats(output_tokens=7)
    await until(lambda: len(calls) >= 3)
    world.engine.die(EngineState.RESTARTING, "killed by SIGKILL")
    assert world.service.sample().output_tokens == 7
    await world.service.stop()


async def test_an_engine_that_is_down_for_good_says_why(model):
    world = World(model)
    await world.start()
    world.engine.die(EngineState.FAILED, "died too often")
    assert world.service.unready_reason() == "the engine has failed: died too often"
    await world.service.stop()


@pytest.mark.parametrize("failure", [ConfigError("no such dtype"), EngineDied("crash")])
async def test_what_the_engine_cannot_load_is_raised(model, failure):
    world = World(model)
    world.engine.failure = failure
    with pytest.raises(type(failure), match=failure.message):
        await world.start()
    await world.service.stop()
    assert world.engine.stopped == 1


async def test_a_model_that_is_not_there_never_starts_an_engine(tmp_path):
    world = World(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no such directory"):
        await world.start()
    assert world.engine.state is EngineState.NEW
    await world.service.stop()
    assert world.engine.stopped == 0


async def test_a_draining_worker_refuses_requests(model):
    world = World(model)
    await world.start()
    world.service.check_accepts()
    world.service.drain()
    assert world.service.unready_reason() == "draining: no new requests are taken"
    with pytest.raises(Draining):
        world.service.check_accepts()
    world.service.undo_drain()
    world.service.check_accepts()
    assert world.service.unready_reason() is None
    await world.service.stop()


async def test_stopping_twice_or_before_starting_is_fine(model):
    world = World(model)
    await world.service.stop()
    await world.start()
    await world.service.stop()
    await world.service.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_ranks_are_told_with_their_processes(model):
    world = World(model)
    assert world.service.ranks() == ()
    await world.start()
    assert world.service.ranks() == ()
    two = (EngineRank(pid=os.getpid(), device="cpu"), EngineRank(pid=2**22 + 1, device="cpu"))
    world.engine.capabilities = replace(world.engine.capabilities, ranks=two)
    first, second = world.service.ranks()
    assert first == RankStatus(rank=0, pid=os.getpid(), device="cpu", state="running")
    assert (second.rank, second.state) == (1, "ended")
    await world.service.stop()
