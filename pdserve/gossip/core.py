"""The gossip membership machine of one node: `step(now, event) -> effects` is its only entry.

    phase     event                                        next
    NEW       StartGossip                                  JOINING, or UP without seeds
    JOINING   tables equal; alone_after                    UP           TableReady
    any       Leave                                        LEAVING
    LEAVING   leave_linger                                 OUT          GossipStopped
    any       own epoch is dead                            OUT          Rejoin
    any       a later epoch of this node lives             OUT          Superseded

The state of each member, as this node sees it (precedence in `member_table`):

    state     event                                        next         effect
    -         record of a new life                         ALIVE        Joined
    ALIVE     verdict of a probe, refusal, rumour          SUSPECT      Suspected
    SUSPECT   higher incarnation, by the member itself     ALIVE        Refuted
    SUSPECT   countdown over; enough refusals              DEAD         Died
    any       rumour of its death, a later life            DEAD         Died
    any       its goodbye                                  LEFT         Departed

It connects the parts of this package and fixes their order. It knows no sockets, tasks or clocks:
the driver owns those, and calls `step` for every event and again at `due`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.gossip import events as ev
from pdserve.gossip import messages as m
from pdserve.gossip.broadcast_queue import BroadcastQueue
from pdserve.gossip.cards import Cards
from pdserve.gossip.context import GossipContext
from pdserve.gossip.dialer import Dialer
from pdserve.gossip.member_table import MemberTable
from pdserve.gossip.messages import MemberRecord, MemberState, Rumour
from pdserve.gossip.probe_rings import ProbeRings
from pdserve.gossip.probing import Prober
from pdserve.gossip.suspicion import Suspicion, floor
from pdserve.gossip.table_digest import TableDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random
    from typing import Any

    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.member_table import RecordChange
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["Gossip", "GossipPhase"]

_FULL_CHUNK = 512
_SWEEP: Seconds = 60.0
_HOLD: Seconds = 1.0
"""Interval of checks whether an isolated node is still isolated."""


class GossipPhase(Enum):
    NEW = 0
    JOINING = 1
    UP = 2
    LEAVING = 3
    OUT = 4


class Gossip:
    """The gossip machine of one life of a node. Has one caller; `step` is not re-entrant."""

    def __init__(self, me: MemberRecord, config: GossipConfig, random: Random) -> None:
        """Args: `me` is this node's record: node, epoch, address, role. `random` is the caller's,
        so that a run repeats.
        """
        self.me = replace(me, incarnation=0, state=MemberState.ALIVE, card=0)
        self.phase = GossipPhase.NEW
        self.members = MemberTable()
        self.context = GossipContext(me.node, config, random)
        self.cards = Cards(self.context, self._reach)
        self._config = config
        self._overlay = ProbeRings(config.rings, config.mesh_limit)
        self._ledger = TableDigest(self.members)
        self._outbox = BroadcastQueue(config)
        self._prober = Prober(self.context, self._buddy, self._helpers, self._epoch_of)
        self._dialler = Dialer(self.context, me.address)
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._buried: dict[NodeId, Seconds] = {}
        self._met: dict[NodeId, Epoch] = {}
        self._ours: dict[NodeId, None] = {}
        self._turns: list[NodeId] = []
        self._seeds: tuple[str, ...] = ()
        self._found: dict[str, NodeId] = {}
        """The node that last answered at each seed's address, which may differ from the node's own
        address.
        """
        self._moved = True
        self._deaf_until: Seconds = 0.0
        self._last_round: Seconds = float("-inf")
        self._last_step: Seconds = float("-inf")
        self._on_event: dict[type, Callable[[Any], None]] = {
            ev.StartGossip: self._on_start,
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.DialAttemptFailed: self._on_dial_failed,
            ev.MessageReceived: self._on_received,
            ev.Tick: self._on_tick,
            ev.SetCard: self._on_set_card,
            ev.WantPart: lambda event: self.cards.want(event.owner, event.hash),
            ev.Leave: self._on_leave,
        }
        self._on_message: dict[type, Callable[[NodeId, Any], None]] = {
            m.News: lambda node, message: self._hear_all(node, message.rumours),
            m.Ping: self._on_ping,
            m.Ack: self._on_ack,
            m.IndirectPing: self._prober.ping_for,
            m.IndirectPingResult: self._on_answer,
            m.TableHash: self._on_summary,
            m.BucketHashes: self._on_buckets,
            m.RecordHashes: self._on_digests,
            m.Records: self._on_records,
            m.CardRequest: self.cards.answer,
            m.CardReply: self.cards.reply,
            m.PartRequest: self.cards.answer_part,
            m.PartReply: self.cards.part_reply,
        }
        self._on_due: dict[str, Callable[[Any], None]] = {
            "ping": self._ping_due,
            "relay": self._prober.relay_due,
            "suspect": self._suspect_due,
            "gossip": lambda _: None,
            "dial": self._dial_due,
            "seed": self._dialler.dial,
            "linger": self._linger_due,
            "sync": self._sync_due,
            "reunion": self._reunion_due,
            "alone": lambda _: self._ready(alone=True),
            "sweep": self._sweep_due,
            "card": self.cards.card_due,
            "part": self.cards.part_due,
            "leave": lambda _: self._out(ev.GossipStopped()),
        }

    @property
    def due(self) -> Seconds | None:
        """The time at which to call `step` with `Tick`, if no other event comes before."""
        return self.context.agenda.first

    @property
    def targets(self) -> Sequence[NodeId]:
        """The members that this node watches."""
        return self._prober.targets

    def step(self, now: Seconds, event: ev.Event) -> list[ev.Effect]:
        """Handles one event at `now`; returns the effects to perform, in order."""
        if self.phase is GossipPhase.OUT:
            return []
        self.context.now = now
        self._notice_lag()
        self._on_event[type(event)](event)
        if not self._silent():
            self._settle()
        self._last_step = now
        effects, self.context.effects = self.context.effects, []
        return effects

    # ----------------------------------------------------------------------- start, leave, own life

    def _silent(self) -> bool:
        return self.phase is GossipPhase.OUT

    def _on_start(self, event: ev.StartGossip) -> None:
        if self.phase is not GossipPhase.NEW:
            return
        self.phase = GossipPhase.JOINING
        self._seeds = tuple(a for a in event.seeds if a != self.me.address)
        self._speak()
        for record in event.known:
            self._hear(None, Rumour(record), tell=False)
        for address in self._seeds:
            self._dialler.dial(address)
        self.context.after("sweep", "", _SWEEP)
        self.context.after("sync", "", self.context.around(self._config.sync_interval))
        self.context.after("reunion", "", self.context.around(self._config.reunion_interval))
        if self._seeds or self.members.present > 1:
            self.context.after("alone", "", self._config.alone_after)
        elif self.phase is GossipPhase.JOINING:
            self._ready(alone=True)

    def _on_leave(self, event: ev.Leave) -> None:
        if self.phase is GossipPhase.LEAVING:
            return
        self.phase = GossipPhase.LEAVING
        self.me = replace(self.me, state=MemberState.LEFT)
        self._speak()
        goodbye = m.News((Rumour(self.me),))
        for node in list(self.context.links):
            self.context.send(node, goodbye)
        self.context.after("leave", "", self._config.leave_linger)

    def _on_set_card(self, event: ev.SetCard) -> None:
        self.cards.set_own(self.me.epoch, self.me.card + 1, event.card, event.parts)
        self.me = replace(self.me, card=self.me.card + 1)
        if self.phase is not GossipPhase.NEW:
            self._speak()

    def _speak(self) -> None:
        """Publishes a change of this node's own record."""
        self.members.apply(self.me)
        self._ledger.update(self.me)
        self._outbox.put(Rumour(self.me))
        if self.me.state.final:
            self._overlay.remove(self.me.node)
        else:
            self._overlay.add(self.me.node)

    def _ready(self, *, alone: bool) -> None:
        if self.phase is GossipPhase.JOINING:
            self.phase = GossipPhase.UP
            self.context.agenda.cancel(("alone", ""))
            self.context.emit(ev.TableReady(alone=alone and self.members.present == 1))

    def _out(self, effect: ev.Rejoin | ev.Superseded | ev.GossipStopped) -> None:
        """Ends this life: the machine sends nothing more."""
        self.phase = GossipPhase.OUT
        self.context.effects = [e for e in self.context.effects if not isinstance(e, ev.Send)]
        self.context.agenda.clear()
        self.context.emit(effect)

    def _rejoin(self, above: Epoch) -> ev.Rejoin:
        """Asks for a new life among the members believed alive. Members that this life declared
        dead may only have been cut off from it, so their verdicts are dropped and their
        addresses tried.
        """
        others = [record for record in self.members if record.node != self.me.node]
        seeds = (*self._seeds, *(record.address for record in others if record.address))
        known = tuple(record for record in others if not record.state.final)
        return ev.Rejoin(above, ev.StartGossip(tuple(dict.fromkeys(seeds)), known))

    def _about_me(self, record: MemberRecord) -> None:
        if record.epoch > self.me.epoch:
            gone = record.state.final
            self._out(self._rejoin(record.epoch) if gone else ev.Superseded(record.epoch))
        elif record.epoch < self.me.epoch or self.phase is GossipPhase.LEAVING:
            return
        elif record.state.final or record.incarnation >= m.HIGHEST:
            # At the highest incarnation this life cannot refute a suspicion any more.
            self._out(self._rejoin(self.me.epoch))
        elif record.state is MemberState.SUSPECT and record.incarnation >= self.me.incarnation:
            self.context.health.worse()
            self.me = replace(self.me, incarnation=record.incarnation + 1)
            self._speak()

    # ----------------------------------------------------------------------- rumours

    def _hear_all(self, teller: NodeId, rumours: Sequence[Rumour]) -> None:
        for rumour in rumours:
            self._hear(teller, rumour)

    def _hear(self, teller: NodeId | None, rumour: Rumour, *, tell: bool = True) -> None:
        """Applies a rumour and passes on what is new in it."""
        record = rumour.record
        if self._silent():
            return
        if record.node == self.me.node:
            self._about_me(record)
            return
        if self.members.get(record.node) is None and not self._make_room(record):
            return
        change = self.members.apply(record)
        if change is not None:
            self._changed(change, teller)
            if tell:
                self._outbox.put(replace(rumour, record=change.new))
        if record.state is MemberState.SUSPECT:
            self._confirm(rumour, known=change is None)

    def _make_room(self, record: MemberRecord) -> bool:
        if len(self.members) < self._config.max_members:
            return True
        if self._buried:
            self._forget(min(self._buried, key=self._buried.__getitem__))
            return True
        self.context.emit(ev.TableFull(record.node))
        return False

    def _changed(self, change: RecordChange, teller: NodeId | None) -> None:
        old, new = change.old, change.new
        self._ledger.update(new)
        if change.new_life and old is not None:
            self._end(old)
            if not old.state.final:
                self.context.emit(ev.Died(replace(old, state=MemberState.DEAD)))
        if new.state.final:
            self._bury(change)
            return
        self._buried.pop(new.node, None)
        self._overlay.add(new.node)
        self._moved = self._moved or change.new_life
        if change.new_life:
            self.context.emit(ev.Joined(new))
        if change.new_state:
            self._live(change)
        self.cards.learn(new, teller)

    def _live(self, change: RecordChange) -> None:
        """Handles a new record of a member that is alive."""
        new = change.new
        if new.state is MemberState.SUSPECT:
            self._suspicions[new.node] = Suspicion(
                new.epoch, new.incarnation, self.context.now, self._deaf_until
            )
            self.context.emit(ev.Suspected(new))
            self._count_down(new.node)
        elif self._suspicions.pop(new.node, None):
            self.context.agenda.cancel(("suspect", new.node))
            self.context.emit(ev.Refuted(new))

    def _bury(self, change: RecordChange) -> None:
        new = change.new
        self._end(new)
        self._overlay.remove(new.node)
        self._moved = True
        self._buried.setdefault(new.node, self.context.now)
        if new.node in self._found.values() and self._lost():
            for seed in self._seeds:
                pause = self.context.around(self._config.redial_first)
                self.context.after("seed", seed, pause)
        if self.context.links.get(new.node) == new.epoch:
            # The member may run behind a partition; this tells it as soon as the partition ends.
            self.context.send(new.node, m.Records((new,)))
        if change.new_life or (change.old and not change.old.state.final):
            left = new.state is MemberState.LEFT
            self.context.emit(ev.Departed(new) if left else ev.Died(new))

    def _end(self, record: MemberRecord) -> None:
        """Handles the end of a member's life: drops all that belongs to it."""
        self._suspicions.pop(record.node, None)
        self.context.agenda.cancel(("suspect", record.node))
        self.context.agenda.cancel(("dial", record.node))
        self._met.pop(record.node, None)
        self.cards.drop(record.node)

    def _forget(self, node: NodeId) -> None:
        self.members.forget(node)
        del self._buried[node]

    # ----------------------------------------------------------------------- suspicions

    def _accuse(self, node: NodeId, *, refused: bool) -> None:
        record = self.members.get(node)
        if record is not None and not record.state.final:
            suspect = replace(record, state=MemberState.SUSPECT)
            self._hear(None, Rumour(suspect, by=self.me.node, refused=refused))

    def _confirm(self, rumour: Rumour, *, known: bool) -> None:
        """Counts an accusation of a member's present incarnation."""
        record = rumour.record
        suspicion = self._suspicions.get(record.node)
        if suspicion is None or not rumour.by or rumour.by == record.node:
            return
        if (suspicion.epoch, suspicion.incarnation) != (record.epoch, record.incarnation):
            return
        if suspicion.confirm(rumour.by, rumour.refused, self._config):
            if known:
                self._outbox.put(rumour)
            self._count_down(record.node)
        if suspicion.gone(self._config, self.members.present):
            self._convict(record.node)

    def _count_down(self, node: NodeId) -> None:
        score = self.context.health.score
        deadline = self._suspicions[node].deadline(self._config, self.members.present, score)
        self.context.agenda.set(("suspect", node), deadline)

    def _suspect_due(self, node: NodeId) -> None:
        now, suspicion = self.context.now, self._suspicions[node]
        score = self.context.health.score
        if suspicion.deadline(self._config, self.members.present, score) > now:
            self._count_down(node)
        elif self._prober.isolated() and now < suspicion.since + self._config.isolation_grace:
            self.context.after("suspect", node, _HOLD)
        else:
            self._convict(node)

    def _convict(self, node: NodeId) -> None:
        record = self.members.get(node)
        if record is not None:
            self._hear(None, Rumour(replace(record, state=MemberState.DEAD), by=self.me.node))

    def _notice_lag(self) -> None:
        """Handles a late timer: pings that this process missed while it stalled are no evidence."""
        due = self.due
        lag = 0.0 if due is None else self.context.now - max(due, self._last_step)
        if lag <= self._config.lag_noticed:
            return
        self.context.health.worse()
        grace = self._config.ping_timeout
        if lag > self._config.lag_blind:
            grace = floor(self._config, self.members.present)
            self._prober.start_over()
        self._deaf_until = self.context.now + grace
        for suspicion in self._suspicions.values():
            suspicion.not_before = max(suspicion.not_before, self._deaf_until)

    # ----------------------------------------------------------------------- probes

    def _buddy(self, node: NodeId) -> tuple[Rumour, ...]:
        """Rumours that a member should get before it answers."""
        record = self.members.get(node)
        return (Rumour(record),) if record and record.state is MemberState.SUSPECT else ()

    def _helpers(self, node: NodeId) -> list[NodeId]:
        """Linked peers for indirect pings; those that watch the member come first."""
        links = [n for n in self.context.links if n != node and self._counts(n)]
        self.context.random.shuffle(links)
        watchers = set(self._overlay.observers(node))
        return sorted(links, key=lambda n: n not in watchers)

    def _counts(self, node: NodeId) -> bool:
        record = self.members.get(node)
        return record is not None and not record.state.final

    def _epoch_of(self, node: NodeId) -> Epoch:
        record = self.members.get(node)
        return record.epoch if record else 0

    def _ping_due(self, node: NodeId) -> None:
        if self._prober.due(node):
            self._accuse(node, refused=False)

    def _on_ping(self, node: NodeId, ping: m.Ping) -> None:
        self._hear_all(node, ping.rumours)
        if not self._silent():
            mine = (Rumour(self.me),) if ping.rumours else ()
            self.context.send(node, m.Ack(ping.nonce, mine + self._buddy(node)))

    def _on_ack(self, node: NodeId, ack: m.Ack) -> None:
        self._hear_all(node, ack.rumours)
        self._prober.ack(node, ack.nonce)

    def _on_answer(self, node: NodeId, answer: m.IndirectPingResult) -> None:
        unheard = self._prober.answer(node, answer.nonce, answer.alive)
        if unheard is not None:
            self._accuse(unheard, refused=False)

    # ----------------------------------------------------------------------- links

    def _on_link_up(self, event: ev.LinkUp) -> None:
        node = event.node
        if node not in self.context.links:
            self._turns.insert(self.context.random.randint(0, len(self._turns)), node)
        self.context.links[node] = event.epoch
        self._met[node] = event.epoch
        self._ours.pop(node, None)
        if event.address in self._seeds:
            self._found[event.address] = node
        if self._dialler.up(event.address):
            self._ours[node] = None
            self.context.after("linger", node, self._config.link_linger)
        self.context.emit(ev.Reachable(node))
        self.context.agenda.cancel(("dial", node))
        self.context.send(node, m.News((Rumour(self.me),)))
        self.cards.linked()
        record = self.members.get(node)
        if record and self._over(record, event.epoch):
            self.context.send(node, m.Records((record,)))
        # A later life than the known one announces itself. If the earlier one were declared dead
        # before that, its process, if it runs, would rejoin above the newcomer instead of ending.
        if self.phase is GossipPhase.JOINING or self.me.node < node:
            self.context.send(node, self._ledger.summary())

    @staticmethod
    def _over(record: MemberRecord, epoch: Epoch) -> bool:
        return record.epoch > epoch or (record.epoch == epoch and record.state.final)

    def _on_link_down(self, event: ev.LinkDown) -> None:
        if self.context.links.get(event.node) != event.epoch:
            return
        del self.context.links[event.node]
        self._turns.remove(event.node)
        self._ours.pop(event.node, None)
        self.context.agenda.cancel(("linger", event.node))
        if not event.orderly:
            self.context.emit(ev.Unreachable(event.node))
        if event.node in self._prober.targets:
            self._reach(event.node)

    def _on_dial_failed(self, event: ev.DialAttemptFailed) -> None:
        # A node without a linked seed looks for its seeds like a joining one: a refusal probably
        # means that the seed is starting. Reunions serve clusters that were split.
        seeking = self.phase is GossipPhase.JOINING or self._lost()
        seeking = seeking and event.address in self._seeds
        delay = self._dialler.failed(event.address, event.refused and not seeking)
        if event.ours:
            self._seeds = tuple(seed for seed in self._seeds if seed != event.address)
            if not self._seeds and self.members.present == 1:
                self._ready(alone=True)
            return
        if seeking:
            # The host is up, so a longer delay saves nothing.
            if event.refused:
                delay = min(delay, self._config.redial_refused)
            self.context.after("seed", event.address, delay)
        for node in self._prober.targets:
            record = self.members.get(node)
            if record is None or record.address != event.address or node in self.context.links:
                continue
            self.context.after("dial", node, delay)
            if event.refused:
                self._prober.heard(node)
                if self._met.get(node) == record.epoch:
                    self._accuse(node, refused=True)

    def _lost(self) -> bool:
        """True if no seed is linked. Newcomers go to the seeds, so this node must reach one too."""
        return not any(self._counts(node) for node in self._found.values())

    def _reach(self, node: NodeId) -> None:
        record = self.members.get(node)
        if record is not None and node not in self.context.links:
            self._dialler.dial(record.address)

    def _dial_due(self, node: NodeId) -> None:
        if node in self._prober.targets:
            self._reach(node)

    def _linger_due(self, node: NodeId) -> None:
        """Closes a link that this node dialled and that neither end needs for probes."""
        if node not in self._ours:
            return
        near = node in self._prober.targets or node in self._overlay.observers(self.me.node)
        if near and self._counts(node):
            self.context.after("linger", node, self._config.link_linger)
        else:
            self.context.emit(ev.Close(node))

    def _on_received(self, event: ev.MessageReceived) -> None:
        if self.context.links.get(event.node) != event.epoch:
            return
        record = self.members.get(event.node)
        if record and self._over(record, event.epoch) and self.phase is not GossipPhase.LEAVING:
            self._on_word_of_the_dead(event, record)
            return
        self._on_message[type(event.message)](event.node, event.message)

    def _on_word_of_the_dead(self, event: ev.MessageReceived, record: MemberRecord) -> None:
        """Handles a message from a member that is dead here: tells the member, and ignores the
        message. Records are not ignored: if they hold this node dead too, the member has dropped
        shared state, and both nodes start again.
        """
        if isinstance(event.message, m.Records):
            for other in event.message.records:
                if other.node == self.me.node and not self._silent():
                    self._about_me(other)
        else:
            self.context.send(event.node, m.Records((record,)))

    # ----------------------------------------------------------------------- table comparison

    def _on_summary(self, node: NodeId, summary: m.TableHash) -> None:
        answer = self._ledger.answer_summary(summary)
        # Empty records mean that the tables are equal; a joining node waits for them.
        self.context.send(node, m.Records() if answer is None else answer)

    def _on_buckets(self, node: NodeId, buckets: m.BucketHashes) -> None:
        self._answer(node, self._ledger.answer_buckets(buckets))

    def _on_digests(self, node: NodeId, digests: m.RecordHashes) -> None:
        self._answer(node, self._ledger.answer_digests(digests))

    def _answer(self, node: NodeId, messages: Iterable[m.Message]) -> None:
        """Sends the answers of a comparison. Without answers the tables are equal: empty records
        report that, because a joining node waits for them.
        """
        answers = tuple(messages)
        for message in answers or (m.Records(),):
            self.context.send(node, message)
        if not answers:
            self._ready(alone=False)

    def _on_records(self, node: NodeId, message: m.Records) -> None:
        for record in message.records:
            # The other members know the records that a joining node learns.
            self._hear(node, Rumour(record), tell=self.phase is not GossipPhase.JOINING)
        if self._silent():
            return
        for answer in self._ledger.answer_records(message):
            self.context.send(node, answer)
        if not message.records and not message.wanted:
            self._ready(alone=False)
        elif self.phase is GossipPhase.JOINING and len(message.records) < _FULL_CHUNK:
            self.context.send(node, self._ledger.summary())

    def _sync_due(self, _: str) -> None:
        peers = [node for node in self.context.links if self._counts(node)]
        if peers:
            self.context.send(self.context.random.choice(peers), self._ledger.summary())
        self.context.after("sync", "", self.context.around(self._config.sync_interval))

    def _reunion_due(self, _: str) -> None:
        linked = {r.address for r in self.members if r.node in self.context.links}
        linked |= {seed for seed, node in self._found.items() if node in self.context.links}
        dead = [r.address for n in self._buried if (r := self.members.get(n)) is not None]
        away = [a for a in dict.fromkeys((*self._seeds, *dead)) if a not in linked]
        if away:
            self._dialler.dial(self.context.random.choice(away))
        self.context.after("reunion", "", self.context.around(self._config.reunion_interval))

    def _sweep_due(self, _: str) -> None:
        horizon = self.context.now - self._config.reunion_window
        for node in [node for node, since in self._buried.items() if since < horizon]:
            self._forget(node)
        known = [record.address for record in self.members]
        self._dialler.keep((*self._seeds, *known))
        self.context.after("sweep", "", _SWEEP)

    # ----------------------------------------------------------------------- timers and news

    def _on_tick(self, event: ev.Tick) -> None:
        for kind, whose in self.context.agenda.take(self.context.now):
            self._on_due[kind](whose)

    def _settle(self) -> None:
        """Ends every step: updates the targets and sends news."""
        if self._moved:
            self._moved = False
            self._prober.watch(self._overlay.targets(self.me.node) if self._present() else ())
            for node in self._prober.targets:
                if ("dial", node) not in self.context.agenda:
                    self._reach(node)
        if self._outbox and self.context.links:
            self._tell()

    def _present(self) -> bool:
        return self.me.node in self._overlay

    def _tell(self) -> None:
        """Sends a round of news, or sets a timer for it."""
        due = self._last_round + self._config.gossip_interval
        if self.context.now < due:
            if ("gossip", "") not in self.context.agenda:
                self.context.agenda.set(("gossip", ""), due)
            return
        self._last_round = self.context.now
        present = [node for node in self._turns if self._counts(node)]
        peers = present[: self._config.gossip_fanout]
        if not peers:
            return
        news = m.News(self._outbox.take(self.members.present, len(peers), len(present)))
        for node in peers:
            self._turns.remove(node)
            self._turns.append(node)
            self.context.send(node, news)
        if self._outbox:
            self.context.after("gossip", "", self._config.gossip_interval)
