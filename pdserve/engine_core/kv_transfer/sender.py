"""Computes prompts for peers and sends their KV in parts while they are computed.

Such a prompt is an ordinary submission whose choices end after one token. The blocks of its first
choice (the stem) are sent, and its tokens are reported only when all choices have one. A part's
blocks are referenced until its delivery has ended, whatever happens to the sequence. If the
sequence ends first, all its blocks are held until then, since a held block needs those before it.

`part_planner` decides the parts. The engine core owns this and calls it in its thread, before and
after each step, and within a step when the executor reports finished layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.kv_transfer.checksums import checked_places, checksum_of
from pdserve.engine_core.kv_transfer.part_planner import PartPlanner
from pdserve.errors import InvalidRequest, TransferRefused
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import Prefilled, PrefillSent
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve.transfer.base import KvPart
from pdserve.transfer.copy_plan import blocks_for, valid_tokens
from pdserve.transfer.verify import stricter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Literal

    from pdserve.engine_core.executor import ScheduledChunk, StepPlan
    from pdserve.engine_core.kv_transfer.connector import KvConnector, PartDelivered
    from pdserve.engine_core.kv_transfer.part_planner import PartSpan
    from pdserve.engine_core.scheduler.scheduler import Scheduler
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import Event, PrefillForPeer
    from pdserve.messages.request import TokenDelta
    from pdserve.messages.transfer import TransferTicket
    from pdserve.transfer.base import Region

__all__ = ["KvSender"]


@dataclass(slots=True, eq=False)
class _Prefill:
    """One prompt that is computed for a ticket."""

    handle: int
    peer: NodeLife
    ticket: TransferTicket
    parts: PartPlanner
    choices: tuple[int, ...]
    """Choices that had not ended before; the first is the stem's."""
    checked: frozenset[int]
    """Indices of the ticket's blocks that get a checksum."""
    checksums: dict[int, int] = field(default_factory=dict)
    under_way: dict[int, tuple[list[int], bool]] = field(default_factory=dict)
    """Per part under way: its blocks, and whether it completes them."""
    held: list[list[int]] = field(default_factory=list)
    """Blocks of its sequence, if that ended or was preempted while a part was under way."""
    deltas: dict[int, TokenDelta] = field(default_factory=dict)
    """The first token of each choice."""
    said: bool = False
    """Whether `Prefilled` has been sent."""
    ended: bool = False
    """Whether it has ended; no more parts are sent."""
    silent: bool = False
    """Whether the node has already got the last event of it."""
    error: PdserveError | None = None


class KvSender:
    """The prefill side of KV transfer in one core."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        mover: KvConnector,
        region: Region,
        verify: Literal["all", "sample", "off"],
        say: Callable[[Event], None],
    ) -> None:
        """`say` sends an event to the node."""
        self.sent_blocks = 0
        self.sent_bytes = 0
        self._scheduler = scheduler
        self._pool = pool
        self._mover = mover
        self._region = region
        self._verify = verify if region.view is not None else "off"
        self._say = say
        self._prefills: dict[int, _Prefill] = {}
        """Prompts by handle, each until nothing of it is under way."""
        scheduler.keeps = self._keep
        scheduler.sends = self._sends

    @property
    def active(self) -> bool:
        """False: the other methods need not be called."""
        return bool(self._prefills)

    @property
    def sending(self) -> int:
        """Number of prompts that are computed or aborted while parts are still under way."""
        return sum(prefill.said or prefill.ended for prefill in self._prefills.values())

    def holds(self, handle: int) -> bool:
        """Return whether blocks of this prompt may still be read."""
        return handle in self._prefills

    # ------------------------------------------------------------------ submissions

    def submit(self, command: PrefillForPeer, now: Seconds) -> None:
        """Submit a prompt and plan its parts. Raises what `Scheduler.submit` does, `InvalidRequest`
        for a request that cannot be prefilled for a peer, and `TransferRefused` for a ticket that
        does not fit it."""
        request, ticket = command.request, command.ticket
        given = len(request.given)
        tokens = len(request.prompt) + given
        self._check(ticket, tokens)
        if request.diverged:
            raise InvalidRequest("choices with different outputs cannot be prefilled for a peer")
        if request.pooling:
            raise InvalidRequest("an embedding request cannot be prefilled for a peer")
        sampling = msgspec.structs.replace(request.sampling, max_tokens=given + 1)
        request = msgspec.structs.replace(request, sampling=sampling)
        if self._scheduler.submit(command.handle, request, now):
            raise InvalidRequest("the given output is already complete: nothing is left to prefill")
        layers = self._region.layout.layers
        parts = PartPlanner(ticket.first_token, tokens, self._pool.block_size, layers)
        places = self._places(ticket)
        peer = NodeLife(NodeId(command.node), command.epoch)
        self._prefills[command.handle] = _Prefill(
            command.handle, peer, ticket, parts, tuple(request.live), places
        )

    def _places(self, ticket: TransferTicket) -> frozenset[int]:
        """The blocks that get a checksum, by the stricter setting of both ends."""
        if self._region.view is None:
            return frozenset()
        verify = stricter(self._verify, ticket.verify)
        return checked_places(verify, ticket.transfer, ticket.attempt, len(ticket.blocks))

    def _check(self, ticket: TransferTicket, tokens: int) -> None:
        size = self._pool.block_size
        end, blocks = ticket.first_token + ticket.tokens, blocks_for(ticket.tokens, size)
        if ticket.first_token % size or end != tokens or len(ticket.blocks) != blocks:
            raise TransferRefused(
                f"a ticket of {len(ticket.blocks)} blocks for tokens {ticket.first_token} to {end} "
                f"does not fit a request of {tokens} tokens in blocks of {size}"
            )

    def abort(self, handle: int) -> None:
        """The node has aborted the prompt: only `PrefillSent` follows."""
        self._end(handle, silent=False)

    def fail(self, handle: int) -> None:
        """The node already knows that the prompt failed: no event follows."""
        self._end(handle, silent=True)

    def _end(self, handle: int, *, silent: bool) -> None:
        prefill = self._prefills.get(handle)
        if prefill is None:
            return
        prefill.silent |= silent
        if not prefill.ended:
            prefill.ended = True
            if prefill.under_way:
                self._mover.withdraw(handle, prefill.peer, prefill.ticket)
        self._settle(prefill)

    # ------------------------------------------------------------------ steps

    def planned(self, plan: StepPlan) -> None:
        """Before a step: send what the prefix cache has, and watch the step's layers."""
        last: list[tuple[_Prefill, ScheduledChunk]] = []
        watched = False
        for prefill, chunk in self._chunks(plan):
            watched = True
            self._post(prefill, chunk.sequence, prefill.parts.computed(chunk.start))
            if chunk.samples:
                last.append((prefill, chunk))
        if watched:
            plan.watch = lambda layers: self._layered(last, layers)
        if last:
            edges = frozenset.union(*(prefill.parts.edges for prefill, _ in last))
            plan.watch_at = edges - {self._region.layout.layers}

    def _layered(self, last: list[tuple[_Prefill, ScheduledChunk]], layers: int) -> None:
        for prefill, chunk in last:
            if layers < self._region.layout.layers and not prefill.ended:
                self._post(prefill, chunk.sequence, prefill.parts.layered(layers))

    def computed(self, plan: StepPlan) -> None:
        """After a step, before its sequences may end: send what is complete now."""
        for prefill, chunk in self._chunks(plan):
            end = chunk.start + chunk.count
            self._post(prefill, chunk.sequence, prefill.parts.computed(end))

    def _chunks(self, plan: StepPlan) -> Iterator[tuple[_Prefill, ScheduledChunk]]:
        """The chunks of stems, whose blocks are sent."""
        for chunk in plan.chunks:
            prefill = self._prefills.get(chunk.sequence.handle)
            if (
                prefill is not None
                and not prefill.ended
                and chunk.sequence.choice == prefill.choices[0]
            ):
                yield prefill, chunk

    def _post(self, prefill: _Prefill, sequence: Sequence, piece: PartSpan | None) -> None:
        if piece is None:
            return
        blocks = sequence.blocks[piece.first : piece.last]
        complete = piece.layers[1] == self._region.layout.layers
        self._pool.acquire(blocks)
        prefill.under_way[piece.number] = (blocks, complete)
        if complete and prefill.checked:
            self._take_checksums(prefill, piece.first, blocks)
        start = piece.first * self._pool.block_size
        part = KvPart(piece.number, start, tuple(blocks), piece.layers)
        self._mover.deliver(prefill.handle, prefill.peer, prefill.ticket, part)

    def _sends(self, sequence: Sequence) -> bool:
        """Return whether parts of the sequence are under way: then a preemption does not free its
        blocks."""
        prefill = self._prefills.get(sequence.handle)
        if prefill is None:
            return False
        return bool(prefill.under_way) and sequence.choice == prefill.choices[0]

    def _keep(self, sequence: Sequence) -> bool:
        if not self._sends(sequence):
            return False
        self._prefills[sequence.handle].held.append(sequence.blocks)
        return True

    def _take_checksums(self, prefill: _Prefill, first: int, blocks: list[int]) -> None:
        size, ticket = self._pool.block_size, prefill.ticket
        begin = first - ticket.first_token // size
        for place, block in enumerate(blocks, begin):
            if place in prefill.checked:
                count = valid_tokens(ticket.tokens, size, place)
                prefill.checksums[place] = checksum_of(self._region, block, count)

    # ------------------------------------------------------------------ results

    def take(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Keep the first tokens of these prompts; returns the deltas of other requests."""
        others: list[TokenDelta] = []
        for delta in deltas:
            prefill = self._prefills.get(delta.handle)
            if prefill is None:
                others.append(delta)
                continue
            prefill.deltas[delta.choice] = delta
            if len(prefill.deltas) == len(prefill.choices) and not prefill.ended:
                prefill.said = True
                self._say(Prefilled(prefill.handle, _handoff(prefill)))
                self._settle(prefill)
        return others

    def delivered(self, moved: PartDelivered) -> None:
        """The connector reads a part's blocks no more. If the part did not arrive, abort the
        prompt."""
        prefill = self._prefills.get(moved.handle)
        if prefill is None or moved.part not in prefill.under_way:
            return
        blocks, complete = prefill.under_way.pop(moved.part)
        self._pool.release(blocks)
        if not prefill.under_way:
            self._let_go(prefill)
        if moved.error is None:
            self.sent_bytes += moved.size
            self.sent_blocks += len(blocks) if complete else 0
            self._settle(prefill)
        elif prefill.ended:
            self._settle(prefill)
        else:
            prefill.error = moved.error
            self._scheduler.abort(prefill.handle)
            self._end(prefill.handle, silent=False)

    def _let_go(self, prefill: _Prefill) -> None:
        for blocks in prefill.held:
            self._pool.release(blocks)
        prefill.held.clear()

    def _settle(self, prefill: _Prefill) -> None:
        """Send the last event once nothing is under way."""
        if prefill.under_way or not (prefill.said or prefill.ended):
            return
        del self._prefills[prefill.handle]
        if not prefill.silent:
            error = prefill.error
            kind, message = ("", "") if error is None else (type(error).__name__, error.message)
            self._say(PrefillSent(prefill.handle, kind, message))

    # ------------------------------------------------------------------ ending

    def fenced(self) -> None:
        """The connector is closed: release all blocks, since nothing reads them any more."""
        for prefill in self._prefills.values():
            for blocks, _ in prefill.under_way.values():
                self._pool.release(blocks)
            self._let_go(prefill)
        self._prefills.clear()


def _handoff(prefill: _Prefill) -> Handoff:
    deltas = [prefill.deltas[choice] for choice in prefill.choices]
    started = deltas[0].started
    assert started is not None
    return Handoff(
        tokens=prefill.parts.tokens,
        parts=prefill.parts.count,
        first=tuple(
            FirstToken(delta.tokens[0], delta.logprobs[0] if delta.logprobs else None)
            for delta in deltas
        ),
        prompt_logprobs=deltas[0].prompt_logprobs,
        cached_tokens=started.cached_tokens,
        started=started,
        checksums=tuple(sorted(prefill.checksums.items())),
    )
