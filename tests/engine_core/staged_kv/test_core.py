"""A prompt that one self-scheduling engine computes and another decodes, by staging blocks.

The engines' tokens are hashes of all KV, which is divided by heads among ranks; D's own counter
says that it computed one prompt token. So the bytes came from P, to the right ranks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.engine_loader import load_core, wrap_core
from pdserve.engine_core.staged_kv.sender import STAGING_TIMEOUT
from pdserve.errors import ConfigError, Overloaded
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    AttemptLost,
    Prefilled,
    PrefillLocally,
    PrefillSent,
    Rejected,
    SetNodeLife,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.tiers import CachedSource
from pdserve.testing.fake_mover import FakeMover, FakeNet
from pdserve.testing.inline_engine import InlineEngine
from tests.engine_core.kv_transfer.test_handoff import prompt_of, request
from tests.support import staged_pair
from tests.support.staged_engine import ToyEngine, reference
from tests.support.staged_pair import SPEC, StagedPair, make_staged_pair

if TYPE_CHECKING:
    from pdserve.testing.output_checker import OutputChecker

LENGTH = 18
BLOCKS = 5

HOST = pytest.mark.parametrize("memory", ["host"], indirect=True)


@pytest.fixture(params=["host", "device"], autouse=True)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where both engines have their staging blocks."""
    kind = str(request.param)
    monkeypatch.setattr(staged_pair, "MEMORY", kind)
    return kind


def check_received(both: StagedPair, ledgers: list[OutputChecker], cached: int = 0) -> None:
    """D computed one token of each prompt; the rest came from P, by counters and by bytes."""
    stats = both.d.stats
    outputs = sum(len(tokens) for ledger in ledgers for tokens in ledger.tokens)
    assert both.d.core.computed_tokens == outputs
    prompts = sum(len(ledger.request.prompt) for ledger in ledgers)
    assert stats.received_tokens == prompts - cached
    block_bytes = both.d.engine.capabilities.block_bytes
    assert stats.received_bytes == stats.received_blocks * block_bytes == both.net.bytes_applied
    assert both.p.stats.sent_bytes == stats.received_bytes
    assert both.p.stats.sent_blocks == stats.received_blocks


def opened(both: StagedPair, **changes: object) -> tuple[int, OutputChecker]:
    """A request whose attempt P may fill."""
    handle, ledger = both.submit(request(prompt_of(LENGTH), **changes))
    both.step_d()
    both.open(handle)
    both.net.run()
    both.step_d()
    assert both.opened[handle].attempt == 1
    return handle, ledger


def prefilled(both: StagedPair, **changes: object) -> tuple[int, OutputChecker, int]:
    """The same, computed by P, and its parts under way."""
    handle, ledger = opened(both, **changes)
    mine = both.prefill(both.opened[handle])
    while handle not in both.handoffs:
        both.step_p()
    return handle, ledger, mine


def finish(both: StagedPair, handle: int, ledger: OutputChecker) -> None:
    """One more attempt, which serves."""
    both.open(handle)
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    both.close()


def held(end) -> tuple[int, int]:
    """Staging blocks: used, quarantined."""
    counts = end.core.staging.blocks.counts()
    return counts.used, counts.quarantined


# ------------------------------------------------------------------ the plain course


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63])
@pytest.mark.parametrize("batch", [6, 2048])
def test_every_prompt_length_gives_the_same_tokens(length: int, batch: int):
    both = make_staged_pair(p={"max_batch_tokens": batch, "max_sequences": 4})
    wanted = request(prompt_of(length))
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == [reference(wanted)]
    check_received(both, [ledger])
    assert both.p.core.computed_tokens == length
    assert ledger.starts[0] is not None
    assert ledger.starts[0].received_tokens == length
    both.close()


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2), (2, 2)])
def test_tensor_parallel_sizes_may_differ(p: int, d: int):
    both = make_staged_pair(p={"options": {"tp": str(p)}}, d={"options": {"tp": str(d)}})
    wanted = [request(prompt_of(length, seed=length)) for length in (18, 16, 5)]
    ledgers = both.generate(wanted)
    assert [ledger.tokens for ledger in ledgers] == [[reference(one)] for one in wanted]
    check_received(both, ledgers)
    both.close()


@pytest.mark.parametrize("cached_p", [0, 8, 12, 20])
@pytest.mark.parametrize("cached_d", [0, 4, 12, 24])
def test_prefixes_that_either_end_has_change_nothing(cached_p: int, cached_d: int):
    """What D has is not sent, what P has is not computed."""
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    prompt = prompt_of(29)
    for end, cached in ((both.p, cached_p), (both.d, cached_d)):
        if cached:
            end.engine.generate([request(prompt[:cached], max_tokens=1)])
    before_p, before_d = both.p.core.computed_tokens, both.d.core.computed_tokens
    (ledger,) = both.generate([request(prompt)])
    assert ledger.tokens == [reference(request(prompt))]
    assert both.p.core.computed_tokens - before_p == 29 - cached_p
    assert both.d.core.computed_tokens - before_d == len(ledger.tokens[0])
    assert both.d.stats.received_blocks == -(-(29 - cached_d) // 4)
    start = ledger.starts[0]
    assert start is not None
    assert (start.cached_tokens, start.received_tokens) == (cached_d, 29 - cached_d)
    both.close()


def test_a_cached_prefix_is_held_until_the_rest_is_loaded():
    """Other requests would evict it, and the blocks that P sends would have nothing before them."""
    both = make_staged_pair(d={"options": {"blocks": "16"}})
    prompt = prompt_of(LENGTH)
    both.d.engine.generate([request(prompt[:12], max_tokens=1)])
    handle, ledger = opened(both)
    assert both.admitted[handle] == both.opened[handle].ticket.first_token == 12
    for seed in range(1, 6):
        both.d.engine.generate([request(prompt_of(40, seed=seed), max_tokens=8)])
    before = both.d.core.computed_tokens
    both.prefill(both.opened[handle])
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert both.d.core.computed_tokens - before == len(ledger.tokens[0])
    both.close()


# ------------------------------------------------------------------ frames of a host tier


def with_frames(**options: str) -> StagedPair:
    """D has frames, and in them the first three blocks of a prompt of five; the device has none."""
    both = make_staged_pair(d={"options": {"frames": "8", **options}})
    wanted = request(prompt_of(LENGTH))
    both.d.engine.generate([request(wanted.prompt, max_tokens=1)])
    both.d.core.store(wanted, 3)
    both.d.core.computed_tokens = 0
    return both


@HOST
@pytest.mark.parametrize("tp", ["1", "4"])
def test_what_the_host_tier_has_is_loaded_from_there_and_not_sent(tp: str):
    both = with_frames(tp=tp)
    both.d.core.on_disk = set(list(both.d.core.on_host)[2:])
    (ledger,) = both.generate([request(prompt_of(LENGTH))])
    assert ledger.tokens == [reference(ledger.request)]
    assert both.d.core.computed_tokens == len(ledger.tokens[0])
    assert both.d.stats.received_blocks == 2
    start = ledger.starts[0]
    assert start is not None
    assert (start.cached_tokens, start.received_tokens) == (12, LENGTH - 12)
    assert start.sources == (CachedSource("host", 8), CachedSource("disk", 4))
    assert tuple(both.d.core.frame_hits) == start.sources
    assert not both.d.core.frame_holds.total()
    both.close()


@HOST
def test_frames_follow_what_is_cached_on_the_device():
    both = with_frames()
    both.d.engine.generate([request(prompt_of(LENGTH)[:9], max_tokens=1)])
    handle, ledger = opened(both)
    assert both.admitted[handle] == 8
    assert both.opened[handle].ticket.first_token == 12
    assert both.d.core.frame_holds.total() == 1
    both.prefill(both.opened[handle])
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert ledger.starts[0] is not None
    assert ledger.starts[0].cached_tokens == 12
    assert ledger.starts[0].sources == (CachedSource("host", 4),)
    assert not both.d.core.frame_holds.total()
    both.close()


@HOST
@pytest.mark.parametrize("how", ["aborted", "attempt", "computed here", "closed"])
def test_held_frames_are_given_back(how: str):
    both = with_frames()
    handle, ledger = opened(both)
    assert both.d.core.frame_holds.total() == 3
    match how:
        case "aborted":
            ledger.aborted = True
            both.d.core.handle(Abort(handle))
        case "attempt":
            both.d.core.handle(AbortAttempt(handle, 1))
        case "computed here":
            both.d.core.handle(PrefillLocally(handle))
        case "closed":
            pass
    both.step_d()
    if how != "closed":
        assert not both.d.core.frame_holds.total()
        both.run()
    if how == "attempt":
        finish(both, handle, ledger)
        return
    both.close()


@HOST
def test_a_frame_that_cannot_be_read_is_computed():
    both = with_frames()
    both.d.core.broken_loads = {list(both.d.core.on_host.values())[1]}
    (ledger,) = both.generate([request(prompt_of(LENGTH))])
    assert ledger.tokens == [reference(ledger.request)]
    start = ledger.starts[0]
    assert start is not None
    assert (start.received_tokens, start.sources) == (0, ())
    assert both.d.core.frame_hits == []
    assert both.d.stats.received_tokens == 0
    assert not both.d.core.frame_holds.total()
    both.close()


@HOST
def test_what_the_engine_refuses_does_not_count_as_loaded(monkeypatch):
    both = with_frames()
    handle, ledger, _ = prefilled(both)

    def refuse(*_: object) -> None:
        raise Overloaded("the toy has enough", retry_after=1.0)

    monkeypatch.setattr(both.d.core, "load_staged", refuse)
    both.activate(both.handoffs[handle])
    both.run()
    assert isinstance(ledger.error, Overloaded)
    assert both.d.core.frame_hits == []
    assert both.d.stats.received_tokens == 0
    assert not both.d.core.frame_holds.total()
    both.close()


def test_choices_share_what_was_loaded():
    both = make_staged_pair()
    wanted = request(prompt_of(LENGTH), n=3, temperature=1.0, seed=5, max_tokens=6)
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == [reference(wanted, choice) for choice in range(3)]
    assert both.d.stats.received_blocks == BLOCKS
    both.close()


def test_output_of_an_earlier_attempt_is_prefilled_too():
    both = make_staged_pair()
    whole = reference(request(prompt_of(LENGTH), max_tokens=12))
    wanted = request(prompt_of(LENGTH), max_tokens=12, output=[whole[:5]])
    (ledger,) = both.generate([wanted])
    assert ledger.tokens == [whole]
    assert both.d.core.computed_tokens == 12 - 5
    both.close()


def test_logprobs_of_the_prompt_come_with_the_handoff():
    both = make_staged_pair()
    wanted = request(prompt_of(LENGTH), prompt_logprobs=0, logprobs=0)
    (ledger,) = both.generate([wanted])
    rows = ledger.prompt_logprobs[0]
    assert rows is not None
    assert [row.token for row in rows] == wanted.prompt[1:].tolist()
    assert both.d.core.computed_tokens == len(ledger.tokens[0])
    both.close()


def test_parts_are_sent_while_the_prompt_is_computed():
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    handle, _ = opened(both)
    both.prefill(both.opened[handle])
    both.step_p()
    both.net.run()
    assert both.net.counts["copied"] == 1
    assert handle not in both.handoffs
    both.run()
    both.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_courses_leave_nothing_behind(seed: int, memory: str):
    rng = random.Random(seed)
    # The transports themselves compare what is in device memory.
    corrupt = "corrupt" if memory == "host" else "lost"
    faults = rng.choices(["", "", "lost", "late", corrupt], k=30)
    both = make_staged_pair(
        p={"options": {"tp": "2", "staging": "12"}, "max_batch_tokens": 9, "max_sequences": 4},
        d={"options": {"tp": "1", "staging": "14"}},
    )
    both.net.faults = faults
    wanted = [request(prompt_of(rng.randint(1, 40), seed=seed * 100 + n)) for n in range(8)]
    ledgers = [both.submit(one)[1] for one in wanted]
    seen = 0
    for _ in range(20_000):
        if not both.busy and not any([both.d.sleep(), both.p.sleep()]):
            break
        both.turn(rng)
        for lost in both.lost[seen:]:
            both.open(lost.handle)
        seen = len(both.lost)
    for handle in list(both.attempts):
        both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert [ledger.tokens for ledger in ledgers] == [[reference(one)] for one in wanted]
    assert all(ledger.done for ledger in ledgers)
    both.close()


# ------------------------------------------------------------------ the decode side


def test_blocks_of_an_attempt_that_is_given_up_come_back_with_the_fence():
    both = make_staged_pair()
    handle, ledger = opened(both)
    assert held(both.d) == (BLOCKS, 0)
    both.d.core.handle(AbortAttempt(handle, 1))
    assert held(both.d) == (0, BLOCKS)
    both.net.run()
    both.step_d()
    assert held(both.d) == (0, 0)
    assert both.lost == []
    finish(both, handle, ledger)


@HOST
@pytest.mark.parametrize("verify", ["all", "sample"])
def test_a_corrupted_block_is_refused(verify):
    both = make_staged_pair(d={"transfer": TransferSpec(verify=verify)})
    both.net.faults = ["corrupt"]
    handle, ledger, _ = prefilled(both)
    both.activate(both.handoffs[handle])
    both.net.run()
    both.step_d()
    (lost,) = both.lost
    assert (lost.kind, lost.attempt) == ("TransferCorrupt", 1)
    assert both.d.core.computed_tokens == 0
    both.net.run()
    both.step_d()
    assert held(both.d) == (0, 0)
    finish(both, handle, ledger)


def test_what_cannot_be_loaded_is_computed_and_counted():
    both = make_staged_pair()
    handle, ledger, _ = prefilled(both)
    both.d.core.broken_loads = set(both.opened[handle].ticket.blocks[2:3])
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert both.d.core.computed_tokens == LENGTH - 8 + len(ledger.tokens[0]) - 1
    assert both.d.core.transfers.admission.failed_loads == 1
    assert both.d.stats.received_tokens == 8
    assert ledger.starts[0] is not None
    assert ledger.starts[0].received_tokens == 8
    both.close()


def test_a_prompt_can_be_prefilled_locally_after_all():
    both = make_staged_pair()
    handle, ledger = opened(both)
    both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert ledger.starts[0] is not None
    assert ledger.starts[0].received_tokens == 0
    both.close()


def test_a_prompt_larger_than_all_staging_blocks_is_prefilled_here():
    both = make_staged_pair(d={"options": {"staging": "4"}})
    handle, ledger = both.submit(request(prompt_of(LENGTH)))
    both.step_d()
    assert both.admitted[handle] == 0
    both.open(handle)  # it is too late: nothing is opened
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert both.opened == {}
    both.close()


def test_prompts_wait_for_staging_blocks_in_order():
    both = make_staged_pair(d={"options": {"staging": "8"}})
    first, one = both.submit(request(prompt_of(LENGTH)))
    second, two = both.submit(request(prompt_of(LENGTH, seed=1)))
    both.step_d()
    assert list(both.admitted) == [first]
    assert both.d.stats.waiting == 1
    both.open(first)
    both.run()
    assert list(both.admitted) == [first, second]
    assert [one.tokens, two.tokens] == [[reference(one.request)], [reference(two.request)]]
    both.close()


@pytest.mark.parametrize("stage", ["waiting", "opened", "filled", "loading"])
def test_an_abort_frees_everything(stage: str):
    both = make_staged_pair()
    freed: list[tuple[int, str]] = []
    both.d.core.on_freed = lambda handle, phase: freed.append((handle, phase))
    if stage == "waiting":
        handle, ledger = both.submit(request(prompt_of(LENGTH)))
    elif stage == "opened":
        handle, ledger = opened(both)
    else:
        handle, ledger, _ = prefilled(both)
        both.activate(both.handoffs[handle])
        if stage == "loading":
            both.net.run()
            both.d.core.on_step = lambda: both.d.core.handle(Abort(handle))
    ledger.aborted = True
    if stage != "loading":
        both.d.core.handle(Abort(handle))
    both.run()
    assert [one for one, _ in freed] == [handle]
    assert freed[0][1] in ("remote_queued", "remote_filling", "queued", "decoding")
    assert held(both.d) == (0, 0)
    both.close()


def test_a_deadline_ends_a_remote_prompt_and_says_what_it_waited_for():
    both = make_staged_pair()
    _, ledger = opened(both, deadline=5.0)
    both.d.clock.advance(5.0)
    both.run()
    assert ledger.error is not None
    assert "attempt 1 by p/1 fills its blocks" in ledger.error.message
    assert held(both.d) == (0, 0)
    both.close()


def test_an_engine_that_refuses_a_filled_prompt_rejects_it():
    both = make_staged_pair()
    handle, ledger = both.submit(request([96, *prompt_of(9)]))
    both.step_d()
    both.open(handle)
    both.net.run()
    both.step_d()
    both.prefill(both.opened[handle])
    both.run()
    assert [one.kind for one in both.refused] == ["Overloaded"]
    both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert ledger.error is not None
    both.close()


# ------------------------------------------------------------------ the prefill side


def test_a_withdrawn_prompt_frees_its_staging_blocks():
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    handle, ledger = opened(both)
    mine = both.prefill(both.opened[handle])
    both.step_p()
    assert held(both.p)[0] == BLOCKS
    both.p.core.handle(Abort(mine))
    both.net.run()
    events = both.step_p()
    assert [e for e in events if isinstance(e, PrefillSent)] == [PrefillSent(mine)]
    assert held(both.p) == (0, 0)
    both.run()
    (lost,) = both.lost
    assert lost.kind == "TransferWithdrawn"
    finish(both, handle, ledger)


def test_a_delivery_that_fails_ends_the_prompt():
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    both.net.faults = ["lost"]
    handle, ledger = opened(both)
    both.prefill(both.opened[handle])
    both.step_p()
    both.net.run()
    both.step_p()
    assert [one.kind for one in both.sent] == ["PathLost"]
    assert held(both.p) == (0, 0)
    assert handle not in both.handoffs
    both.step_d()
    finish(both, handle, ledger)


def test_prompts_for_peers_wait_for_staging_blocks_up_to_a_deadline():
    both = make_staged_pair(p={"options": {"staging": "6"}})
    first, one, _ = prefilled(both)
    # The first prompt's parts stay under way, so its staging blocks are not free.
    under_way, both.net.under_way = both.net.under_way, []
    second, two = both.submit(request(prompt_of(LENGTH, seed=1)))
    both.step_d()
    both.open(second)
    both.net.run()
    both.step_d()
    mine = both.prefill(both.opened[second])
    both.step_p()
    assert both.p.stats.waiting == 1
    both.p.clock.advance(STAGING_TIMEOUT)
    both.step_p()
    (refused,) = both.refused
    assert (refused.handle, refused.kind) == (mine, "Overloaded")
    assert "no staging blocks" in refused.message
    both.net.under_way += under_way
    both.activate(both.handoffs[first])
    both.open(second)
    both.run()
    assert [one.tokens, two.tokens] == [[reference(one.request)], [reference(two.request)]]
    both.close()


def test_a_prompt_that_staging_can_never_hold_is_refused():
    both = make_staged_pair(p={"options": {"staging": "4"}})
    handle, ledger = opened(both)
    both.prefill(both.opened[handle])
    both.step_p()
    (refused,) = both.refused
    assert refused.kind == "TransferRefused"
    assert "4 for staging" in refused.message
    both.d.core.handle(PrefillLocally(handle))
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    both.close()


def test_what_the_engine_could_never_serve_is_rejected_not_swallowed():
    both = make_staged_pair()
    long = request(prompt_of(both.d.engine.capabilities.max_model_len + 1))
    both.d.core.handle(SubmitRemote(handle=91, request=long))
    (rejected,) = [e for e in both.d.core.step() if isinstance(e, Rejected)]
    assert (rejected.handle, rejected.kind) == (91, "ContextLengthExceeded")
    handle, _ = opened(both)
    both._requests[handle] = long
    mine = both.prefill(both.opened[handle])
    both.step_p()
    assert [(one.handle, one.kind) for one in both.refused] == [(mine, "ContextLengthExceeded")]
    both.d.core.handle(Abort(handle))
    both.net.run()
    both.step_d()
    both.close()


def test_prompts_for_peers_that_wait_are_bounded():
    both = make_staged_pair(p={"options": {"staging": "5"}, "max_waiting": 2})
    asked = [opened(both) for _ in range(4)]
    mine = [both.prefill(both.opened[handle]) for handle, _ in asked]
    assert both.p.core.transfers.sender.waiting == 2
    both.step_p()
    assert {(one.handle, one.kind) for one in both.refused} == {
        (handle, "Overloaded") for handle in mine[2:]
    }
    for handle, _ in asked[2:]:
        both.d.core.handle(PrefillLocally(handle))
    both.activate(both.handoffs[asked[0][0]])
    both.run()
    assert all(ledger.tokens == [reference(ledger.request)] for _, ledger in asked)
    both.close()


@pytest.mark.parametrize("side", ["p", "d"])
def test_an_engine_with_too_many_choices_refuses_before_anything_is_sent(side, monkeypatch):
    both = make_staged_pair()

    def check_submission(request: object) -> None:
        raise Overloaded("the toy has enough", retry_after=1.0)

    if side == "p":
        handle, ledger = opened(both)
        monkeypatch.setattr(both.p.core, "check_submission", check_submission)
        both.prefill(both.opened[handle])
        both.step_p()
        assert [one.kind for one in both.refused] == ["Overloaded"]
        both.d.core.handle(PrefillLocally(handle))
        both.run()
        assert ledger.tokens == [reference(ledger.request)]
    else:
        monkeypatch.setattr(both.d.core, "check_submission", check_submission)
        _, ledger = both.submit(request(prompt_of(LENGTH)))
        both.step_d()
        assert isinstance(ledger.error, Overloaded)
    both.close()


def test_a_deadline_rejects_a_prompt_for_a_peer():
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    handle, ledger = opened(both)
    both._requests[handle] = request(prompt_of(LENGTH), deadline=1.0)
    mine = both.prefill(both.opened[handle])
    both.step_p()
    both.p.clock.advance(2.0)
    both.step_p()
    assert [(one.handle, one.kind) for one in both.refused] == [(mine, "DeadlineExceeded")]
    both.net.run()
    both.step_p()
    assert held(both.p) == (0, 0)
    assert both.sent == []
    both.run()
    finish(both, handle, ledger)


def test_closing_in_the_middle_leaks_nothing():
    both = make_staged_pair(p={"max_batch_tokens": 6, "max_sequences": 4})
    handle, _ = opened(both)
    both.prefill(both.opened[handle])
    both.step_p()
    both.close()


# ------------------------------------------------------------------ with and without a connector


def test_without_a_connector_it_is_an_ordinary_core():
    with InlineEngine(load_core(SPEC.engine, ManualClock()), SPEC) as engine:
        assert engine.capabilities.transfers == ()
        wanted = request(prompt_of(LENGTH))
        assert engine.generate([wanted]) == [[reference(wanted)]]
        engine.core.handle(SubmitRemote(9, wanted))
        engine.core.handle(SetNodeLife("d", 1))
        (rejected,) = [e for e in engine.core.step() if isinstance(e, Rejected)]
        assert rejected.kind == "TransferRefused"


@pytest.mark.parametrize("optional", [True, False])
def test_a_model_without_staging(optional: bool):
    core = wrap_core("toy", ToyEngine(ManualClock()), ManualClock(), FakeMover(FakeNet()))
    spec = msgspec.structs.replace(
        SPEC, options={"staging": "no"}, transfer=TransferSpec(optional=optional)
    )
    if not optional:
        with pytest.raises(ConfigError, match="without staging"):
            core.load(spec, lambda progress: None)
        core.close()
        return
    with InlineEngine(core, spec) as engine:
        assert engine.capabilities.transfers == ()
        engine.core.handle(SetNodeLife("d", 1))
        assert engine.core.step() == []


def test_capabilities_name_the_back_ends():
    both = make_staged_pair()
    assert both.d.engine.capabilities.transfers == ("fake",)
    both.close()


def test_unknown_attempts_are_ignored():
    both = make_staged_pair()
    handle, ledger, _ = prefilled(both)
    both.d.core.handle(Activate(handle, 7, both.handoffs[handle].handoff))
    both.d.core.handle(AbortAttempt(99, 1))
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == [reference(ledger.request)]
    assert not any(isinstance(one, AttemptLost | Prefilled) for one in both.lost)
    both.close()
