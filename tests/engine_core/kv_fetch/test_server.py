"""What an owner gives to peers: bounded, held while it is read, and no longer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.engine_core.kv_fetch.server import MAX_SERVED, SERVE_SHARE, SLACK
from pdserve.engine_core.kv_transfer.connector import PartDelivered
from pdserve.errors import PathLost
from pdserve.messages.engine import KvPullServed, PeerGone, ServeKvPull, StopKvPull
from pdserve.messages.transfer import MAX_PARTS, TransferTicket
from tests.engine_core.kv_fetch.pair import (
    BLOCK,
    FetchPair,
    evict,
    fetch_pair,
    names_of,
    puller_of,
    question,
    root_of,
    server_of,
)
from tests.engine_core.kv_fetch.test_fetches import check_reused, known, small_parts
from tests.engine_core.kv_transfer.test_handoff import request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.support.disagg_pair import PairedCore


def asked(both: FetchPair, prompt: Sequence[int], *, first: int = 0) -> ServeKvPull:
    """What O is asked when R pulls the prompt's blocks; R's blocks are granted by then."""
    both.lose_answers = True
    both.pull(prompt, first=first)
    both.run()
    return question(len(both.asked), both.asked[-1])


def answers(both: FetchPair) -> list[KvPullServed]:
    return [event for event in both.step_o() if isinstance(event, KvPullServed)]


def end(both: FetchPair) -> None:
    """R's pulls time out; nothing is held."""
    both.sleep(10.0 + SLACK)
    both.run()
    both.check_idle()
    both.close()


@pytest.mark.parametrize("first", [0, 2, 5])
def test_blocks_before_the_wanted_ones_are_held_too(first: int):
    """A cached block must not outlive the one before it: the pool's own check says so."""
    both = fetch_pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 29)
    if first:
        both.generate(both.r, request(prompt[: first * BLOCK], max_tokens=1))
    both.o.core.handle(asked(both, prompt[:28], first=first))
    both.o.step()
    assert server_of(both.o).serving == 1
    assert both.o.core.pool.counts().used == 7
    assert both.o.core.pool.reserve(94) is None
    end(both)


def test_blocks_stay_until_the_last_part_has_been_read():
    both = fetch_pair()
    server_of(both.o)._limits = dataclasses.replace(small_parts(both), in_flight=1 << 30)
    prompt = known(both, 33)
    both.o.core.handle(asked(both, prompt[:32]))
    (answer,) = answers(both)
    assert answer.grant.granted == answer.grant.parts == 8
    assert both.o.core.pool.counts().used == 8
    for left in range(7, -1, -1):
        both.net.step()
        both.o.step()
        assert both.o.core.pool.counts().used == (8 if left else 0)
    assert server_of(both.o).served_blocks == 8
    end(both)


def test_a_pull_that_is_stopped_is_held_until_what_is_under_way_has_been_read():
    both = fetch_pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 33)
    command = asked(both, prompt[:32])
    both.o.core.handle(command)
    assert answers(both) == []
    both.o.core.handle(StopKvPull(command.number))
    assert both.o.core.pool.counts().used == 8
    assert answers(both) == []
    both.net.run()
    assert answers(both) == []
    assert both.o.core.pool.counts().used == 0
    assert server_of(both.o).refused == {}
    end(both)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_dead_peer_was_sent_is_given_back(late: bool):
    """By the news of its death, or, without any, by the deadline."""
    both = fetch_pair()
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 33)
    both.o.core.handle(asked(both, prompt[:32]))
    both.o.step()
    if late:
        both.o.clock.advance(10.0 + SLACK)
        both.o.step()
    else:
        both.o.core.handle(PeerGone("d", 2))
        assert both.o.core.pool.counts().used == 8
        both.o.core.handle(PeerGone("d", 1))
    both.net.run()
    both.o.step()
    assert both.o.core.pool.counts().used == 0
    assert server_of(both.o).refused == {"deadline" if late else "gone": 1}
    end(both)


MISFITS: dict[str, Callable[[ServeKvPull], ServeKvPull]] = {
    "no hashes": lambda one: msgspec.structs.replace(one, hashes=b""),
    "half a hash": lambda one: msgspec.structs.replace(one, hashes=one.hashes[:-8]),
    "fewer hashes than blocks": lambda one: msgspec.structs.replace(one, hashes=one.hashes[:-16]),
    "more hashes than blocks": lambda one: msgspec.structs.replace(one, hashes=one.hashes * 2),
    "half a block": lambda one: with_ticket(one, tokens=one.ticket.tokens - 1),
    "from within a block": lambda one: with_ticket(one, first_token=one.ticket.first_token + 1),
}


def with_ticket(command: ServeKvPull, **changes: object) -> ServeKvPull:
    ticket: TransferTicket = msgspec.structs.replace(command.ticket, **changes)
    return msgspec.structs.replace(command, ticket=ticket)


@pytest.mark.parametrize("name", MISFITS)
def test_a_question_that_does_not_fit_is_refused(name: str):
    both = fetch_pair()
    prompt = known(both, 29)
    both.o.core.handle(MISFITS[name](asked(both, prompt[:28])))
    (answer,) = answers(both)
    assert answer.grant.refused == "misfit"
    assert server_of(both.o).serving == 0
    end(both)


def test_more_pulls_than_allowed_are_busy():
    both = fetch_pair(o={"options": {"blocks": "400", "layers": "8"}})
    server_of(both.o)._limits = small_parts(both)
    prompt = known(both, 13)
    command = asked(both, prompt[:12])
    for number in range(MAX_SERVED + 2):
        both.o.core.handle(msgspec.structs.replace(command, number=100 + number))
    refused = [one.grant.refused for one in answers(both)]
    assert refused.count("busy") == 2
    both.o.core.handle(PeerGone("d", 1))
    both.net.run()
    both.o.step()
    assert both.o.core.pool.counts().used == 0
    end(both)


def test_a_long_pull_gets_no_more_than_the_share():
    both = fetch_pair(o={"options": {"blocks": "40", "layers": "8"}})
    prompt = known(both, 65)
    one = both.pull(prompt[:64])
    both.run()
    assert one.ended == (int(SERVE_SHARE * 40), "")
    check_reused(both, request(prompt), one.ended[0] * BLOCK)
    end(both)


def test_a_busy_owner_says_when_it_expects_to_be_free():
    both = fetch_pair()
    prompt = known(both, 33)
    both.pull(prompt[:32])
    both.step_r()
    both.net.step()
    both.step_r()
    both.net.step()
    both.step_o()
    both.o.clock.advance(2.0)
    both.run()
    server_of(both.o)._limits = dataclasses.replace(small_parts(both), share=0.08)
    command = asked(both, prompt[:32])
    both.o.core.handle(command)
    both.o.core.handle(msgspec.structs.replace(command, number=command.number + 1))
    (answer,) = answers(both)
    assert answer.grant.refused == "busy"
    assert answer.grant.eta == pytest.approx(2.0)
    end(both)


def test_a_pool_of_tiny_parts_has_enough_part_numbers():
    both = fetch_pair()
    server = server_of(both.o)
    server._limits = small_parts(both)
    prompt = known(both, 29)
    both.o.core.handle(asked(both, prompt[:28]))
    (serving,) = server._servings.values()
    assert server._part_size(serving) == 1
    serving.hashes *= 2 * MAX_PARTS
    assert server._part_size(serving) * MAX_PARTS >= 2 * len(serving.hashes)
    end(both)


# ------------------------------------------------------------------ lower tiers


@dataclass(eq=False)
class FakeStage:
    """Lower tiers with some blocks of a prompt, which come to the device when told."""

    end: PairedCore
    has: int
    """Blocks of those that are asked for."""
    begun: list[tuple[list[bytes], Callable[[], None]]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def begin(self, hashes: Sequence[bytes], done: Callable[[], None]) -> int:
        if not self.has:
            return 0
        self.begun.append((list(hashes), done))
        return len(self.begun)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def come(self, parent: bytes, source: PairedCore) -> None:
        """The blocks come, with the bytes that `source` has."""
        hashes, done = self.begun[-1]
        pool = self.end.core.pool
        hashes = hashes[: self.has]
        blocks = pool.reserve(len(hashes))
        assert blocks is not None
        for block, other in zip(blocks, source.core.pool.match(hashes), strict=True):
            ours, theirs = self.end.mover.region.view, source.mover.region.view
            assert ours is not None
            assert theirs is not None
            size = self.end.engine.capabilities.block_bytes
            ours[block * size : (block + 1) * size] = theirs[other * size : (other + 1) * size]
        used = pool.commit_run(blocks, hashes, parent)
        done()
        pool.release(used)


def staged(on_device: int, below: int) -> tuple[FetchPair, FakeStage, list[int], FetchPair]:
    """O has some leading blocks of a prompt on its device and the next ones below it."""
    third = fetch_pair()
    prompt = known(third, 33)
    both = fetch_pair()
    if on_device:
        both.generate(both.o, request(prompt[: on_device * BLOCK], max_tokens=1))
    stage = FakeStage(both.o, below)
    server_of(both.o).stage = stage
    return both, stage, prompt, third


@pytest.mark.parametrize("on_device", [0, 3])
@pytest.mark.parametrize("below", [1, 5])
def test_blocks_of_lower_tiers_are_staged_and_sent(on_device: int, below: int):
    both, stage, prompt, third = staged(on_device, below)
    one = both.pull(prompt[:32])
    both.run()
    assert one.ended is None
    names = names_of(both.o, prompt)
    assert [hashes for hashes, _ in stage.begun] == [names[on_device:]]
    stage.come(names[on_device - 1] if on_device else root_of(both.o), third.o)
    both.run()
    assert one.ended == (on_device + below, "")
    check_reused(both, request(prompt), (on_device + below) * BLOCK)
    both.run()
    both.check_idle()
    both.close()
    third.close()


def test_without_blocks_below_the_device_nothing_waits():
    both, stage, prompt, third = staged(3, 0)
    one = both.pull(prompt[:32])
    both.run()
    assert one.ended == (3, "")
    assert stage.begun == []
    both.close()
    third.close()


def test_staging_that_brings_nothing_leaves_what_the_device_has():
    both, stage, prompt, third = staged(3, 5)
    one = both.pull(prompt[:32])
    both.run()
    stage.begun[0][1]()
    both.run()
    assert one.ended == (3, "")
    both.close()
    third.close()


@pytest.mark.parametrize("how", ["deadline", "gone", "stopped", "closed"])
def test_staging_ends_with_its_pull(how: str):
    both, stage, prompt, third = staged(3, 5)
    both.o.core.handle(asked(both, prompt[:32]))
    both.o.step()
    match how:
        case "deadline":
            both.o.clock.advance(10.0 + SLACK)
            both.o.step()
        case "gone":
            both.o.core.handle(PeerGone("d", 1))
        case "stopped":
            both.o.core.handle(StopKvPull(1))
        case "closed":
            both.close()
    assert stage.cancelled == [1]
    both.net.run()
    if how != "closed":
        both.o.step()
        stage.begun[0][1]()
        assert both.o.core.pool.counts().used == 0
        end(both)
    third.close()


def test_parts_that_cannot_be_sent_end_the_pull():
    """Those that are under way are read to their end, and the others are not sent."""
    both = fetch_pair()
    server = server_of(both.o)
    server._limits = small_parts(both)
    both.o.core.handle(asked(both, known(both, 33)[:32]))
    assert answers(both) == []
    ((handle, serving),) = server._servings.items()
    first, *others = sorted(serving.under_way)
    assert others
    lost = PathLost("the path is lost")
    server.delivered(PartDelivered(handle, first, 0, lost), both.o.clock.now())
    assert server.refused == {"transfer": 1}
    assert both.o.core.pool.counts().used == 8, "the others are still being read"
    both.net.run()
    (answer,) = answers(both)
    assert answer.grant.refused == "transfer"
    assert both.o.core.pool.counts().used == 0
    end(both)


def test_what_is_evicted_before_it_is_asked_for_is_absent():
    both = fetch_pair()
    prompt = known(both, 33)
    command = asked(both, prompt[:32])
    evict(both.o, 8)
    both.o.core.handle(command)
    (answer,) = answers(both)
    assert answer.grant.refused == "absent"
    assert puller_of(both.r).under_way > 0
    end(both)


def test_engines_without_transfers_answer_too():
    both = fetch_pair()
    core = both.o.core
    command = asked(both, known(both, 9)[:8])
    core._fetches, kept = None, core._fetches
    core.handle(command)
    (answer,) = answers(both)
    assert answer.grant.refused == "misfit"
    core._fetches = kept
    end(both)
