"""Prompts that one TensorRT-LLM prefills and another goes on with, through client and core."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pdserve.errors import PathLost, StepFailed, TransferRefused
from pdserve.messages.engine import (
    AbortAttempt,
    Activate,
    EngineSpec,
    OpenAttemptBlocks,
    PrefillForPeer,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve.messages.request import FirstTokenStats, GenerateRequest, SamplingParams
from pdserve.testing.sinks import CheckingSink, until
from pdserve.testing.thread_launcher import ThreadLauncher
from pdserve.token_ids import token_ids
from pdserve_engines.tensorrt_llm import requests
from pdserve_engines.tensorrt_llm.handoff import context_state, make_ticket
from pdserve_engines.tensorrt_llm.peers import PeerCore
from tests.conformance.test_engines import write_model
from tests.engine.test_handoff_between_engines import D, P, Pair, Prefilling, Remote, pair
from tests.engines.tensorrt_llm import fake_engine
from tests.engines.tensorrt_llm.driver import Driver
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.engine.client import CoreClient


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    write_model(tmp_path)
    return EngineSpec(
        engine=fake_engine.ENGINE,
        model=str(tmp_path),
        max_sequences=8,
        block_size=8,
        transfer=TransferSpec(),
    )


def two(spec: EngineSpec) -> Any:
    FakeLlm.made.clear()
    return pair(spec, spec, make_launcher=ThreadLauncher)


def request(**sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | sampling
    prompt = [1 + i % 50 for i in range(21)]
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids(prompt), sampling=SamplingParams(**fields)
    )


async def alone(engine: CoreClient, wanted: GenerateRequest) -> list[int]:
    return (await CheckingSink(engine, wanted).wait()).tokens[0]


async def opened(both: Pair, wanted: GenerateRequest) -> tuple[int, Remote]:
    remote = Remote(wanted)
    handle = both.d.submit_remote(wanted, remote)
    await until(lambda: remote.cached is not None)
    both.d.open_attempt(handle, 1, *P)
    await until(lambda: bool(remote.opened or remote.lost))
    return handle, remote


async def prefilled(both: Pair, wanted: GenerateRequest, remote: Remote) -> Prefilling:
    prefilling = Prefilling()
    both.p.prefill(wanted, remote.opened[1], *D, prefilling)
    await until(lambda: prefilling.sent or bool(prefilling.error))
    return prefilling


async def test_a_prompt_goes_on_elsewhere_token_for_token(spec):
    async with two(spec) as both:
        assert both.d.capabilities.transfers == ("tensorrt_llm",)
        wanted = request(logprobs=2)
        remote, prefilling = await both.hand_over(wanted)
        assert remote.ledger.tokens[0] == await alone(both.d, wanted)
        finish, start = remote.ledger.finishes[0], remote.ledger.starts[0]
        assert (finish.prompt_tokens, finish.completion_tokens) == (21, 8)
        assert start.received_tokens == 21
        assert len(remote.ledger.logprobs[0]) == 8
        assert prefilling.handoff.parts == 0


async def test_both_engines_get_the_same_request_id_of_63_bits(spec):
    async with two(spec) as both:
        await both.hand_over(request())
        await both.hand_over(request(max_tokens=5))
        given = [
            result.disaggregated
            for llm in FakeLlm.made
            for result in llm.requests
            if result.disaggregated is not None
        ]

        def ids(kind: str) -> list[int]:
            return sorted(
                each.disagg_request_id or 0 for each in given if each.request_type == kind
            )

        contexts = ids("context_only")
        assert contexts == ids("generation_only")
        assert len(set(contexts)) == 2
        assert all(1 << 40 <= number < 1 << 63 for number in contexts)


async def test_the_first_token_comes_once_even_if_the_release_leaves_it_out(spec, monkeypatch):
    monkeypatch.setattr(FakeLlm, "old_diff", True)
    async with two(spec) as both:
        wanted = request()
        remote, _ = await both.hand_over(wanted)
        assert remote.ledger.tokens[0] == await alone(both.d, wanted)


async def test_the_releases_own_diff_would_lose_the_first_token(spec, monkeypatch):
    """The bug, planted: what the test above is for."""
    monkeypatch.setattr(FakeLlm, "old_diff", True)
    monkeypatch.setattr(
        "pdserve_engines.tensorrt_llm.requests.new_tokens",
        lambda output, seen: list(output.token_ids_diff),
    )
    async with two(spec) as both:
        remote, _ = await both.hand_over(request())
        assert remote.ledger.tokens[0] != await alone(both.d, request())


async def test_a_first_token_that_ends_the_request_needs_no_transfer(spec):
    async with two(spec) as both:
        first = (await alone(both.p, request()))[0]
        before = len(FakeLlm.made[0].requests) + len(FakeLlm.made[1].requests)
        remote, _ = await both.hand_over(request(stop_token_ids=(first,)))
        assert remote.ledger.tokens[0] == [first]
        assert remote.ledger.finishes[0].stop_reason == first
        remote, _ = await both.hand_over(request(max_tokens=1))
        assert remote.ledger.finishes[0].reason == "length"
        after = len(FakeLlm.made[0].requests) + len(FakeLlm.made[1].requests)
        assert after - before == 2  # the two prefills


async def test_stop_tokens_and_min_tokens_hold_across_a_handover(spec):
    async with two(spec) as both:
        tokens = await alone(both.d, request())
        wanted = request(stop_token_ids=(tokens[2],), min_tokens=5)
        remote, _ = await both.hand_over(wanted)
        assert remote.ledger.tokens[0] == await alone(both.d, wanted)
        assert len(remote.ledger.tokens[0]) > 5


async def test_earlier_output_is_part_of_what_is_handed_over(spec):
    async with two(spec) as both:
        wanted = request()
        tokens = await alone(both.d, wanted)
        remote, prefilling = await both.hand_over(replace(wanted, output=[tokens[:3]]))
        assert remote.ledger.tokens[0] == tokens
        assert prefilling.handoff.tokens == 24


async def test_a_failed_transfer_is_the_attempts_and_the_next_one_succeeds(spec):
    async with two(spec) as both:
        wanted = request()
        handle, remote = await opened(both, wanted)
        prefilling = await prefilled(both, wanted, remote)
        for llm in FakeLlm.made:
            llm.faults[tuple(wanted.prompt)] = RequestError("the peer is silent")
        both.d.activate(handle, 1, prefilling.handoff)
        await until(lambda: bool(remote.lost))
        assert isinstance(remote.lost[1], StepFailed)
        for llm in FakeLlm.made:
            llm.faults.clear()
        both.d.open_attempt(handle, 2, *P)
        await until(lambda: 2 in remote.opened)
        both.d.activate(handle, 1, prefilling.handoff)  # late, of the lost attempt
        again = Prefilling()
        both.p.prefill(wanted, remote.opened[2], *D, again)
        await until(lambda: bool(again.handoff))
        both.d.activate(handle, 2, again.handoff)
        await until(lambda: remote.ledger.done)
        assert remote.ledger.tokens[0] == await alone(both.d, wanted)


async def test_an_attempt_that_is_given_up_leads_to_a_prefill_here(spec):
    async with two(spec) as both:
        wanted = request()
        handle, remote = await opened(both, wanted)
        prefilling = await prefilled(both, wanted, remote)
        both.d.give_up(handle, 1)
        both.d.activate(handle, 1, prefilling.handoff)
        both.d.prefill_here(handle)
        await until(lambda: remote.ledger.done)
        assert remote.ledger.tokens[0] == await alone(both.d, wanted)
        kinds = [
            result.disaggregated.request_type
            for llm in FakeLlm.made
            for result in llm.requests
            if result.disaggregated is not None
        ]
        assert kinds == ["context_only"]


async def test_an_attempt_ends_with_its_peer(spec):
    async with two(spec) as both:
        handle, remote = await opened(both, request())
        both.d.peer_gone(*P)
        await until(lambda: bool(remote.lost))
        assert isinstance(remote.lost[1], PathLost)
        both.d.abort(handle)
        await until(lambda: both.d.stats().remote == 0)


async def test_a_withdrawn_prefill_is_cancelled_and_ends(spec):
    async with two(spec) as both:
        wanted = request()
        _, remote = await opened(both, wanted)
        for llm in FakeLlm.made:
            llm.gate.clear()
        prefilling = Prefilling()
        handle = both.p.prefill(wanted, remote.opened[1], *D, prefilling)
        await until(lambda: any(llm.requests for llm in FakeLlm.made))
        both.p.abort(handle)
        (result,) = [result for llm in FakeLlm.made for result in llm.requests]
        await until(lambda: result.cancelled)
        assert prefilling.handoff is None


async def test_several_choices_are_computed_at_the_decode_worker(spec):
    async with two(spec) as both:
        wanted = replace(request(temperature=1.0, seed=3), n=2)
        handle, remote = await opened(both, wanted)
        assert isinstance(remote.lost[1], TransferRefused)
        both.d.prefill_here(handle)
        await until(lambda: remote.ledger.done)
        assert all(len(tokens) == 8 for tokens in remote.ledger.tokens)


async def test_tickets_and_handoffs_of_other_engines_are_refused(spec):
    async with two(spec) as both:
        wanted = request()
        handle, remote = await opened(both, wanted)
        prefilling = Prefilling()
        foreign = replace(remote.opened[1], backend="tcp")
        both.p.prefill(wanted, foreign, *D, prefilling)
        await until(lambda: bool(prefilling.error))
        assert isinstance(prefilling.error, TransferRefused)
        right = await prefilled(both, wanted, remote)
        assert right.handoff is not None
        both.d.activate(handle, 1, replace(right.handoff, opaque=b""))
        await until(lambda: bool(remote.lost))
        assert isinstance(remote.lost[1], TransferRefused)
        both.d.abort(handle)


def test_a_first_token_that_comes_while_its_attempt_is_given_up_is_dropped(tmp_path):
    """The engine's thread has told it, the core has not taken it yet."""
    with Driver(tmp_path, kind=PeerCore, transfer=TransferSpec()) as core:
        wanted = core.request()
        tokens = core.complete()
        handoff = Handoff(
            tokens=3,
            parts=0,
            first=(FirstToken(tokens[0]),),
            started=FirstTokenStats(0, 0.0, 0.0, 0.0),
            opaque=context_state(1 << 62, tokens[0], None),
        )
        core.core.handle(SubmitRemote(handle=9, request=wanted))
        for attempt in (1, 2):
            core.core.handle(OpenAttemptBlocks(handle=9, attempt=attempt, node="p", epoch=2))
            core.core.handle(Activate(handle=9, attempt=attempt, handoff=handoff))
            if attempt == 1:
                core.wait_for(lambda: bool(core.core._told))
                core.core.handle(AbortAttempt(handle=9, attempt=1))
        core.until(lambda: (9, 0) in core.finishes)
        assert core.tokens[9, 0] == tokens
        assert not core.errors
        kinds = [type(event).__name__ for event in core.others]
        assert kinds.count("AttemptBlocksOpened") == 2
        assert "AttemptLost" not in kinds
        assert core.core.stats().remote == 0
        assert core.core._accepted == {}


def test_a_handoff_without_a_first_token_loses_its_attempt(tmp_path):
    with Driver(tmp_path, kind=PeerCore, transfer=TransferSpec()) as core:
        handoff = Handoff(
            tokens=3,
            parts=0,
            first=(),
            started=FirstTokenStats(0, 0.0, 0.0, 0.0),
            opaque=context_state(1 << 62, 5, None),
        )
        core.core.handle(SubmitRemote(handle=9, request=core.request()))
        core.core.handle(OpenAttemptBlocks(handle=9, attempt=1, node="p", epoch=2))
        core.core.handle(Activate(handle=9, attempt=1, handoff=handoff))
        core.step()
        (lost,) = [event for event in core.others if type(event).__name__ == "AttemptLost"]
        assert lost.kind == "TransferRefused"
        core.abort(9)


def prefill_for_peer(core: Driver, handle: int) -> None:
    """Have the core prefill a prompt of three tokens."""
    ticket = make_ticket(1, 1, life=7, epoch=2, tokens=3)
    core.core.handle(
        PrefillForPeer(handle=handle, request=core.request(), ticket=ticket, node="d", epoch=2)
    )


@pytest.mark.parametrize("end", ["prefilled", "length"])
def test_a_prompt_that_ends_without_a_token_fails(tmp_path, monkeypatch, end):
    """The token came with an answer before the end, or never."""
    monkeypatch.setattr(requests, "end_of", lambda output, finished: end if finished else "")
    monkeypatch.setattr(requests, "new_tokens", lambda output, seen: [])
    with Driver(tmp_path, kind=PeerCore, transfer=TransferSpec()) as core:
        prefill_for_peer(core, 9)
        assert core.failed(9).kind == "StepFailed"
        assert "PrefillSent" not in {type(event).__name__ for event in core.others}
        assert core.core.stats().sending == 0


def test_prompts_for_peers_are_bounded(tmp_path):
    with Driver(
        tmp_path, kind=PeerCore, transfer=TransferSpec(), max_sequences=2, max_waiting=1
    ) as core:
        core.hold()
        for handle in (1, 2, 3, 4):
            prefill_for_peer(core, handle)
        core.step()
        assert [(one.handle, one.kind) for one in core.errors.values()] == [(4, "Overloaded")]
        core.go()
        core.until(lambda: core.core.stats().sending == 0)


async def test_many_handovers_at_once_do_not_mix(spec):
    async with two(spec) as both:
        prompts = [[1 + (i + j) % 50 for j in range(9 + i)] for i in range(8)]
        wanted = [replace(request(), prompt=prompt) for prompt in prompts]
        results = await asyncio.gather(*(both.hand_over(each) for each in wanted))
        for each, (remote, _) in zip(wanted, results, strict=True):
            assert remote.ledger.tokens[0] == await alone(both.d, each)
        await until(lambda: both.d.stats().remote == 0)
