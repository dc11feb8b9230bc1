"""Receives prompts that other workers prefill: their attempts, and the blocks peers may write to.

From `open` on, an attempt has fresh blocks of its own. Once everything has arrived and been checked
they become the sequence's. Otherwise they go to quarantine until the connector reports that nothing
can be written to them any more. Its blocks from the prefix cache are held, never written.

`remote_prefill` and the scheduler make the decisions. The engine core owns this and calls it in its
thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.engine_core.kv_transfer.checksums import checksum_of
from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    AttemptKey,
    PartArrived,
)
from pdserve.engine_core.kv_transfer.remote_prefill import FillAttempt, handoff_fault
from pdserve.errors import NotReady, Overloaded, PdserveError, TransferCorrupt, TransferRefused
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import Admitted, AttemptBlocksOpened, AttemptLost
from pdserve.transfer.base import GrantSpec
from pdserve.transfer.copy_plan import valid_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal

    from pdserve.engine_core.kv_transfer.admission_port import RemoteAdmissionPort
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.ids import Seconds
    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.engine import Activate, Event, OpenAttemptBlocks
    from pdserve.messages.request import TokenDelta
    from pdserve.transfer.base import Region

__all__ = ["BLOCKS_TIMEOUT", "KvReceiver"]

_log = logging.getLogger(__name__)

BLOCKS_TIMEOUT: Final[Seconds] = 2.0
"""How long an attempt waits for blocks that running sequences have taken: less than a lease."""


class KvReceiver:
    """The decode side of KV transfer in one core."""

    def __init__(
        self,
        scheduler: RemoteAdmissionPort,
        pool: BlockPool,
        mover: KvConnector,
        region: Region,
        verify: Literal["all", "sample", "off"],
        say: Callable[[Event], None],
    ) -> None:
        """`say` sends an event to the node. Tickets say `verify`, and the sender uses the stricter
        of it and its own. With "all", a handoff without all checksums is refused."""
        self.opened = 0
        self.failed = 0
        self.received_blocks = 0
        self._scheduler = scheduler
        self._pool = pool
        self._mover = mover
        self._region = region
        self._verify = verify
        self._wants_all = verify == "all" and region.view is not None
        self._say = say
        self._attempts: dict[int, FillAttempt] = {}
        """Attempts by handle."""
        self._lacking: dict[int, FillAttempt] = {}
        """Attempts that wait for blocks, by handle."""
        self._closing: dict[AttemptKey, list[int]] = {}
        """Quarantined blocks of attempts that were aborted."""
        self._fencing: Counter[int] = Counter()
        """Number of quarantined attempts of each submission."""
        self._tried = -1
        """The pool's `releases` when blocks were last looked for."""

    @property
    def received_bytes(self) -> int:
        """Bytes of the received blocks in this pool."""
        return self.received_blocks * self._region.block_bytes

    # ------------------------------------------------------------------ commands of the node

    def open(self, command: OpenAttemptBlocks, now: Seconds) -> None:
        """Let a peer fill the blocks of a submission that has been admitted."""
        handle = command.handle
        remote = self._scheduler.remote(handle)
        if remote is None:
            return
        self.give_up(handle)
        key = AttemptKey(handle, command.attempt)
        if not remote.admitted:
            self._lose(key, Overloaded("no blocks are reserved for this request", retry_after=1.0))
            return
        peer = NodeLife(NodeId(command.node), command.epoch)
        attempt = FillAttempt(key, peer, now + BLOCKS_TIMEOUT)
        remote.attempt = self._attempts[handle] = self._lacking[handle] = attempt
        self._bind(attempt)

    def activate(self, command: Activate, now: Seconds) -> list[TokenDelta]:
        """Take an attempt's handoff; once the attempt is filled its sequence decodes. Returns the
        first deltas. Ignores an attempt that has ended."""
        attempt = self._attempts.get(command.handle)
        if attempt is None or attempt.key.attempt != command.attempt:
            return []
        if not attempt.fresh:
            self._end(attempt)
            self._lose(attempt.key, TransferRefused("a handoff came for an attempt without blocks"))
            return []
        attempt.handoff = command.handoff
        return self._go_on(attempt, now)

    def give_up(self, handle: int, number: int | None = None) -> None:
        """Abort the attempt of a submission: any, or only the one with this number."""
        attempt = self._attempts.get(handle)
        if attempt is not None and number in (None, attempt.key.attempt):
            self._end(attempt)

    def holds(self, handle: int) -> bool:
        """Whether the submission has quarantined blocks, which peers might still write to."""
        return handle in self._fencing

    def prefill_here(self, handle: int) -> None:
        """Abort the attempt and compute the prompt in this engine."""
        if self._scheduler.remote(handle) is not None:
            self.give_up(handle)
            self._scheduler.prefill_here(handle)

    # ------------------------------------------------------------------ events of the mover

    def moved(
        self, moved: AttemptGranted | PartArrived | AttemptBroken | AttemptFenced, now: Seconds
    ) -> list[TokenDelta]:
        """Handle an event of the connector; returns the first deltas of a filled attempt. Once an
        attempt has ended, only `AttemptFenced` matters."""
        key = moved.key
        if isinstance(moved, AttemptFenced):
            self._free(key)
            return []
        attempt = self._attempts.get(key.handle)
        if attempt is None or attempt.key != key:
            return []
        match moved:
            case AttemptGranted():
                attempt.opened = True
                ticket = msgspec.structs.replace(moved.ticket, verify=self._verify)
                self._say(AttemptBlocksOpened(key.handle, key.attempt, ticket))
            case AttemptBroken():
                if isinstance(moved.error, NotReady):
                    self._hinder(attempt, moved.error)
                else:
                    self._end(attempt)
                    self._lose(key, moved.error)
            case PartArrived():
                attempt.arrived[moved.part] = moved.size
                return self._go_on(attempt, now)
        return []

    def _free(self, key: AttemptKey) -> None:
        blocks = self._closing.pop(key, None)
        if blocks is None:
            return
        self._pool.unquarantine(blocks)
        self._fencing[key.handle] -= 1
        if not self._fencing[key.handle]:
            del self._fencing[key.handle]

    # ------------------------------------------------------------------ time

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        if self._scheduler.may_reserve:
            return True
        return bool(self._lacking) and self._tried != self._pool.releases

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        return min((attempt.until for attempt in self._lacking.values()), default=None)

    def advance(self, now: Seconds) -> None:
        """Find blocks for attempts that lack them, then reserve room for requests that wait for
        it."""
        if self._lacking:
            self._look_for_blocks(now)
        for handle, cached_tokens in self._scheduler.reserve(now):
            self._say(Admitted(handle, cached_tokens))

    def _look_for_blocks(self, now: Seconds) -> None:
        self._tried = self._pool.releases
        for attempt in list(self._lacking.values()):
            if not self._bind(attempt) and attempt.until <= now:
                reason = f"no KV blocks were free for it within {BLOCKS_TIMEOUT:g} s"
                self._hinder(attempt, Overloaded(reason, retry_after=1.0))

    # ------------------------------------------------------------------ blocks of an attempt

    def _bind(self, attempt: FillAttempt) -> bool:
        key, scheduler = attempt.key, self._scheduler
        found = scheduler.bind(key.handle)
        if found is None:
            return False
        del self._lacking[key.handle]
        attempt.shared, attempt.fresh = found
        self.opened += 1
        stem = scheduler.stem_of(key.handle)
        first = len(attempt.shared) * self._pool.block_size
        tokens = len(stem.tokens) - first
        name = f"{stem.request.request_id}/{stem.request.prompt_index}"
        order = GrantSpec(name, key.attempt, first, tokens, tuple(attempt.fresh))
        self._mover.open(key, attempt.peer, order)
        return True

    def _end(self, attempt: FillAttempt) -> None:
        """Abort the attempt; nothing of it is used."""
        handle = attempt.key.handle
        self._forget(attempt)
        if attempt.fresh:
            self.failed += 1
            self._pool.quarantine(attempt.fresh)
            self._scheduler.release_shared(attempt.shared)
            self._closing[attempt.key] = attempt.fresh
            self._fencing[handle] += 1
            self._mover.revoke(attempt.key)
        if self._scheduler.remote(handle) is not None:
            self._scheduler.unbind(handle)

    def _hinder(self, attempt: FillAttempt, error: PdserveError) -> None:
        """Abort an attempt that failed for a local reason. Its request waits for room again, and
        `Admitted` follows when there is some."""
        self._end(attempt)
        self._scheduler.postpone(attempt.key.handle)
        self._lose(attempt.key, error)

    def _forget(self, attempt: FillAttempt) -> None:
        handle = attempt.key.handle
        del self._attempts[handle]
        self._lacking.pop(handle, None)
        remote = self._scheduler.remote(handle)
        if remote is not None:
            remote.attempt = None

    def _lose(self, key: AttemptKey, error: PdserveError) -> None:
        kind = type(error).__name__
        _log.warning("attempt %d of request %d: %s", key.attempt, key.handle, error.message)
        self._say(AttemptLost(key.handle, key.attempt, kind, error.message))

    def _go_on(self, attempt: FillAttempt, now: Seconds) -> list[TokenDelta]:
        """Start to decode if everything has arrived and no fault is found."""
        if not attempt.filled:
            return []
        error = self._fault(attempt)
        if error is not None:
            self._end(attempt)
            self._lose(attempt.key, error)
            return []
        handoff = attempt.handoff
        assert handoff is not None
        self._mover.finish(attempt.key)
        self._forget(attempt)
        self.received_blocks += len(attempt.fresh)
        return self._scheduler.activate(
            attempt.key.handle, attempt.shared, attempt.fresh, handoff, now
        )

    def _fault(self, attempt: FillAttempt) -> PdserveError | None:
        stem = self._scheduler.stem_of(attempt.key.handle)
        tokens = len(stem.tokens)
        vocab_size = self._scheduler.limits.vocab_size
        text = handoff_fault(attempt, stem.request, tokens, vocab_size)
        text = text or (self._lacking_checksums(attempt) if self._wants_all else "")
        if text:
            return TransferRefused(f"the handoff does not fit: {text}")
        text = self._fault_of_bytes(attempt, tokens)
        return TransferCorrupt(f"the KV from {attempt.peer} is corrupt: {text}") if text else None

    @staticmethod
    def _lacking_checksums(attempt: FillAttempt) -> str:
        assert attempt.handoff is not None
        count, wanted = len(dict(attempt.handoff.checksums)), len(attempt.fresh)
        if count == wanted:
            return ""
        return (
            f"it has checksums of {count} blocks of {wanted}, and --verify-kv=all is set here; "
            "KV in GPU memory has none, and --verify-kv=sample takes it"
        )

    def _fault_of_bytes(self, attempt: FillAttempt, tokens: int) -> str:
        handoff, region, size = attempt.handoff, self._region, self._pool.block_size
        assert handoff is not None
        sizes = attempt.arrived.values()
        wanted = len(attempt.fresh) * region.block_bytes
        if all(sizes) and sum(sizes) != wanted:
            return f"{sum(sizes)} bytes have arrived instead of {wanted}"
        for place, expected in handoff.checksums if region.view is not None else ():
            count = valid_tokens(tokens - len(attempt.shared) * size, size, place)
            if checksum_of(region, attempt.fresh[place], count) != expected:
                return f"the checksum of its block {place} differs"
        return ""

    # ------------------------------------------------------------------ ending

    def fenced(self) -> None:
        """The connector is closed: free all quarantined blocks, since no peer can write any
        more."""
        for key in list(self._closing):
            self._free(key)
