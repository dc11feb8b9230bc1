"""Tests that an engine keeps to `pdserve.engine.port.Engine`: a suite to inherit.

    class TestMyEngine(EngineConformance):
        prompt = (17, 42, 8)

        def make_engine(self) -> Engine:
            return MyEngine(...)

The engine must be deterministic for greedy requests. The suite needs pytest with pytest-asyncio in
auto mode. It reads the engine's features from its capabilities and tests each of them.
"""

from __future__ import annotations

import asyncio
import random
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotReady,
    PdserveError,
)
from pdserve.messages.kv_events import BlockStored
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.sinks import CheckingSink, until
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.engine.port import Engine
    from pdserve.messages.engine import EngineCapabilities, LoadProgress
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.request import Pooling
    from pdserve.testing.output_checker import OutputChecker

__all__ = ["EngineConformance"]


class EngineConformance:
    """Subclass it as `Test…`, with `make_engine` and a prompt of at least three ordinary tokens."""

    prompt: tuple[int, ...]

    def make_engine(self) -> Engine:
        """A new engine that is not started."""
        raise NotImplementedError

    # ------------------------------------------------------------------ tools

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        """A started engine, stopped afterwards."""
        engine = self.make_engine()
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()

    def request(self, prompt: Sequence[int] | None = None, **changes: Any) -> GenerateRequest:
        """A greedy request; keyword arguments go to it or to its sampling parameters."""
        fields = SamplingParams.__struct_fields__
        sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
        defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        return GenerateRequest(
            request_id=f"conformance-{id(changes)}",
            model="model",
            prompt=token_ids(self.prompt if prompt is None else prompt),
            sampling=SamplingParams(**(defaults | sampling)),
            **changes,
        )

    @staticmethod
    def capabilities(engine: Engine) -> EngineCapabilities:
        """The capabilities of an engine that is ready."""
        assert engine.capabilities is not None
        return engine.capabilities

    async def complete(self, engine: Engine, **changes: Any) -> OutputChecker:
        """Run one request; it must not fail."""
        ledger = await CheckingSink(engine, self.request(**changes)).wait()
        assert ledger.error is None, ledger.error
        return ledger

    async def error(self, engine: Engine, request: GenerateRequest) -> PdserveError:
        """Run a request that must fail, at once or later."""
        try:
            sink = CheckingSink(engine, request)
        except PdserveError as error:
            return error
        ledger = await sink.wait()
        assert ledger.error is not None, "the request was served"
        return ledger.error

    async def nothing_left(self, engine: Engine) -> None:
        """Wait until the engine has no running sequences and no held blocks."""
        query = getattr(engine, "query_stats", lambda: None)

        def at_rest() -> bool:
            query()
            stats = engine.stats()
            return not (stats.running or stats.waiting or stats.blocks_used)

        await until(at_rest)

    # ------------------------------------------------------------------ life

    async def test_it_is_not_ready_before_start_and_draining_after_stop(self) -> None:
        engine = self.make_engine()
        assert engine.capabilities is None
        assert isinstance(await self.error(engine, self.request()), NotReady)
        await engine.start()
        assert engine.capabilities is not None
        await engine.stop()
        assert engine.capabilities is None
        assert isinstance(await self.error(engine, self.request()), Draining)

    async def test_start_reports_progress(self) -> None:
        stages: list[LoadProgress] = []
        engine = self.make_engine()
        await engine.start(stages.append)
        await engine.stop()
        assert stages
        assert all(stage.stage for stage in stages)

    async def test_stop_ends_what_runs_and_may_be_repeated(self) -> None:
        engine = self.make_engine()
        await engine.start()
        limit = self.capabilities(engine).max_model_len
        sinks = [CheckingSink(engine, self.request(max_tokens=limit)) for _ in range(4)]
        await asyncio.gather(engine.stop(), engine.stop())
        await engine.stop()
        for sink in sinks:
            ledger = await sink.wait()
            assert ledger.error is not None or all(ledger.finishes)

    async def test_an_engine_can_be_stopped_before_it_was_started(self) -> None:
        await self.make_engine().stop()

    async def test_a_cancelled_start_leaves_nothing_behind(self) -> None:
        engine = self.make_engine()
        starting = asyncio.ensure_future(engine.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert engine.capabilities is None

    async def test_drain_waits_for_what_runs_and_takes_nothing_new(self) -> None:
        async with self.running() as engine:
            sink = CheckingSink(engine, self.request(max_tokens=20))
            assert await engine.drain(10.0)
            assert sink.checked().done
            with pytest.raises(Draining):
                engine.submit(self.request(), sink)
            assert await engine.drain(0.0)

    # ------------------------------------------------------------------ output

    async def test_a_request_yields_its_tokens_and_one_end(self) -> None:
        async with self.running() as engine:
            ledger = await self.complete(engine, max_tokens=8)
            (finish,) = ledger.finishes
            assert finish is not None
            assert finish.reason == "length"
            assert len(ledger.tokens[0]) == 8
            vocab_size = self.capabilities(engine).vocab_size
            assert all(0 <= token < vocab_size for token in ledger.tokens[0])

    async def test_greedy_output_repeats(self) -> None:
        async with self.running() as engine:
            once, again = await self.complete(engine), await self.complete(engine)
            assert once.tokens == again.tokens

    async def test_the_first_token_says_how_it_came_about(self) -> None:
        """The first token's statistics come once and agree with those at the end."""
        async with self.running() as engine:
            ledger = await self.complete(engine, n=2, temperature=1.0, seed=3)
            assert all(ledger.starts)
            whole = ledger.tokens[0]
            ledger = await self.complete(engine, output=[whole[:3]], temperature=1.0, seed=3)
            assert all(ledger.starts)

    async def test_every_choice_ends_once(self) -> None:
        async with self.running() as engine:
            ledger = await self.complete(engine, n=3, max_tokens=5, temperature=1.0, seed=3)
            assert [len(tokens) for tokens in ledger.tokens] == [5, 5, 5]

    async def test_many_requests_at_once_do_not_mix(self) -> None:
        async with self.running() as engine:
            prompts = [self.prompt * (i % 3 + 1) + self.prompt[: i % 3] for i in range(24)]
            alone = [(await self.complete(engine, prompt=p)).tokens for p in prompts[:6]]
            sinks = [CheckingSink(engine, self.request(prompt=p)) for p in prompts]
            ledgers = [await sink.wait() for sink in sinks]
            assert [ledger.tokens for ledger in ledgers[:6]] == alone
            await self.nothing_left(engine)

    async def test_a_stop_id_ends_the_choice_and_is_named(self) -> None:
        async with self.running() as engine:
            tokens = (await self.complete(engine)).tokens[0]
            stop = tokens[4]
            ledger = await self.complete(engine, stop_token_ids=(stop,))
            assert ledger.tokens[0] == tokens[: tokens.index(stop) + 1]
            assert ledger.finishes[0] is not None
            assert (ledger.finishes[0].reason, ledger.finishes[0].stop_reason) == ("stop", stop)

    async def test_an_end_token_ends_the_choice_unless_ignored(self) -> None:
        async with self.running() as engine:
            tokens = (await self.complete(engine)).tokens[0]
            eos = (tokens[4],)
            ledger = await self.complete(engine, eos_token_ids=eos, ignore_eos=False)
            assert ledger.tokens[0] == tokens[: tokens.index(eos[0]) + 1]
            assert ledger.finishes[0] is not None
            assert (ledger.finishes[0].reason, ledger.finishes[0].stop_reason) == ("stop", None)
            ledger = await self.complete(engine, eos_token_ids=eos, ignore_eos=True)
            assert ledger.tokens[0] == tokens

    async def test_min_tokens_come_before_any_stop(self) -> None:
        async with self.running() as engine:
            first = (await self.complete(engine)).tokens[0][0]
            ledger = await self.complete(engine, stop_token_ids=(first,), min_tokens=6)
            assert len(ledger.tokens[0]) >= 6

    async def test_given_output_is_continued(self) -> None:
        async with self.running() as engine:
            whole = (await self.complete(engine, max_tokens=10)).tokens[0]
            for given in (1, 5, 9):
                ledger = await self.complete(engine, max_tokens=10, output=[whole[:given]])
                assert ledger.tokens[0] == whole
            ledger = await self.complete(engine, max_tokens=10, output=[whole])
            assert ledger.tokens[0] == whole

    async def test_choices_go_on_after_every_cut(self) -> None:
        """Each choice has its own length of given output; choices that have ended get no deltas."""
        shape: dict[str, Any] = {"n": 3, "max_tokens": 9, "temperature": 0.9, "seed": 7}
        shape |= {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1}
        async with self.running() as engine:
            whole = await self.complete(engine, **shape)
            for cut in range(10):
                lengths = (cut, cut * 3 % 10, cut * 7 % 10)
                given = [whole.tokens[choice][:length] for choice, length in enumerate(lengths)]
                ended = tuple(choice for choice, length in enumerate(lengths) if length == 9)
                if len(ended) == 3:
                    continue
                ledger = await self.complete(engine, output=given, ended=ended, **shape)
                assert ledger.tokens == whole.tokens
                for choice, length in enumerate(lengths):
                    rest = whole.logprobs[choice][length:]
                    assert [entry.token for entry in ledger.logprobs[choice]] == [
                        entry.token for entry in rest
                    ]
            await self.nothing_left(engine)

    async def test_choices_that_have_ended_cost_nothing(self) -> None:
        async with self.running() as engine:
            whole = await self.complete(engine, n=3, temperature=0.9, seed=7, max_tokens=6)
            await output_tokens(engine, 18)
            for ended in ((0,), (1,), (0, 1), (2, 0, 0)):
                before = engine.stats().output_tokens
                live = [choice for choice in range(3) if choice not in ended]
                ledger = await self.complete(
                    engine, n=3, temperature=0.9, seed=7, max_tokens=6, ended=ended
                )
                assert [ledger.tokens[choice] for choice in live] == [
                    whole.tokens[choice] for choice in live
                ]
                assert all(not ledger.tokens[choice] for choice in set(ended))
                await output_tokens(engine, before + 6 * len(live))
            await self.nothing_left(engine)

    async def test_a_sequence_ends_at_the_models_length(self) -> None:
        async with self.running() as engine:
            limit = self.capabilities(engine).max_model_len
            ledger = await self.complete(engine, max_tokens=limit + 50)
            assert len(self.prompt) + len(ledger.tokens[0]) == limit
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].reason == "length"

    async def test_logprobs_come_with_every_token_that_asks(self) -> None:
        async with self.running() as engine:
            ledger = await self.complete(engine, n=2, logprobs=2)
            for choice, tokens in enumerate(ledger.tokens):
                assert len(ledger.logprobs[choice]) == len(tokens)
                assert all(entry.logprob <= 0 for entry in ledger.logprobs[choice])

    async def test_prompt_logprobs_come_with_the_first_delta(self) -> None:
        async with self.running() as engine:
            if not self.capabilities(engine).prompt_logprobs:
                pytest.skip("this engine has no prompt logprobs")
            # The second time the prompt is in the cache.
            for _ in range(2):
                ledger = await self.complete(engine, prompt=self.prompt * 3, prompt_logprobs=1)
                assert len(ledger.prompt_logprobs[0] or []) == len(self.prompt) * 3 - 1

    # ------------------------------------------------------------------ vectors

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    async def test_a_prompt_becomes_the_same_vector_among_others(self, pooling: Pooling) -> None:
        """An embedding comes in one delta without tokens. With mean pooling no prefix cache is
        used, with last-token pooling it is."""
        async with self.running() as engine:
            self.needs_vectors(engine)
            size = self.capabilities(engine).block_size
            long = (self.prompt * (2 * size))[: 2 * size + 1]
            shape: dict[str, Any] = {"pooling": pooling, "max_tokens": 1}
            alone = await self.complete(engine, prompt=long, **shape)
            others = [CheckingSink(engine, self.request(prompt=long[:i])) for i in (1, 5, size)]
            again = await self.complete(engine, prompt=long, **shape)
            short = await self.complete(engine, **shape)
            for sink in others:
                assert all((await sink.wait()).finishes)
            assert len(vector(short)) == self.capabilities(engine).embedding_size
            assert vector(again) == pytest.approx(vector(alone), rel=1e-3, abs=1e-4)
            assert vector(short) != pytest.approx(vector(alone), rel=1e-2)
            finish = again.finishes[0]
            assert finish is not None
            assert (finish.reason, finish.completion_tokens) == ("stop", 0)
            caches = self.capabilities(engine).kv_events and pooling == "last"
            assert finish.cached_tokens == (2 * size if caches else 0)
            await output_tokens(engine, 24)
            await self.nothing_left(engine)

    async def test_a_vector_is_refused_with_what_does_not_belong_to_it(self) -> None:
        async with self.running() as engine:
            if not self.capabilities(engine).embedding_size:
                request = self.request(pooling="mean")
                assert type(await self.error(engine, request)) is InvalidRequest
                return
            for changes in ({"n": 2}, {"output": [[3]]}, {"prompt_logprobs": 1}):
                request = self.request(pooling="last", **changes)
                assert type(await self.error(engine, request)) is InvalidRequest
            await self.complete(engine)

    async def test_logits_of_a_head_that_is_not_there_are_refused(self) -> None:
        """A vector of hidden states in their place would be taken for a score."""
        async with self.running() as engine:
            capabilities = self.capabilities(engine)
            assert ("classify" in capabilities.features) == (capabilities.num_labels > 0)
            if capabilities.num_labels:
                ledger = await self.complete(engine, pooling="last", classify=True, max_tokens=1)
                assert len(vector(ledger)) == capabilities.num_labels
                return
            request = self.request(pooling="last", classify=True, max_tokens=1)
            assert type(await self.error(engine, request)) is InvalidRequest
            await self.complete(engine)

    def needs_vectors(self, engine: Engine) -> None:
        """Skip the test if the engine makes no embeddings."""
        capabilities = self.capabilities(engine)
        assert ("embeddings" in capabilities.features) == (capabilities.embedding_size > 0)
        if not capabilities.embedding_size:
            pytest.skip("this engine makes no vectors")

    # ------------------------------------------------------------------ refusals

    async def test_what_cannot_be_served_fails_by_name(self) -> None:
        async with self.running() as engine:
            capabilities = self.capabilities(engine)
            too_long = self.prompt[:1] * capabilities.max_model_len
            refused = (
                (self.request(prompt=[]), InvalidRequest),
                (self.request(prompt=too_long), ContextLengthExceeded),
                (self.request(prompt=[capabilities.vocab_size]), InvalidRequest),
                (self.request(n=2, ended=(0, 1)), InvalidRequest),
                (self.request(n=2, ended=(2,)), InvalidRequest),
                (self.request(n=2, ended=(-1,)), InvalidRequest),
            )
            for request, kind in refused:
                assert type(await self.error(engine, request)) is kind
            await self.complete(engine)

    async def test_images_are_refused_where_they_would_be_ignored(self) -> None:
        async with self.running() as engine:
            capabilities = self.capabilities(engine)
            takes = capabilities.image is not None
            assert ("images" in capabilities.features) == takes
            # Without a placeholder in the prompt they are wrong for every engine.
            error = await self.error(engine, self.request(images=(b"a file",)))
            assert type(error) is InvalidRequest
            assert "image" in error.message
            await self.nothing_left(engine)

    async def test_a_deadline_that_has_passed_is_an_error_with_its_stage(self) -> None:
        async with self.running() as engine:
            error = await self.error(engine, self.request(deadline=0.0))
            assert isinstance(error, DeadlineExceeded)
            assert "while" in error.message
            await self.nothing_left(engine)

    # ------------------------------------------------------------------ aborts

    async def test_after_an_abort_nothing_comes_and_nothing_is_held(self) -> None:
        async with self.running() as engine:
            limit = self.capabilities(engine).max_model_len
            sink = CheckingSink(engine, self.request(max_tokens=limit, n=2))
            await sink.some()
            sink.abort()
            engine.abort(sink.handle)
            engine.abort(123456789)
            await self.nothing_left(engine)
            await self.complete(engine)
            sink.checked()

    async def test_a_storm_of_aborts_leaves_a_working_engine(self) -> None:
        async with self.running() as engine:
            rng = random.Random(1)
            for _ in range(5):
                sinks = [CheckingSink(engine, self.request(max_tokens=30)) for _ in range(20)]
                for sink in rng.sample(sinks, k=len(sinks)):
                    if rng.random() < 0.3:
                        await asyncio.sleep(0.001)
                    if not sink.ledger.done:
                        sink.abort()
            await self.nothing_left(engine)
            assert len((await self.complete(engine)).tokens[0]) == 8
            for sink in sinks:
                sink.checked()

    # ------------------------------------------------------------------ statistics and events

    async def test_statistics_count_what_was_done(self) -> None:
        async with self.running() as engine:
            await self.complete(engine, max_tokens=8)
            await until(lambda: engine.stats().finished == 1)
            stats = engine.stats()
            assert stats.output_tokens == 8
            assert stats.prompt_tokens == len(self.prompt)
            assert (stats.running, stats.waiting) == (0, 0)

    async def test_reused_blocks_were_announced(self) -> None:
        events: list[KvEvent] = []
        async with self.running() as engine:
            if not self.capabilities(engine).kv_events:
                pytest.skip("this engine has no KV events")
            engine.subscribe_kv(events.extend)
            blocks = 2
            size = self.capabilities(engine).block_size
            prompt = (self.prompt * size)[: blocks * size + 1]
            await self.complete(engine, prompt=prompt, max_tokens=1)
            ledger = await self.complete(engine, prompt=prompt, max_tokens=1)
            assert ledger.finishes[0] is not None
            assert ledger.finishes[0].cached_tokens == blocks * size
            stored = [h for e in events if isinstance(e, BlockStored) for h in e.hashes]
            assert len(stored) == blocks


def vector(ledger: OutputChecker) -> list[float]:
    """The embedding that came instead of tokens."""
    finish = ledger.finishes[0]
    assert finish is not None
    assert ledger.tokens == [[]]
    return list(struct.unpack(f"<{len(finish.embedding) // 4}f", finish.embedding))


async def output_tokens(engine: Engine, count: int) -> None:
    """The number of output tokens that the usage reports."""
    await until(lambda: engine.stats().output_tokens == count)
