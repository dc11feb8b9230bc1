"""Sends prompts that a self-scheduling engine computes for peers, by way of staging blocks.

    waits for staging blocks ─▶ the engine computes and copies ─▶ parts are delivered ─▶ sent
            └── deadline: rejected, so that the decode worker asks another worker

A prompt gets all its staging blocks before the engine takes it: with fewer it could stop half-way,
and two such prompts would wait for each other. A staging block is freed when its part has been
delivered. If the prompt ends first, the rest is freed once the engine copies nothing into it.

It knows no engine. Owned by `StagedTransfers`, in the core's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.engine_core.kv_transfer.checksums import checked_places, checksum_of
from pdserve.engine_core.kv_transfer.part_planner import PartPlanner
from pdserve.engine_core.staged_kv.port import StagedBlocks
from pdserve.errors import InvalidRequest, Overloaded, PdserveError, StepFailed, TransferRefused
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import Prefilled, PrefillSent
from pdserve.messages.handoff import FirstToken, Handoff
from pdserve.transfer.base import KvPart
from pdserve.transfer.copy_plan import blocks_for, valid_tokens
from pdserve.transfer.verify import stricter

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from pdserve.engine_core.kv_transfer.connector import KvConnector, PartDelivered
    from pdserve.engine_core.staged_kv.pool import StagingPool
    from pdserve.engine_core.staged_kv.port import StagedEngine
    from pdserve.ids import Seconds
    from pdserve.messages.engine import Event, PrefillForPeer
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.transfer import TransferTicket

__all__ = ["STAGING_TIMEOUT", "StagedSender"]

STAGING_TIMEOUT: Final[Seconds] = 10.0
"""How long a prompt waits for staging blocks. Longer than earlier prompts take to be sent; shorter
than the decode worker lets an attempt make no progress."""


@dataclass(slots=True, eq=False)
class _Prefill:
    """One prompt that is computed for a ticket."""

    handle: int
    request: GenerateRequest
    """As the engine gets it: one choice, one token."""
    peer: NodeLife
    ticket: TransferTicket
    parts: PartPlanner
    choices: int
    """Choices that the decode worker goes on with; each gets a first token."""
    checked: frozenset[int]
    """Indices of the ticket's blocks that get a checksum."""
    until: Seconds
    """Time at which it is rejected if it has no staging blocks."""
    slots: tuple[int, ...] = ()
    """Staging blocks for the ticket's blocks; empty while it waits for them."""
    posted: int = 0
    """How many of the slots are in parts that were posted."""
    copying: bool = False
    """Whether the engine may still write to the slots."""
    under_way: dict[int, list[int]] = field(default_factory=dict)
    """Slots of each part under way."""
    checksums: dict[int, int] = field(default_factory=dict)
    said: bool = False
    """Whether `Prefilled` has been sent."""
    ended: bool = False
    """Whether it has ended before: no more parts are sent."""
    silent: bool = False
    """Whether the node has already got the last event of it."""
    error: PdserveError | None = None


class StagedSender:
    """The prefill side of KV transfer in a core that schedules itself."""

    def __init__(
        self,
        engine: StagedEngine,
        staging: StagingPool,
        mover: KvConnector,
        verify: Literal["all", "sample", "off"],
        say: Callable[[Event], None],
        end: Callable[[int, PdserveError | None], None],
        max_waiting: int,
    ) -> None:
        """`say` sends an event to the node. `end` ends a submission in the core and the engine:
        with an error it is rejected, without one nothing is said. `max_waiting`: prompts that may
        wait for staging blocks."""
        self.sent_blocks = 0
        self.sent_bytes = 0
        self._engine = engine
        self._staging = staging
        self._pool = staging.blocks
        self._mover = mover
        # Device memory has no view to compute checksums of; its back ends compare their bytes.
        self._verify: Literal["all", "sample", "off"]
        self._verify = verify if staging.region.view is not None else "off"
        self._say = say
        self._end_submission = end
        self._max_waiting = max_waiting
        self._prefills: dict[int, _Prefill] = {}
        """Prompts by handle, until nothing of them is copied or under way."""
        self._waiting: dict[int, _Prefill] = {}
        """Those that wait for staging blocks, in order of arrival."""
        self._tried = -1
        """The pool's `releases` when blocks were last looked for."""

    @property
    def sending(self) -> int:
        """Number of prompts that are computed or aborted while parts are still under way."""
        return sum(prefill.said or prefill.ended for prefill in self._prefills.values())

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for staging blocks."""
        return len(self._waiting)

    def holds(self, handle: int) -> bool:
        """Return whether staging blocks of this prompt may still be read or written."""
        return handle in self._prefills

    # ------------------------------------------------------------------ submissions

    def submit(self, command: PrefillForPeer, now: Seconds) -> None:
        """Take a prompt, which has passed `check_request`. Raises `InvalidRequest` if it cannot be
        prefilled for a peer, `TransferRefused` if the ticket does not fit it or the staging, and
        `Overloaded` if too many wait."""
        request, ticket = command.request, command.ticket
        if request.diverged:
            raise InvalidRequest("choices with different outputs cannot be prefilled for a peer")
        if request.pooling:
            raise InvalidRequest("an embedding request cannot be prefilled for a peer")
        if request.images:
            raise InvalidRequest("a prompt with images cannot be prefilled for a peer")
        if len(self._waiting) >= self._max_waiting:
            reason = f"{len(self._waiting)} prompts for other workers wait for staging blocks"
            raise Overloaded(reason, retry_after=1.0)
        given = request.given
        tokens = len(request.prompt) + len(given)
        self._check(ticket, tokens)
        layers = self._staging.layout.layers
        prefill = _Prefill(
            command.handle,
            _for_peer(request, given),
            NodeLife(NodeId(command.node), command.epoch),
            ticket,
            PartPlanner(ticket.first_token, tokens, self._pool.block_size, layers),
            len(request.live),
            self._places(ticket),
            now + STAGING_TIMEOUT,
        )
        self._prefills[command.handle] = self._waiting[command.handle] = prefill
        self._tried = -1

    def _places(self, ticket: TransferTicket) -> frozenset[int]:
        """The blocks that get a checksum, by the stricter setting of both ends."""
        if self._staging.region.view is None:
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
        if blocks > self._pool.num_blocks:
            raise TransferRefused(
                f"{blocks} KV blocks are to be sent; this worker has {self._pool.num_blocks} for "
                "staging"
            )

    @property
    def has_work(self) -> bool:
        """Return whether `advance` may start a prompt."""
        return bool(self._waiting) and self._tried != self._pool.releases

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        return next((prefill.until for prefill in self._waiting.values()), None)

    def advance(self, now: Seconds, spare: int) -> None:
        """Start the prompts that get staging blocks, in order, and reject those that have waited
        too long. At least `spare` blocks stay free, which are reserved for incoming KV."""
        self._tried = self._pool.releases
        for prefill in list(self._waiting.values()):
            slots = self._pool.reserve(len(prefill.ticket.blocks), spare=spare)
            if slots is None:
                break
            del self._waiting[prefill.handle]
            self._start(prefill, slots)
        for prefill in [one for one in self._waiting.values() if one.until <= now]:
            reason = f"no staging blocks were free for it within {STAGING_TIMEOUT:g} s"
            self._end_submission(prefill.handle, Overloaded(reason, retry_after=1.0))

    def _start(self, prefill: _Prefill, slots: list[int]) -> None:
        first = prefill.ticket.first_token // self._pool.block_size
        blocks = StagedBlocks(first, tuple(slots), prefill.parts.tokens)
        prefill.slots, prefill.copying = blocks.slots, True
        try:
            self._engine.prefill_staged(prefill.handle, prefill.request, blocks)
        except PdserveError as error:
            prefill.copying = False
            self._end_submission(prefill.handle, error)

    def abort(self, handle: int) -> None:
        """The node has aborted the prompt: only `PrefillSent` follows."""
        self._end(handle, silent=False)

    def fail(self, handle: int) -> None:
        """The prompt has failed, and the node is told so in another way: no event follows."""
        self._end(handle, silent=True)

    def _end(self, handle: int, *, silent: bool) -> None:
        prefill = self._prefills.get(handle)
        if prefill is None:
            return
        if not prefill.ended:
            prefill.ended, prefill.silent = True, silent
            self._waiting.pop(handle, None)
            if prefill.under_way:
                self._mover.withdraw(handle, prefill.peer, prefill.ticket)
        self._settle(prefill)

    # ------------------------------------------------------------------ from the engine

    def copied(self, handle: int, tokens: int) -> None:
        """The blocks with the first `tokens` tokens are in staging, from the ticket's first token
        on; the last one may be partly filled if these are all tokens."""
        prefill = self._prefills.get(handle)
        if prefill is None or prefill.ended:
            return
        span = prefill.parts.computed(tokens)
        if span is None:
            return
        first = prefill.ticket.first_token // self._pool.block_size
        slots = list(prefill.slots[span.first - first : span.last - first])
        prefill.posted = span.last - first
        prefill.under_way[span.number] = slots
        self._take_checksums(prefill, span.first - first, slots)
        part = KvPart(span.number, span.first * self._pool.block_size, tuple(slots), span.layers)
        self._mover.deliver(handle, prefill.peer, prefill.ticket, part)

    def _take_checksums(self, prefill: _Prefill, begin: int, slots: list[int]) -> None:
        for place, slot in enumerate(slots, begin):
            if place in prefill.checked:
                count = valid_tokens(prefill.ticket.tokens, self._pool.block_size, place)
                prefill.checksums[place] = checksum_of(self._staging.region, slot, count)

    def let_go(self, handle: int) -> None:
        """The engine writes to the prompt's staging blocks no more."""
        prefill = self._prefills.get(handle)
        if prefill is not None:
            prefill.copying = False
            self._settle(prefill)

    def take(self, delta: TokenDelta) -> bool:
        """Take the first token of a prompt; False: the delta is another request's."""
        prefill = self._prefills.get(delta.handle)
        if prefill is None:
            return False
        if not prefill.ended and not prefill.said:
            self._hand_off(prefill, delta)
        return True

    def _hand_off(self, prefill: _Prefill, delta: TokenDelta) -> None:
        if not prefill.parts.done or delta.started is None or not delta.tokens:
            error = StepFailed("the engine has ended a prompt without all of its KV")
            self._end_submission(prefill.handle, error)
            return
        prefill.said = True
        self._say(Prefilled(prefill.handle, _handoff(prefill, delta)))
        self._end_submission(prefill.handle, None)
        self._settle(prefill)

    # ------------------------------------------------------------------ from the transports

    def delivered(self, moved: PartDelivered) -> None:
        """The transports read a part's blocks no more. If the part did not arrive, end the
        prompt."""
        prefill = self._prefills.get(moved.handle)
        if prefill is None or moved.part not in prefill.under_way:
            return
        slots = prefill.under_way.pop(moved.part)
        self._pool.release(slots)
        if moved.error is None:
            self.sent_bytes += moved.size
            self.sent_blocks += len(slots)
        elif not prefill.ended:
            prefill.error = moved.error
            self._end(prefill.handle, silent=False)
            self._end_submission(prefill.handle, None)
        self._settle(prefill)

    def _settle(self, prefill: _Prefill) -> None:
        """Send the last event once no staging block is read or written."""
        if prefill.under_way or prefill.copying or not (prefill.said or prefill.ended):
            return
        if self._prefills.pop(prefill.handle, None) is None:
            return
        self._pool.release(prefill.slots[prefill.posted :])
        self._tried = -1
        if not prefill.silent:
            error = prefill.error
            kind, message = ("", "") if error is None else (type(error).__name__, error.message)
            self._say(PrefillSent(prefill.handle, kind, message))

    # ------------------------------------------------------------------ ending

    def fenced(self) -> None:
        """Connector and engine are closed: release all blocks, since nothing reads or writes
        them."""
        for prefill in self._prefills.values():
            for slots in prefill.under_way.values():
                self._pool.release(slots)
            self._pool.release(prefill.slots[prefill.posted :])
        self._prefills.clear()
        self._waiting.clear()


def _for_peer(request: GenerateRequest, given: list[int]) -> GenerateRequest:
    """One choice that ends after one token. The token is not used, so it needs neither a grammar
    nor noise."""
    sampling = replace(
        request.sampling,
        max_tokens=len(given) + 1,
        temperature=0.0,
        grammar="",
        thinking=None,
    )
    return replace(request, n=1, output=[given] if given else [], ended=(), sampling=sampling)


def _handoff(prefill: _Prefill, delta: TokenDelta) -> Handoff:
    started = delta.started
    assert started is not None
    first = FirstToken(delta.tokens[0], delta.logprobs[0] if delta.logprobs else None)
    return Handoff(
        tokens=prefill.parts.tokens,
        parts=prefill.parts.count,
        # The decode worker samples anew, for every choice.
        first=(first,) * prefill.choices,
        prompt_logprobs=delta.prompt_logprobs,
        cached_tokens=started.cached_tokens,
        started=started,
        checksums=tuple(sorted(prefill.checksums.items())),
    )
