"""Passes KV fetches between a core and its node, on the node's side.

The core's pulls become questions to peers, and peers' questions become commands of the core. They
are matched by numbers, which hold for one run of the core: an answer to a question of an earlier
run is dropped, and the end of a run answers everything that still waits. It knows neither links nor
deadlines: whoever asks sets those. `CoreClient` owns one and says when a run begins and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbsorbKv,
    KvAbsorbed,
    KvChainsListed,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    ListKvChains,
    ServeKvPull,
    StopKvPull,
)
from pdserve.messages.kv_pull import KvChains, KvPullGrant, PullKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.engine import Command
    from pdserve.messages.kv_pull import OfferedChain

__all__ = ["MAX_QUESTIONS", "AbsorbResult", "KvPullController", "PullPeers"]

MAX_QUESTIONS: Final = 256
"""Questions of peers, and orders of the node, that the core has not answered; one more is
refused."""

FetchEvent = KvPullOpened | KvPullEnded | KvPullServed | KvAbsorbed | KvChainsListed


@dataclass(frozen=True, slots=True)
class AbsorbResult:
    """What came of one `absorb`."""

    blocks: int
    """Leading blocks of the chain that are in the pool now."""
    pulled: int = 0
    """Those of them that came from the peer."""
    error: str = ""
    """Why the others are not; empty: all are."""


class PullPeers(Protocol):
    """Asks peers for this engine, on the node's side."""

    def ask(self, message: PullKv, peer: NodeLife, answered: Callable[[KvPullGrant], None]) -> None:
        """Send a question to this life of a peer. `answered` is called once, possibly within this
        call, unless `forget` comes before it."""
        ...

    def forget(self, answered: Callable[[KvPullGrant], None]) -> None:
        """The answer that would go to `answered` is not wanted any more."""
        ...

    def ended(self, event: KvPullEnded) -> None:
        """Note how a pull of this engine has ended."""
        ...


class KvPullController:
    """Matches the KV fetches of one core with those who ask and answer."""

    def __init__(self, post: Callable[[Command], None]) -> None:
        """`post` sends a command to the running core; it is called between `begin` and `end`
        only."""
        self.peers: PullPeers | None = None
        """None: pulls of this engine are refused."""
        self._post = post
        self._up = False
        self._run = 0
        self._numbers = 0
        self._asking: dict[int, Callable[[KvPullGrant], None]] = {}
        """Receivers of peers' answers, by the core's numbers."""
        self._serving: dict[int, Callable[[KvPullGrant], None]] = {}
        self._absorbing: dict[int, Callable[[AbsorbResult], None]] = {}
        self._listing: dict[int, Callable[[KvChains], None]] = {}

    # ------------------------------------------------------------------ runs of the core

    def begin(self) -> None:
        """A core that can move KV is ready."""
        self._up = True
        self._run += 1

    def end(self) -> None:
        """The core sends no more events: answer everything that waits for it. Idempotent."""
        self._up = False
        serving, self._serving = self._serving, {}
        absorbing, self._absorbing = self._absorbing, {}
        listing, self._listing = self._listing, {}
        for number in list(self._asking):
            self._forget(number)
        for reply in serving.values():
            reply(KvPullGrant(refused="unready"))
        for done in absorbing.values():
            done(AbsorbResult(0, 0, "unready"))
        for listed in listing.values():
            listed(KvChains())

    # ------------------------------------------------------------------ from the node

    def _number(self) -> int:
        """The number of a new question; 0: the core cannot take one."""
        waiting = len(self._serving) + len(self._absorbing) + len(self._listing)
        if not self._up or waiting >= MAX_QUESTIONS:
            return 0
        self._numbers += 1
        return self._numbers

    def serve(
        self, peer: NodeLife, message: PullKv, reply: Callable[[KvPullGrant], None]
    ) -> Callable[[], None]:
        """Pass a peer's question to the core. `reply` is called once, possibly within this call.
        Returns the function that stops it: the peer does not want the answer any more."""
        number = self._number()
        if not number:
            reply(KvPullGrant(refused="busy" if self._up else "unready"))
            return lambda: None
        self._serving[number] = reply
        self._post(
            ServeKvPull(
                number=number,
                node=peer.node,
                epoch=peer.epoch,
                hashes=message.hashes,
                ticket=message.ticket,
                timeout=message.timeout,
            )
        )
        run = self._run
        return lambda: self._stop(number, run)

    def _stop(self, number: int, run: int) -> None:
        if run == self._run and self._serving.pop(number, None) is not None:
            self._post(StopKvPull(number))

    def absorb(
        self,
        peer: NodeLife,
        chain: OfferedChain,
        timeout: Seconds,
        done: Callable[[AbsorbResult], None],
    ) -> None:
        """Have the core pull a chain from a peer into its prefix cache. `done` is called once,
        possibly within this call."""
        number = self._number()
        if not number:
            done(AbsorbResult(0, 0, "busy" if self._up else "unready"))
            return
        self._absorbing[number] = done
        self._post(
            AbsorbKv(
                number=number,
                node=peer.node,
                epoch=peer.epoch,
                first=chain.first,
                parent=chain.parent,
                hashes=chain.hashes,
                timeout=timeout,
                mark=chain.mark,
                turns=chain.turns,
            )
        )

    def list_chains(self, blocks: int, listed: Callable[[KvChains], None]) -> None:
        """Ask the core for the chains that are worth most. `listed` is called once, possibly within
        this call."""
        number = self._number()
        if not number:
            listed(KvChains())
            return
        self._listing[number] = listed
        self._post(ListKvChains(number, blocks))

    # ------------------------------------------------------------------ from the core

    def take(self, event: FetchEvent) -> None:
        """Handle an event of the core."""
        match event:
            case KvPullOpened():
                self._ask(event)
            case KvPullEnded():
                self._forget(event.number)
                if self.peers is not None:
                    self.peers.ended(event)
            case KvPullServed():
                reply = self._serving.pop(event.number, None)
                if reply is not None:
                    reply(event.grant)
            case KvAbsorbed():
                done = self._absorbing.pop(event.number, None)
                if done is not None:
                    done(AbsorbResult(event.blocks, event.pulled, event.error))
            case KvChainsListed():
                listed = self._listing.pop(event.number, None)
                if listed is not None:
                    listed(event.listed)

    def _ask(self, event: KvPullOpened) -> None:
        number = event.number

        def answered(grant: KvPullGrant) -> None:
            if self._asking.get(number) is answered:
                del self._asking[number]
                self._post(KvPullAnswer(number, grant))

        self._asking[number] = answered
        if self.peers is None:
            answered(KvPullGrant(refused="unready"))
            return
        message = PullKv(
            epoch=event.epoch, hashes=event.hashes, ticket=event.ticket, timeout=event.timeout
        )
        self.peers.ask(message, NodeLife(NodeId(event.node), event.epoch), answered)

    def _forget(self, number: int) -> None:
        answered = self._asking.pop(number, None)
        if answered is not None and self.peers is not None:
            self.peers.forget(answered)
