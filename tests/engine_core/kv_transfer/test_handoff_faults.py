"""What goes wrong with a handover, one thing at a time: who is told what, and where blocks go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.receiver import BLOCKS_TIMEOUT
from pdserve.errors import ConfigError, DeadlineExceeded, EngineError, Overloaded
from pdserve.messages.engine import (
    Abort,
    AbortAttempt,
    Activate,
    AttemptLost,
    OpenAttemptBlocks,
    PeerGone,
    Prefilled,
    PrefillForPeer,
    PrefillLocally,
    PrefillSent,
    Rejected,
    SetHashSecret,
    SetNodeLife,
    SubmitRemote,
    TransferSpec,
)
from pdserve.messages.transfer import TransferTicket
from pdserve.testing.fake_mover import FakeMover, FakeNet
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import ScriptedExecutor
from tests.engine_core.kv_transfer.test_handoff import SPEC, pair, prompt_of, reference, request
from tests.support.disagg_pair import DisaggPair, make_pair

if TYPE_CHECKING:
    from pdserve.testing.output_checker import OutputChecker

LENGTH = 18
BLOCKS = 5


def opened(both: DisaggPair, **changes: object) -> tuple[int, OutputChecker]:
    """A request whose attempt P may fill."""
    handle, ledger = both.submit(request(prompt_of(LENGTH), **changes))
    both.step_d()
    both.open(handle)
    both.net.run()
    both.step_d()
    assert both.opened[handle].attempt == 1
    return handle, ledger


def prefilled(both: DisaggPair, **changes: object) -> tuple[int, OutputChecker, int]:
    """The same, computed by P, and its parts under way."""
    handle, ledger = opened(both, **changes)
    mine = both.prefill(both.opened[handle])
    while handle not in both.handoffs:
        both.step_p()
    return handle, ledger, mine


def finish(both: DisaggPair, handle: int, ledger: OutputChecker) -> None:
    """One more attempt, which serves."""
    both.open(handle)
    both.run()
    assert ledger.tokens == reference(ledger.request)
    both.close()


def held(both: DisaggPair) -> tuple[int, int]:
    """Of D's blocks: used, quarantined."""
    counts = both.d.core.pool.counts()
    return counts.used, counts.quarantined


# ------------------------------------------------------------------ the decode side


def test_blocks_of_an_attempt_that_is_given_up_come_back_with_the_fence():
    both = pair()
    handle, ledger = opened(both)
    assert held(both) == (BLOCKS, 0)
    both.d.core.handle(AbortAttempt(handle, 1))
    assert held(both) == (0, BLOCKS)
    both.net.run()
    both.step_d()
    assert held(both) == (0, 0)
    assert both.lost == []
    finish(both, handle, ledger)


def test_a_pinned_prefix_is_not_quarantined():
    both = pair()
    both.d.engine.generate([request(prompt_of(LENGTH)[:12], max_tokens=1)])
    handle, ledger = opened(both)
    assert held(both) == (BLOCKS, 0)
    both.d.core.handle(AbortAttempt(handle, 1))
    assert held(both) == (0, BLOCKS - 3)
    assert both.d.core.pool.counts().cached == 3
    finish(both, handle, ledger)


def test_a_new_attempt_ends_the_one_that_is_open():
    both = pair()
    handle, ledger = opened(both)
    both.open(handle)
    assert held(both) == (BLOCKS, BLOCKS)
    first, second = (set(grant.ticket.blocks) for grant in both.net.grants.values())
    assert not first & second
    both.prefill(both.opened[handle])  # P knows nothing of it
    both.run()
    assert both.net.counts["refused"] or both.net.counts["copied"] == 0
    assert ledger.tokens == reference(ledger.request)
    both.close()


def test_what_lands_after_a_revocation_lands_in_quarantine():
    both = pair()
    handle, ledger, _ = prefilled(both)
    both.net.faults = ["late"]
    both.net.step()  # lost for both, but its bytes live on
    both.step_d()
    assert [event.kind for event in both.lost] == ["PathLost"]
    assert held(both) == (0, BLOCKS)
    blocks = set(next(iter(both.net.grants.values())).ticket.blocks)
    assert both.net.closing(both.d.mover) == blocks
    both.net.under_way.sort(key=lambda action: "_close" in action.__code__.co_names)
    both.run()
    assert both.net.counts["landed_late"] == 1
    assert held(both) == (0, 0)
    finish(both, handle, ledger)


def test_no_path_is_an_attempt_lost():
    both = pair()
    both.d.mover.refuse = "there is no path to p"
    handle, ledger = both.submit(request(prompt_of(LENGTH)))
    both.run()
    assert both.lost == [AttemptLost(handle, 1, "PathLost", "there is no path to p")]
    both.d.mover.refuse = ""
    finish(both, handle, ledger)


@pytest.mark.parametrize("changes", [{"tokens": LENGTH + 1}, {"parts": 0}, {"first": ()}], ids=str)
def test_a_handoff_that_does_not_fit_is_refused(changes: dict[str, object]):
    both = pair()
    handle, ledger, _ = prefilled(both)
    both.net.run()
    wrong = msgspec.structs.replace(both.handoffs[handle].handoff, **changes)
    both.d.core.handle(Activate(handle, 1, wrong))
    both.step_d()
    assert [event.kind for event in both.lost] == ["TransferRefused"]
    assert not ledger.deltas
    finish(both, handle, ledger)


def test_a_handoff_of_an_attempt_that_is_over_is_ignored():
    both = pair()
    handle, ledger, _ = prefilled(both)
    both.d.core.handle(AbortAttempt(handle, 1))
    both.activate(both.handoffs[handle])
    both.d.core.handle(Activate(handle + 50, 1, both.handoffs[handle].handoff))
    both.d.core.handle(AbortAttempt(handle, 7))
    both.d.core.handle(OpenAttemptBlocks(handle + 50, 1, "p", 1))
    both.d.core.handle(PrefillLocally(handle + 50))
    both.run()
    assert both.lost == []
    finish(both, handle, ledger)


def test_a_handoff_before_its_parts_waits_for_them():
    both = pair()
    handle, ledger, _ = prefilled(both)
    both.activate(both.handoffs[handle])
    both.step_d()
    assert not ledger.deltas
    both.run()
    assert ledger.tokens == reference(ledger.request)
    both.close()


def test_an_attempt_before_there_is_room_is_refused():
    both = pair(d={"transfer": TransferSpec(unfilled=0.0)})
    first, _ = both.submit(request(prompt_of(LENGTH)))
    second, ledger = both.submit(request(prompt_of(LENGTH, 1)))
    both.step_d()
    assert set(both.admitted) == {first}
    both.open(second)
    both.step_d()
    assert [(event.handle, event.kind) for event in both.lost] == [(second, "Overloaded")]
    both.d.core.handle(Abort(first))
    both.step_d()
    assert set(both.admitted) == {first, second}
    finish(both, second, ledger)


def test_an_attempt_waits_a_while_for_blocks_that_others_grew_into():
    both = pair(d={"options": {"blocks": "25", "layers": "8"}, "max_sequences": 4})
    handle, ledger = both.submit(request(prompt_of(40)))
    both.step_d()
    assert handle in both.admitted
    others = [
        both.d.engine.submit(request(prompt_of(4, n), max_tokens=80, ignore_eos=True))
        for n in range(3)
    ]
    for _ in range(28):
        both.step_d()
    both.open(handle)
    both.step_d()
    assert both.lost == []
    assert both.d.core.wake_at() is not None
    both.d.clock.advance(BLOCKS_TIMEOUT)
    both.step_d()
    assert [event.kind for event in both.lost] == [Overloaded.__name__]
    both.admitted.clear()
    both.step_d()
    assert not both.admitted  # room is reserved again when there is some
    for other in others:
        both.d.engine.abort(other)
    both.step_d()
    assert handle in both.admitted
    finish(both, handle, ledger)


def test_an_attempt_gets_blocks_as_soon_as_some_are_free():
    both = pair(d={"options": {"blocks": "25", "layers": "8"}, "max_sequences": 4})
    handle, ledger = both.submit(request(prompt_of(40)))
    both.step_d()
    others = [
        both.d.engine.submit(request(prompt_of(4, n), max_tokens=80, ignore_eos=True))
        for n in range(3)
    ]
    for _ in range(28):
        both.step_d()
    both.open(handle)
    both.step_d()
    for other in others:
        both.d.engine.abort(other)
    assert both.d.core.has_work
    both.net.run()
    both.step_d()
    both.net.run()
    both.step_d()
    assert both.opened[handle].attempt == 1
    both.prefill(both.opened[handle])
    both.run()
    assert ledger.tokens == reference(ledger.request)
    both.close()


@pytest.mark.parametrize("state", ["waiting", "admitted", "asked", "open", "filling", "ready"])
@pytest.mark.parametrize("how", ["abort", "late", "here", "stop"])
def test_it_may_end_in_every_state(state: str, how: str):
    unfilled = 0.0 if state == "waiting" else 0.3
    both = pair(
        d={"transfer": TransferSpec(unfilled=unfilled), "max_sequences": 1},
        p={"max_batch_tokens": 8, "max_sequences": 4},
    )
    other = both.submit(request(prompt_of(5, 3)))[0] if state == "waiting" else None
    if state == "ready":
        both.d.engine.submit(request(prompt_of(5), max_tokens=60, ignore_eos=True))
    handle, ledger = both.submit(request(prompt_of(LENGTH), deadline=10.0))
    both.step_d()
    if state not in ("waiting", "admitted"):
        both.open(handle)
    if state not in ("waiting", "admitted", "asked"):
        both.net.run()
        both.step_d()
        both.prefill(both.opened[handle])
    if state == "filling":
        both.step_p()
        both.net.run()
        both.step_d()
    if state == "ready":
        while handle not in both.handoffs:
            both.step_p()
        both.net.run()
        both.activate(both.handoffs[handle])
        both.step_d()
        assert both.d.core.scheduler.ready
    match how:
        case "stop":
            both.close()
            return
        case "abort":
            both.d.engine.abort(ledger)
        case "late":
            both.d.clock.advance(11.0)
            both.step_d()
            assert isinstance(ledger.error, DeadlineExceeded)
            assert "while" in ledger.error.message
        case "here":
            both.d.core.handle(PrefillLocally(handle))
    if other is not None:
        both.d.core.handle(PrefillLocally(other))
    both.run()
    if how == "here":
        assert ledger.tokens == reference(ledger.request)
    assert held(both) == (0, 0)
    both.close()


def test_a_new_secret_amid_an_attempt_renames_what_it_holds():
    both = pair()
    both.d.engine.generate([request(prompt_of(LENGTH)[:12], max_tokens=1)])
    handle, ledger, _ = prefilled(both)
    both.d.core.handle(SetHashSecret(b"another"))
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == reference(ledger.request)
    again = both.d.engine.submit(ledger.request)
    both.run()
    assert again.starts[0] is not None
    assert again.starts[0].cached_tokens == 16
    both.close()


# ------------------------------------------------------------------ the prefill side


def test_a_delivery_that_fails_ends_the_prefill():
    both = pair(p={"max_batch_tokens": 8, "max_sequences": 4})
    handle, ledger = opened(both)
    mine = both.prefill(both.opened[handle])
    both.step_p()
    both.net.faults = ["lost"]
    both.net.run()
    both.step_p()
    (sent,) = both.sent
    assert (sent.handle, sent.kind) == (mine, "PathLost")
    assert both.p.core.pool.counts().used == 0
    assert handle not in both.handoffs
    both.run()
    finish(both, handle, ledger)


def test_a_withdrawn_prefill_keeps_its_blocks_until_nobody_reads_them():
    both = pair()
    handle, ledger, mine = prefilled(both)
    assert both.p.stats.sending == 1
    assert both.p.core.pool.counts().used == BLOCKS
    both.p.core.handle(Abort(mine))
    both.step_p()
    assert both.sent == []
    assert both.p.core.pool.counts().used == BLOCKS
    both.net.run()
    both.step_p()
    assert both.sent == [PrefillSent(mine)]
    assert both.p.core.pool.counts().used == both.p.stats.sending == 0
    both.run()
    finish(both, handle, ledger)


def test_a_prefill_that_is_late_is_rejected_and_says_nothing_more():
    both = pair(p={"max_batch_tokens": 8, "max_sequences": 4})
    handle, ledger = opened(both, deadline=4.0)
    both.prefill(both.opened[handle])
    both.step_p()
    both.p.clock.advance(5.0)
    both.step_p()
    both.net.run()
    both.step_p()
    assert [event.kind for event in both.refused] == ["DeadlineExceeded"]
    assert both.sent == []
    assert both.p.core.pool.counts().used == 0
    both.d.engine.abort(ledger)
    both.run()
    both.close()


def test_blocks_under_way_survive_a_preemption_and_go_out_once():
    options = {"blocks": "26", "layers": "8"}
    both = pair(p={"options": options, "max_batch_tokens": 8, "max_sequences": 8})
    wanted = request(prompt_of(60), priority=-1)
    handle, ledger = both.submit(wanted)
    both.step_d()
    both.open(handle)
    both.net.run()
    both.step_d()
    both.prefill(both.opened[handle])
    for _ in range(4):
        both.step_p()
    for n in range(6):
        both.p.engine.submit(request(prompt_of(3, n), max_tokens=30, ignore_eos=True))
    for _ in range(40):
        both.step_p()
    both.p.engine.run()
    assert both.p.stats.preemptions > 0
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == reference(wanted)
    assert both.d.stats.received_bytes == both.net.bytes_applied
    both.close()


def test_what_was_sent_stays_cached_and_is_evicted_tail_first():
    both = pair()
    handle, _, _ = prefilled(both)
    both.net.step()
    both.step_p()
    both.net.run()
    both.step_p()
    assert both.p.core.pool.counts().cached == LENGTH // 4
    both.activate(both.handoffs[handle])
    both.run()
    both.close()


@pytest.mark.parametrize(
    "changes",
    [{"first_token": 2}, {"tokens": LENGTH - 1}, {"blocks": (1, 2)}],
    ids=str,
)
def test_a_ticket_that_does_not_fit_is_refused(changes: dict[str, object]):
    both = pair()
    handle, ledger = opened(both)
    ticket = msgspec.structs.replace(both.opened[handle].ticket, **changes)
    both.p.core.handle(PrefillForPeer(5, ledger.request, ticket, "d", 1))
    (rejected,) = [event for event in both.p.core.step() if isinstance(event, Rejected)]
    assert (rejected.handle, rejected.kind) == (5, "TransferRefused")
    assert both.p.core.scheduler.handles() == []
    finish(both, handle, ledger)


def test_a_prompt_that_p_has_whole_is_sent_at_once():
    both = pair()
    both.p.engine.generate([request(prompt_of(LENGTH), max_tokens=1)])
    handle, ledger, _ = prefilled(both)
    # What was cached, before the step; then the last block, in eight groups of layers.
    assert both.handoffs[handle].handoff.parts == 1 + 8
    assert both.handoffs[handle].handoff.cached_tokens == 16
    both.activate(both.handoffs[handle])
    both.run()
    assert ledger.tokens == reference(ledger.request)
    both.close()


# ------------------------------------------------------------------ a core without a mover


def test_an_engine_that_moves_nothing_says_so():
    spec = msgspec.structs.replace(SPEC, transfer=None)
    core = EngineCore(ScriptedExecutor(), ManualClock())
    with InlineEngine(core, spec) as engine:
        assert engine.capabilities.transfers == ()
        ticket = TransferTicket(
            transfer="r",
            attempt=1,
            epoch=1,
            slot=0,
            generation=1,
            first_token=0,
            tokens=1,
            blocks=(1,),
        )
        core.handle(SetNodeLife("d", 1))
        core.handle(PeerGone("p", 1))
        core.handle(OpenAttemptBlocks(1, 1, "p", 1))
        core.handle(SubmitRemote(1, request(prompt_of(3))))
        core.handle(PrefillForPeer(2, request(prompt_of(3)), ticket, "d", 1))
        events = core.step()
        rejected = [event for event in events if isinstance(event, Rejected)]
        assert [(event.handle, event.kind) for event in rejected] == [
            (1, "TransferRefused"),
            (2, "TransferRefused"),
        ]
        assert not any(isinstance(event, Prefilled) for event in events)


def test_the_specs_of_both_sides_show_in_the_statistics():
    both = make_pair(ScriptedExecutor, SPEC)
    assert isinstance(both.d.engine.capabilities.transfers, tuple)
    assert both.d.engine.capabilities.transfers == ("fake",)
    handle, _ = opened(both)
    assert (both.d.stats.remote, both.d.stats.attempts, both.d.stats.attempts_failed) == (1, 1, 0)
    both.d.core.handle(AbortAttempt(handle, 1))
    assert (both.d.stats.remote, both.d.stats.attempts, both.d.stats.attempts_failed) == (1, 1, 1)
    assert both.d.stats.blocks_quarantined == BLOCKS
    both.close()


def test_an_executor_without_kv_cannot_be_of_a_mode_that_moves_it():
    class Still(ScriptedExecutor):
        def region(self) -> None:  # type: ignore[override]
            return None

    core = EngineCore(Still(), ManualClock(), FakeMover(FakeNet()))
    with pytest.raises(ConfigError, match=r"cannot transfer KV.*--mode=prefill or --mode=decode"):
        core.load(SPEC, lambda progress: None)
    core.close()


def test_memory_that_a_peer_may_still_write_to_is_not_given_back():
    class Stuck(FakeMover):
        stuck = True

        def close(self) -> None:
            if self.stuck:
                raise EngineError("the transports have not ended")
            super().close()

    mover = Stuck(FakeNet())
    core = EngineCore(ScriptedExecutor(), ManualClock(), mover)
    core.load(SPEC, lambda progress: None)
    with pytest.raises(EngineError, match="have not ended"):
        core.close()
    assert mover.region.view is not None
    mover.region.view[0] = 7
    mover.stuck = False
    assert core.close() == 0
