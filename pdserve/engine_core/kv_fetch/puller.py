"""Pulls KV blocks from other workers' pools into fresh blocks of this one: `KvPuller`.

    pull         ──▶ opening     the connector makes a grant of the blocks
    granted      ──▶ asked       the node asks the owner; parts arrive in any order
    answer, and
    every part   ──▶ checking    each block is compared with the owner's checksum
    the last one ──▶ ended

A pull ends once: with all blocks, with the leading ones that the owner had, or with one reason. If
it does not bring every block, its grant is revoked, and no block of it is used before the fence: a
pull that failed is reported at once, one that brought some blocks after its fence. Checks are
spread over steps, so that a long prefix does not delay running sequences.

It reserves, commits and frees no blocks: the caller of `pull` owns them. The engine core owns this
and calls it in its thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from pdserve.engine_core.kv_fetch.ports import REASONS
from pdserve.engine_core.kv_transfer.checksums import checksum_of
from pdserve.engine_core.kv_transfer.connector import (
    AttemptBroken,
    AttemptFenced,
    AttemptGranted,
    AttemptKey,
    PartArrived,
)
from pdserve.errors import NotReady, PathLost
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import KvPullAnswer, KvPullEnded, KvPullOpened
from pdserve.transfer.base import GrantSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine_core.kv_fetch.ports import PullEnd, PullListener
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.errors import TransferError
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import Event, PeerGone
    from pdserve.messages.kv_pull import KvPullGrant
    from pdserve.messages.tiers import KvSource
    from pdserve.transfer.base import Region

__all__ = ["CHECKED_BYTES", "KvPuller"]

_log = logging.getLogger(__name__)

CHECKED_BYTES: Final[Bytes] = 32 << 20
"""Most bytes compared with their checksums in one step: a few milliseconds."""


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull."""

    number: int
    key: AttemptKey
    source: NodeLife
    hashes: bytes
    blocks: tuple[int, ...]
    begun: Seconds
    deadline: Seconds
    listener: PullListener
    arrived: dict[int, Bytes] = field(default_factory=dict)
    """Bytes of each part that has arrived; 0: unknown."""
    grant: KvPullGrant | None = None
    """The owner's answer."""
    checking: bool = False
    checked: int = 0
    """Leading blocks whose checksum is right."""
    good: int = 0
    """Leading blocks that can be used after the fence; 0: none, or it is not known yet."""
    error: PullEnd = ""
    """Why they are not all."""

    @property
    def serial(self) -> int:
        """Its number for the node."""
        return -self.key.handle


class KvPuller:
    """The requester's side of KV fetches in one core."""

    def __init__(self, mover: KvConnector, region: Region, say: Callable[[Event], None]) -> None:
        """`say` sends an event to the node."""
        self.pulls = 0
        self.pulled_blocks = 0
        self.ended: Counter[str] = Counter()
        """Pulls that ended with an error, by reason (`PullEnd`)."""
        self._mover = mover
        self._region = region
        self._block = region.block_bytes
        self._say = say
        self._live: dict[int, _Pull] = {}
        """Pulls whose end has not been reported, by the caller's number."""
        self._keys: dict[AttemptKey, _Pull] = {}
        self._closing: dict[AttemptKey, _Pull] = {}
        """Pulls that were revoked, until their fence."""
        self._checking: list[_Pull] = []
        self._serial = 0

    @property
    def pulled_bytes(self) -> Bytes:
        """Bytes of the pulled blocks."""
        return self.pulled_blocks * self._block

    @property
    def under_way(self) -> Bytes:
        """Bytes of the blocks that pulls in progress want."""
        return sum(len(pull.blocks) for pull in self._live.values()) * self._block

    @property
    def writable(self) -> set[int]:
        """Blocks to which peers may write now."""
        pulls = (*self._keys.values(), *self._closing.values())
        return {block for pull in pulls for block in pull.blocks}

    # ------------------------------------------------------------------ the caller

    def pull(
        self,
        number: int,
        source: KvSource,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        first_token: int,
        deadline: Seconds,
        *,
        now: Seconds,
        listener: PullListener,
    ) -> None:
        """Fetch the blocks with these hashes from `source` into `blocks`. The caller holds `blocks`
        as their only user. `first_token` is the position of the first one in its chain. `listener`
        is called at the end, never within this call. `number` can be used again after the pull's
        end and its fence."""
        if not blocks or len(blocks) != len(hashes) or number in self._live:
            raise ValueError(f"pull {number} of {len(hashes)} hashes into {len(blocks)} blocks")
        self._serial += 1
        self.pulls += 1
        key = AttemptKey(-self._serial, 0)
        life = NodeLife(NodeId(source.node), source.epoch)
        wanted = tuple(blocks)
        pull = _Pull(number, key, life, b"".join(hashes), wanted, now, deadline, listener)
        self._live[number] = self._keys[key] = pull
        tokens = len(wanted) * self._region.layout.tokens
        name = f"pull {self._serial}"
        self._mover.open(key, life, GrantSpec(name, key.attempt, first_token, tokens, wanted))

    def cancel(self, number: int, now: Seconds) -> None:
        """End a pull that is not wanted any more; only `on_fenced` follows. Ignores pulls that have
        ended."""
        pull = self._live.get(number)
        if pull is not None:
            self._end(pull, 0, "cancelled", now, told=True)

    # ------------------------------------------------------------------ the node

    def take(self, command: KvPullAnswer | PeerGone, now: Seconds) -> None:
        """Take the owner's answer, or learn of a peer's end."""
        if isinstance(command, KvPullAnswer):
            self._answered(command, now)
        else:
            self._peer_gone(NodeLife(NodeId(command.node), command.epoch), now)

    def _peer_gone(self, life: NodeLife, now: Seconds) -> None:
        for pull in list(self._live.values()):
            # What only waits for its fence gets it by the end of the path.
            if pull.source == life and not pull.good:
                self._end(pull, 0, "gone", now)

    def _answered(self, command: KvPullAnswer, now: Seconds) -> None:
        pull = self._keys.get(AttemptKey(-command.number, 0))
        if pull is None or pull.grant is not None:
            return
        grant = pull.grant = command.grant
        if grant.refused:
            known = grant.refused in REASONS
            self._end(pull, 0, cast("PullEnd", grant.refused if known else "misfit"), now)
        elif not grant.granted:
            self._end(pull, 0, "absent", now)
        elif self._is_misfit(pull, grant):
            self._end(pull, 0, "misfit", now)
        else:
            self._go_on(pull, now)

    def _is_misfit(self, pull: _Pull, grant: KvPullGrant) -> bool:
        if grant.granted > len(pull.blocks) or not grant.parts:
            return True
        return self._region.view is not None and len(grant.checksums) != grant.granted

    # ------------------------------------------------------------------ the connector

    def moved(
        self, moved: AttemptGranted | PartArrived | AttemptBroken | AttemptFenced, now: Seconds
    ) -> None:
        """Handle an event of the connector."""
        if isinstance(moved, AttemptFenced):
            self._fenced(moved.key, now)
            return
        pull = self._keys.get(moved.key)
        if pull is None:
            return
        match moved:
            case AttemptGranted():
                self._ask(pull, moved, now)
            case PartArrived():
                pull.arrived[moved.part] = moved.size
                self._go_on(pull, now)
            case AttemptBroken():
                self._broken(pull, moved.error, now)

    def _ask(self, pull: _Pull, granted: AttemptGranted, now: Seconds) -> None:
        self._say(
            KvPullOpened(
                number=pull.serial,
                node=pull.source.node,
                epoch=pull.source.epoch,
                hashes=pull.hashes,
                ticket=granted.ticket,
                timeout=max(0.0, pull.deadline - now),
            )
        )

    def _broken(self, pull: _Pull, error: TransferError | NotReady, now: Seconds) -> None:
        _log.info("blocks cannot be fetched from %s: %s", pull.source, error.message)
        if isinstance(error, NotReady):
            self._end(pull, 0, "unready", now)
        else:
            self._end(pull, 0, "gone" if isinstance(error, PathLost) else "transfer", now)

    def _fenced(self, key: AttemptKey, now: Seconds) -> None:
        pull = self._closing.pop(key, None)
        if pull is None:
            return
        if pull.good:
            self._report(pull, pull.good, pull.error, now)
        pull.listener.on_fenced(pull.number)

    # ------------------------------------------------------------------ what has arrived

    def _go_on(self, pull: _Pull, now: Seconds) -> None:
        """Begin the checks once the answer and every part are here."""
        grant = pull.grant
        if grant is None or pull.checking or len(pull.arrived) < grant.parts:
            return
        if not self._is_whole(pull, grant):
            self._end(pull, 0, "misfit", now)
        elif self._region.view is None:
            self._end(pull, grant.granted, "", now)
        else:
            pull.checking = True
            self._checking.append(pull)

    def _is_whole(self, pull: _Pull, grant: KvPullGrant) -> bool:
        """Whether the parts that have arrived are those of the answer."""
        sizes = pull.arrived.values()
        if all(sizes) and sum(sizes) != grant.granted * self._block:
            return False
        return pull.arrived.keys() == set(range(grant.parts))

    def _check(self, now: Seconds) -> None:
        """Compare blocks with their checksums, the oldest pull first."""
        left = max(1, CHECKED_BYTES // self._block)
        while self._checking and left > 0:
            pull = self._checking[0]
            grant = pull.grant
            assert grant is not None
            first, last = pull.checked, min(pull.checked + left, grant.granted)
            left -= last - first
            if not all(self._is_right(pull, grant, place) for place in range(first, last)):
                self._end(pull, pull.checked, "corrupt", now)
            elif pull.checked == grant.granted:
                self._end(pull, grant.granted, "", now)

    def _is_right(self, pull: _Pull, grant: KvPullGrant, place: int) -> bool:
        tokens = self._region.layout.tokens
        if checksum_of(self._region, pull.blocks[place], tokens) != grant.checksums[place]:
            _log.warning("a block fetched from %s has wrong bytes: place %d", pull.source, place)
            return False
        pull.checked = place + 1
        return True

    # ------------------------------------------------------------------ time

    @property
    def has_work(self) -> bool:
        """Return whether `advance` can do something."""
        return bool(self._checking)

    def next_deadline(self) -> Seconds | None:
        """Time at which `advance` must be called at the latest; None: never."""
        waiting = (pull.deadline for pull in self._live.values() if not pull.checking)
        return min(waiting, default=None)

    def advance(self, now: Seconds) -> None:
        """End pulls that are late, and check blocks that have arrived."""
        for pull in list(self._live.values()):
            if pull.deadline <= now and not pull.checking:
                self._end(pull, 0, "deadline", now)
        if self._checking:
            self._check(now)

    # ------------------------------------------------------------------ ends

    def _end(
        self, pull: _Pull, blocks: int, error: PullEnd, now: Seconds, *, told: bool = False
    ) -> None:
        """End a pull of which `blocks` leading blocks are good. `told`: the caller knows."""
        if self._live.get(pull.number) is not pull:
            # The listener of another pull has cancelled it meanwhile.
            return
        if pull.checking:
            self._checking.remove(pull)
            pull.checking = False
        pull.good = 0
        if self._keys.pop(pull.key, None) is None:
            # It was revoked before, and its fence has not come.
            self._report(pull, 0, error, now, told=told)
        elif blocks == len(pull.blocks):
            self._mover.finish(pull.key)
            self._report(pull, blocks, error, now)
        else:
            self._closing[pull.key] = pull
            self._mover.revoke(pull.key)
            if blocks:
                pull.good, pull.error = blocks, error
            else:
                self._report(pull, 0, error, now, told=told)

    def _report(
        self, pull: _Pull, blocks: int, error: PullEnd, now: Seconds, *, told: bool = False
    ) -> None:
        del self._live[pull.number]
        pull.good = 0
        if error:
            self.ended[error] += 1
            wanted = len(pull.blocks)
            _log.info("%d of %d blocks fetched from %s: %s", blocks, wanted, pull.source, error)
        self.pulled_blocks += blocks
        self._say(KvPullEnded(pull.serial, blocks, error, max(0.0, now - pull.begun)))
        if not told:
            pull.listener.on_pulled(pull.number, blocks, error)

    def fenced(self, now: Seconds) -> None:
        """The connector is closed: end every pull, and report every fence, since no peer can write
        any more."""
        for pull in list(self._live.values()):
            self._end(pull, 0, "closed", now)
        for key in list(self._closing):
            self._fenced(key, now)
