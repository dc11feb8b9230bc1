"""Two engines whose transports really connect: a prompt is computed in one and goes on in the
other, token for token, over every backend that this machine has."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest
from msgspec.structs import replace

from pdserve.engine.client import CoreClient, CoreClientOptions
from pdserve.engine.launcher import ProcessLauncher
from pdserve.engine.port import Engine, EngineState
from pdserve.engine.restart import CoreRestartPolicy
from pdserve.errors import ConfigError, EngineDied, EngineError, LinkLost, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.engine import EngineSpec, TransferSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.output_checker import OutputChecker
from pdserve.testing.scripted import ENGINE, reference_tokens
from pdserve.testing.sinks import until
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pdserve.engine.launcher import CoreLauncher
    from pdserve.errors import PdserveError
    from pdserve.messages.handoff import Handoff
    from pdserve.messages.request import TokenDelta
    from pdserve.messages.transfer import TransferTicket

DIE = 92
FAST = CoreRestartPolicy(max_restarts=3, first_delay=0.01, max_delay=0.01)


def spec(*backends: str, **options: str) -> EngineSpec:
    return EngineSpec(
        engine=ENGINE,
        model="",
        block_size=4,
        max_batch_tokens=16,
        max_sequences=8,
        options={"die_on": str(DIE)} | options,
        transfer=TransferSpec(backends=backends, verify="all"),
    )


def request(length: int = 42, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 8} | sampling
    tokens = [1 + i % 50 for i in range(length)]
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(tokens), sampling=SamplingParams(**fields)
    )


class Remote:
    """The decode worker's sink."""

    def __init__(self, wanted: GenerateRequest) -> None:
        self.ledger = OutputChecker(wanted)
        self.cached: int | None = None
        self.opened: dict[int, TransferTicket] = {}
        self.lost: dict[int, PdserveError] = {}

    def on_admitted(self, cached_tokens: int) -> None:
        self.cached = cached_tokens

    def on_opened(self, attempt: int, ticket: TransferTicket) -> None:
        self.opened[attempt] = ticket

    def on_attempt_lost(self, attempt: int, error: PdserveError) -> None:
        self.lost[attempt] = error

    def on_delta(self, delta: TokenDelta) -> None:
        self.ledger.take(delta)

    def on_error(self, error: PdserveError) -> None:
        self.ledger.fail(error)


class Prefilling:
    """The prefill worker's sink."""

    def __init__(self) -> None:
        self.handoff: Handoff | None = None
        self.sent = False
        self.error: PdserveError | None = None

    def on_prefilled(self, handoff: Handoff) -> None:
        self.handoff = handoff

    def on_sent(self) -> None:
        self.sent = True

    def on_error(self, error: PdserveError) -> None:
        self.error = error


D, P = (NodeId("d"), 1), (NodeId("p"), 2)


E = TypeVar("E", bound=Engine)


class Wired(Generic[E]):
    """A decode and a prefill engine, wired as their nodes would."""

    def __init__(self, d: E, p: E) -> None:
        self.d, self.p = d, p
        self.engines = {D: d, P: p}
        for here, engine in self.engines.items():
            engine.on_transfer(self._asking(here))
            engine.attach(*here)

    def _asking(self, here: tuple[NodeId, int]):
        def ask(node, epoch, question, timeout, answered) -> None:
            peer = self.engines.get((node, epoch))
            if peer is None:
                answered(LinkLost("nobody is there"))
            else:
                peer.transfer_call(*here, question, answered)

        return ask

    async def hand_over(self, wanted: GenerateRequest) -> tuple[Remote, Prefilling]:
        """One request from admission to its last token."""
        remote, prefilling = Remote(wanted), Prefilling()
        handle = self.d.submit_remote(wanted, remote)
        await until(lambda: remote.cached is not None)
        self.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.opened or remote.lost))
        assert not remote.lost, remote.lost
        self.p.prefill(wanted, remote.opened[1], *D, prefilling)
        await until(lambda: bool(prefilling.handoff or prefilling.error))
        assert prefilling.handoff is not None, prefilling.error
        self.d.activate(handle, 1, prefilling.handoff)
        await until(lambda: remote.ledger.done or bool(remote.lost))
        assert not remote.lost, remote.lost
        await until(lambda: prefilling.sent)
        return remote, prefilling


class Pair(Wired[CoreClient]):
    """Each in a process of its own, or where `make_launcher` says."""

    def __init__(
        self,
        d: EngineSpec,
        p: EngineSpec,
        make_launcher: Callable[[], CoreLauncher] | None = None,
        **options: Any,
    ) -> None:
        chosen = CoreClientOptions(**({"restart": FAST} | options))
        super().__init__(
            CoreClient(d, chosen, make_launcher=make_launcher),
            CoreClient(p, chosen, make_launcher=make_launcher),
        )


@asynccontextmanager
async def pair(d: EngineSpec, p: EngineSpec, **options: Any) -> AsyncIterator[Pair]:
    both = Pair(d, p, **options)
    try:
        await asyncio.gather(both.d.start(), both.p.start())
        yield both
    finally:
        await asyncio.gather(both.d.stop(), both.p.stop())
    assert both.d.leaked_blocks == both.p.leaked_blocks == 0


async def settled(engine: CoreClient, wanted) -> None:
    """Its statistics say so, sooner or later."""

    def met() -> bool:
        engine.query_stats()
        return bool(wanted(engine.stats()))

    await until(met)


@pytest.mark.parametrize("make", [ProcessLauncher, ThreadLauncher])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_a_prompt_goes_on_elsewhere_token_for_token(
    backend: str, make: Callable[[], CoreLauncher]
) -> None:
    async with pair(spec(backend), spec(backend), make_launcher=make) as both:
        assert both.d.capabilities is not None
        assert both.d.capabilities.transfers == (backend,)
        wanted = request()
        remote, _ = await both.hand_over(wanted)
        assert remote.ledger.tokens[0] == reference_tokens(wanted)
        await settled(both.d, lambda stats: stats.received_tokens)
        stats, sent = both.d.stats(), both.p.stats()
        assert stats.received_tokens == len(wanted.prompt)
        assert stats.computed_tokens == wanted.sampling.max_tokens - 1
        assert stats.received_blocks == 11
        block_bytes = both.d.capabilities.block_bytes
        assert stats.received_bytes == 11 * block_bytes
        await until(lambda: bool(both.d.paths() and both.d.paths()[0].received_bytes))
        (path,) = both.d.paths()
        assert (path.node, path.epoch, path.backend, path.down) == ("p", 2, backend, "")
        assert path.received_bytes == 11 * block_bytes
        await settled(both.p, lambda stats: not stats.sending and not stats.blocks_used)
        assert both.p.stats().sent_bytes == path.received_bytes, sent

        again, _ = await both.hand_over(wanted)  # the prefix is there: only the rest travels
        assert again.cached
        assert again.ledger.tokens[0] == reference_tokens(wanted)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_many_at_once(backend: str) -> None:
    async with pair(spec(backend), spec(backend)) as both:
        wanted = [request(20 + 7 * i, seed=i, max_tokens=5) for i in range(6)]
        done = await asyncio.gather(*(both.hand_over(one) for one in wanted))
        for one, (remote, _) in zip(wanted, done, strict=True):
            assert remote.ledger.tokens[0] == reference_tokens(one)
        assert [path.backend for path in both.d.paths()] == [backend]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_the_stricter_of_two_settings_is_used(backend: str) -> None:
    """A decode worker that compares all got a sample only, and refused every prompt's KV."""
    strict = spec(backend)
    assert strict.transfer is not None
    sampling = replace(strict.transfer, verify="sample")
    async with pair(strict, replace(strict, transfer=sampling)) as both:
        remote, prefilling = await both.hand_over(request())
        assert remote.ledger.tokens[0] == reference_tokens(request())
        assert remote.opened[1].verify == "all"
        assert prefilling.handoff is not None
        assert len(prefilling.handoff.checksums) == len(remote.opened[1].blocks)


async def test_the_better_road_is_taken_and_the_reason_is_told() -> None:
    async with pair(spec(), spec("tcp")) as both:
        assert both.d.capabilities is not None
        assert both.d.capabilities.transfers == ("shm", "tcp")
        await both.hand_over(request())
        await until(lambda: bool(both.d.paths()))
        (path,) = both.d.paths()
        assert path.backend == "tcp"
        assert "shm: not offered (there)" in path.why
        await until(lambda: bool(both.p.paths()))
        assert both.p.paths()[0].why == "the peer chose it"


async def test_what_was_asked_for_and_cannot_be_fails_by_name() -> None:
    engine = CoreClient(spec("rdma"))
    with pytest.raises(ConfigError, match="rdma"):
        await engine.start()
    engine = CoreClient(spec("pigeon"))
    with pytest.raises(ConfigError, match="pigeon"):
        await engine.start()
    async with pair(spec("shm"), spec("tcp")) as both:
        remote = Remote(request())
        handle = both.d.submit_remote(request(), remote)
        await until(lambda: remote.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.lost))
        assert isinstance(remote.lost[1], TransferRefused)
        assert "shm: not offered (there)" in remote.lost[1].message
        both.d.prefill_here(handle)
        await until(lambda: remote.ledger.done)
        assert remote.ledger.tokens[0] == reference_tokens(request())


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_a_core_that_dies_takes_its_attempts_along_and_comes_back(backend: str) -> None:
    async with pair(spec(backend), spec(backend)) as both:
        remote, prefilling = Remote(request()), Prefilling()
        handle = both.d.submit_remote(request(), remote)
        await until(lambda: remote.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.opened))
        poisoned = request()
        poisoned = GenerateRequest(
            request_id="r",
            model="m",
            prompt=token_ids([*poisoned.prompt[:-1], DIE]),
            sampling=poisoned.sampling,
        )
        both.p.prefill(poisoned, remote.opened[1], *D, prefilling)
        await until(lambda: prefilling.error is not None)
        assert isinstance(prefilling.error, EngineDied)
        await until(lambda: bool(remote.lost))  # the path broke, and D says so by itself
        both.d.prefill_here(handle)
        await until(lambda: remote.ledger.done)
        assert remote.ledger.tokens[0] == reference_tokens(request())
        await until(lambda: both.p.state is EngineState.READY)
        wanted = request(30, seed=3)
        found, _ = await both.hand_over(wanted)  # attached again, in the same name
        assert found.ledger.tokens[0] == reference_tokens(wanted)
        await settled(both.d, lambda stats: not stats.blocks_quarantined)


async def test_an_engine_without_transports_refuses() -> None:
    plain = EngineSpec(engine=ENGINE, model="", block_size=4)
    async with pair(plain, plain, make_launcher=ThreadLauncher) as both:
        with pytest.raises(TransferRefused):
            both.d.submit_remote(request(), Remote(request()))
        answers: list[object] = []
        both.d.transfer_call(*P, None, answers.append)  # type: ignore[arg-type]
        assert len(answers) == 1


@pytest.mark.parametrize("backend", ["shm", "tcp"])
async def test_stopping_in_the_middle_leaves_nothing(backend: str, caplog: Any) -> None:
    async with pair(
        spec(backend), spec(backend, step_ms="30"), make_launcher=ThreadLauncher
    ) as both:
        remote, prefilling = Remote(request()), Prefilling()
        handle = both.d.submit_remote(request(), remote)
        await until(lambda: remote.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.opened))
        both.p.prefill(request(), remote.opened[1], *D, prefilling)
        await asyncio.gather(both.d.stop(), both.p.stop())
        assert remote.ledger.error is not None
        assert prefilling.error is not None
        assert await both.d.drain(0.0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_draining_waits_for_prompts_of_both_kinds() -> None:
    async with pair(spec("shm"), spec("shm"), make_launcher=ThreadLauncher) as both:
        remote, prefilling = Remote(request()), Prefilling()
        handle = both.d.submit_remote(request(), remote)
        await until(lambda: remote.cached is not None)
        assert not await both.d.drain(0.01)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.opened))
        both.p.prefill(request(), remote.opened[1], *D, prefilling)
        assert await both.p.drain(20.0)
        assert prefilling.sent
        assert prefilling.handoff is not None
        both.d.activate(handle, 1, prefilling.handoff)
        assert await both.d.drain(20.0)
        assert remote.ledger.tokens[0] == reference_tokens(request())


async def test_an_aborted_prefill_falls_silent_and_gives_all_back() -> None:
    async with pair(spec("tcp"), spec("tcp", step_ms="20"), make_launcher=ThreadLauncher) as both:
        remote, prefilling = Remote(request()), Prefilling()
        handle = both.d.submit_remote(request(), remote)
        await until(lambda: remote.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(remote.opened))
        both.p.abort(both.p.prefill(request(), remote.opened[1], *D, prefilling))
        both.d.abort(handle)
        await settled(both.d, lambda stats: not stats.blocks_used + stats.blocks_quarantined)
        await settled(both.p, lambda stats: not stats.blocks_used + stats.sending)
        assert (prefilling.handoff, prefilling.sent, prefilling.error) == (None, False, None)
        assert not remote.ledger.tokens[0]


async def test_a_mistake_in_a_sink_is_no_silence() -> None:
    class Mistaken(Remote):
        def on_opened(self, attempt: int, ticket: TransferTicket) -> None:
            raise ZeroDivisionError

    class Mistaking(Prefilling):
        def on_prefilled(self, handoff: Handoff) -> None:
            raise ZeroDivisionError

    async with pair(spec("shm"), spec("shm"), make_launcher=ThreadLauncher) as both:
        remote = Mistaken(request(20))
        handle = both.d.submit_remote(request(20), remote)
        await until(lambda: remote.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: remote.ledger.done)
        assert isinstance(remote.ledger.error, EngineError)

        other, prefilling = Remote(request(20)), Mistaking()
        handle = both.d.submit_remote(request(20), other)
        await until(lambda: other.cached is not None)
        both.d.open_attempt(handle, 1, *P)
        await until(lambda: bool(other.opened))
        both.p.prefill(request(20), other.opened[1], *D, prefilling)
        await until(lambda: prefilling.error is not None)
        assert isinstance(prefilling.error, EngineError)
        both.d.abort(handle)
