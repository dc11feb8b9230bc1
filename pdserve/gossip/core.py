"""The membership machine of one node: `step(now, event) -> effects`, and nothing else moves it.

    phase     event                                        next
    NEW       Start                                        JOINING, or UP without seeds
    JOINING   tables equal; alone_after                    UP           Ready
    any       Leave                                        LEAVING
    LEAVING   leave_linger                                 OUT          Stopped
    any       own epoch is dead                            OUT          Rejoin
    any       a later epoch of ours lives                  OUT          Superseded

and of each member, as this node sees it (precedence in `member`):

    state     event                                        next         effect
    -         record of a new life                         ALIVE        Joined
    ALIVE     verdict of a probe, refusal, rumour          SUSPECT      Suspected
    SUSPECT   higher incarnation, by the member itself     ALIVE        Refuted
    SUSPECT   countdown over; enough refusals              DEAD         Died
    any       rumour of its death, a later life            DEAD         Died
    any       its goodbye                                  LEFT         Departed

It joins the parts and decides in which order they hear of things. It does not know sockets, tasks
or clocks: the driver owns those, calls `step` for whatever happens and again at `due`."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.gossip import events as ev
from pdserve.gossip import messages as m
from pdserve.gossip.antientropy import Ledger
from pdserve.gossip.cards import Cards
from pdserve.gossip.context import Context
from pdserve.gossip.dialling import Dialler
from pdserve.gossip.dissemination import Outbox
from pdserve.gossip.member import Members
from pdserve.gossip.messages import Record, Rumour, State
from pdserve.gossip.overlay import Overlay
from pdserve.gossip.probing import Prober
from pdserve.gossip.suspicion import Suspicion, floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random
    from typing import Any

    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.member import Change
    from pdserve.ids import Epoch, NodeId, Seconds

__all__ = ["Gossip", "Phase"]

_FULL_CHUNK = 512
_SWEEP: Seconds = 60.0
_HOLD: Seconds = 1.0
"""Between two looks at whether an isolated node is still isolated."""


class Phase(Enum):
    NEW = 0
    JOINING = 1
    UP = 2
    LEAVING = 3
    OUT = 4


class Gossip:
    """One life of one node. Belongs to one caller; `step` is not re-entrant."""

    def __init__(self, me: Record, config: GossipConfig, random: Random) -> None:
        """`me`: node, epoch, address, role. `random` is the caller's, so that a run repeats."""
        self.me = replace(me, incarnation=0, state=State.ALIVE, card=0)
        self.phase = Phase.NEW
        self.members = Members()
        self.context = Context(me.node, config, random)
        self.cards = Cards(self.context, self._reach)
        self._config = config
        self._overlay = Overlay(config.rings, config.mesh_limit)
        self._ledger = Ledger(self.members)
        self._outbox = Outbox(config)
        self._prober = Prober(self.context, self._buddy, self._helpers, self._epoch_of)
        self._dialler = Dialler(self.context, me.address)
        self._suspicions: dict[NodeId, Suspicion] = {}
        self._buried: dict[NodeId, Seconds] = {}
        self._met: dict[NodeId, Epoch] = {}
        self._ours: dict[NodeId, None] = {}
        self._turns: list[NodeId] = []
        self._seeds: tuple[str, ...] = ()
        self._found: dict[str, NodeId] = {}
        """Who answered at a seed's address last, which need not be the address it goes by."""
        self._moved = True
        self._deaf_until: Seconds = 0.0
        self._last_round: Seconds = float("-inf")
        self._last_step: Seconds = float("-inf")
        self._on_event: dict[type, Callable[[Any], None]] = {
            ev.Start: self._on_start,
            ev.LinkUp: self._on_link_up,
            ev.LinkDown: self._on_link_down,
            ev.DialFailed: self._on_dial_failed,
            ev.Received: self._on_received,
            ev.Tick: self._on_tick,
            ev.SetCard: self._on_set_card,
            ev.WantPart: lambda event: self.cards.want(event.owner, event.hash),
            ev.Leave: self._on_leave,
        }
        self._on_message: dict[type, Callable[[NodeId, Any], None]] = {
            m.News: lambda node, message: self._hear_all(node, message.rumours),
            m.Ping: self._on_ping,
            m.Ack: self._on_ack,
            m.PingFor: self._prober.ping_for,
            m.Answer: self._on_answer,
            m.Summary: self._on_summary,
            m.Buckets: self._on_buckets,
            m.Digests: self._on_digests,
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
            "leave": lambda _: self._out(ev.Stopped()),
        }

    @property
    def due(self) -> Seconds | None:
        """When to call `step` with `Tick`, if nothing else happens before."""
        return self.context.agenda.first

    @property
    def targets(self) -> Sequence[NodeId]:
        """Whom this node watches."""
        return self._prober.targets

    def step(self, now: Seconds, event: ev.Event) -> list[ev.Effect]:
        """Let one thing have happened at `now`; returns what to do about it, in order."""
        if self.phase is Phase.OUT:
            return []
        self.context.now = now
        self._notice_lag()
        self._on_event[type(event)](event)
        if not self._silent():
            self._settle()
        self._last_step = now
        effects, self.context.effects = self.context.effects, []
        return effects

    # ----------------------------------------------------------------------- own life

    def _silent(self) -> bool:
        return self.phase is Phase.OUT

    def _on_start(self, event: ev.Start) -> None:
        if self.phase is not Phase.NEW:
            return
        self.phase = Phase.JOINING
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
        elif self.phase is Phase.JOINING:
            self._ready(alone=True)

    def _on_leave(self, event: ev.Leave) -> None:
        if self.phase is Phase.LEAVING:
            return
        self.phase = Phase.LEAVING
        self.me = replace(self.me, state=State.LEFT)
        self._speak()
        goodbye = m.News((Rumour(self.me),))
        for node in list(self.context.links):
            self.context.send(node, goodbye)
        self.context.after("leave", "", self._config.leave_linger)

    def _on_set_card(self, event: ev.SetCard) -> None:
        self.cards.set_own(self.me.epoch, self.me.card + 1, event.card, event.parts)
        self.me = replace(self.me, card=self.me.card + 1)
        if self.phase is not Phase.NEW:
            self._speak()

    def _speak(self) -> None:
        """What we say of ourselves has changed."""
        self.members.apply(self.me)
        self._ledger.update(self.me)
        self._outbox.put(Rumour(self.me))
        if self.me.state.final:
            self._overlay.remove(self.me.node)
        else:
            self._overlay.add(self.me.node)

    def _ready(self, *, alone: bool) -> None:
        if self.phase is Phase.JOINING:
            self.phase = Phase.UP
            self.context.agenda.cancel(("alone", ""))
            self.context.emit(ev.Ready(alone=alone and self.members.present == 1))

    def _out(self, effect: ev.Rejoin | ev.Superseded | ev.Stopped) -> None:
        """Silence: whatever was about to be said comes from a life that is over."""
        self.phase = Phase.OUT
        self.context.effects = [e for e in self.context.effects if not isinstance(e, ev.Send)]
        self.context.agenda.clear()
        self.context.emit(effect)

    def _rejoin(self, above: Epoch) -> ev.Rejoin:
        """Start again among those we take for living. Whom this life held for dead may have been
        cut off from it only: such verdicts die with it, their addresses are worth a try."""
        others = [record for record in self.members if record.node != self.me.node]
        seeds = (*self._seeds, *(record.address for record in others if record.address))
        known = tuple(record for record in others if not record.state.final)
        return ev.Rejoin(above, ev.Start(tuple(dict.fromkeys(seeds)), known))

    def _about_me(self, record: Record) -> None:
        if record.epoch > self.me.epoch:
            gone = record.state.final
            self._out(self._rejoin(record.epoch) if gone else ev.Superseded(record.epoch))
        elif record.epoch < self.me.epoch or self.phase is Phase.LEAVING:
            return
        elif record.state.final or record.incarnation >= m.HIGHEST:
            # The latter cannot be answered: this life has no incarnation left.
            self._out(self._rejoin(self.me.epoch))
        elif record.state is State.SUSPECT and record.incarnation >= self.me.incarnation:
            self.context.health.worse()
            self.me = replace(self.me, incarnation=record.incarnation + 1)
            self._speak()

    # ----------------------------------------------------------------------- rumours

    def _hear_all(self, teller: NodeId, rumours: Sequence[Rumour]) -> None:
        for rumour in rumours:
            self._hear(teller, rumour)

    def _hear(self, teller: NodeId | None, rumour: Rumour, *, tell: bool = True) -> None:
        """Learn what is new of it, and pass that on."""
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
        if record.state is State.SUSPECT:
            self._confirm(rumour, known=change is None)

    def _make_room(self, record: Record) -> bool:
        if len(self.members) < self._config.max_members:
            return True
        if self._buried:
            self._forget(min(self._buried, key=self._buried.__getitem__))
            return True
        self.context.emit(ev.TableFull(record.node))
        return False

    def _changed(self, change: Change, teller: NodeId | None) -> None:
        old, new = change.old, change.new
        self._ledger.update(new)
        if change.new_life and old is not None:
            self._end(old)
            if not old.state.final:
                self.context.emit(ev.Died(replace(old, state=State.DEAD)))
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

    def _live(self, change: Change) -> None:
        """A new word of a member that is neither dead nor gone."""
        new = change.new
        if new.state is State.SUSPECT:
            self._suspicions[new.node] = Suspicion(
                new.epoch, new.incarnation, self.context.now, self._deaf_until
            )
            self.context.emit(ev.Suspected(new))
            self._count_down(new.node)
        elif self._suspicions.pop(new.node, None):
            self.context.agenda.cancel(("suspect", new.node))
            self.context.emit(ev.Refuted(new))

    def _bury(self, change: Change) -> None:
        new = change.new
        self._end(new)
        self._overlay.remove(new.node)
        self._moved = True
        self._buried.setdefault(new.node, self.context.now)
        if new.node in self._found.values() and self._lost():
            for seed in self._seeds:
                pause = self.context.around(self._config.redial_refused)
                self.context.after("seed", seed, pause)
        if self.context.links.get(new.node) == new.epoch:
            # A way back may open before any probe would find out.
            self.context.send(new.node, m.Records((new,)))
        if change.new_life or (change.old and not change.old.state.final):
            left = new.state is State.LEFT
            self.context.emit(ev.Departed(new) if left else ev.Died(new))

    def _end(self, record: Record) -> None:
        """Whatever belongs to that life ends with it."""
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
            suspect = replace(record, state=State.SUSPECT)
            self._hear(None, Rumour(suspect, by=self.me.node, refused=refused))

    def _confirm(self, rumour: Rumour, *, known: bool) -> None:
        """Count an accusation of a member's present incarnation."""
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
            self._hear(None, Rumour(replace(record, state=State.DEAD), by=self.me.node))

    def _notice_lag(self) -> None:
        """What we did not hear while we stood still is no evidence."""
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
        """What a member should hear before it answers us."""
        record = self.members.get(node)
        return (Rumour(record),) if record and record.state is State.SUSPECT else ()

    def _helpers(self, node: NodeId) -> list[NodeId]:
        """Linked peers, those that watch the member themselves first."""
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

    def _on_answer(self, node: NodeId, answer: m.Answer) -> None:
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
        # A later life than the one we know introduces itself. To bury the earlier one before that
        # would tell its process, if it runs, to rejoin above the newcomer instead of ending.
        if self.phase is Phase.JOINING or self.me.node < node:
            self.context.send(node, self._ledger.summary())

    @staticmethod
    def _over(record: Record, epoch: Epoch) -> bool:
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

    def _on_dial_failed(self, event: ev.DialFailed) -> None:
        # While joining a refusal most likely means that a seed starts at the same time as we do.
        joining = self.phase is Phase.JOINING
        delay = self._dialler.failed(event.address, event.refused and not joining)
        if event.ours:
            self._seeds = tuple(seed for seed in self._seeds if seed != event.address)
            if not self._seeds and self.members.present == 1:
                self._ready(alone=True)
            return
        # Whoever started before its seeds, or outlived them, looks for them like one that joins:
        # reunions are for clusters that have fallen apart.
        if event.address in self._seeds and (joining or self._lost()):
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
        """None of the seeds is with us. Newcomers go to the seeds: so must we."""
        return not any(self._counts(node) for node in self._found.values())

    def _reach(self, node: NodeId) -> None:
        record = self.members.get(node)
        if record is not None and node not in self.context.links:
            self._dialler.dial(record.address)

    def _dial_due(self, node: NodeId) -> None:
        if node in self._prober.targets:
            self._reach(node)

    def _linger_due(self, node: NodeId) -> None:
        """Close a link of ours that neither end watches the other by."""
        if node not in self._ours:
            return
        near = node in self._prober.targets or node in self._overlay.observers(self.me.node)
        if near and self._counts(node):
            self.context.after("linger", node, self._config.link_linger)
        else:
            self.context.emit(ev.Close(node))

    def _on_received(self, event: ev.Received) -> None:
        if self.context.links.get(event.node) != event.epoch:
            return
        record = self.members.get(event.node)
        if record and self._over(record, event.epoch) and self.phase is not Phase.LEAVING:
            self._on_word_of_the_dead(event, record)
            return
        self._on_message[type(event.message)](event.node, event.message)

    def _on_word_of_the_dead(self, event: ev.Received, record: Record) -> None:
        """That life is over here and should know. Its word counts for nothing, but for one: if it
        holds us for dead too, it has dropped what we shared, and both start again."""
        if isinstance(event.message, m.Records):
            for other in event.message.records:
                if other.node == self.me.node and not self._silent():
                    self._about_me(other)
        else:
            self.context.send(event.node, m.Records((record,)))

    # ----------------------------------------------------------------------- tables

    def _on_summary(self, node: NodeId, summary: m.Summary) -> None:
        answer = self._ledger.answer_summary(summary)
        # Empty records say: equal. A joining node waits for that.
        self.context.send(node, m.Records() if answer is None else answer)

    def _on_buckets(self, node: NodeId, buckets: m.Buckets) -> None:
        self._answer(node, self._ledger.answer_buckets(buckets))

    def _on_digests(self, node: NodeId, digests: m.Digests) -> None:
        self._answer(node, self._ledger.answer_digests(digests))

    def _answer(self, node: NodeId, messages: Iterable[m.Message]) -> None:
        """Whatever made the tables equal since the comparison began, one of the two may be joining
        and wait for the word that they are."""
        answers = tuple(messages)
        for message in answers or (m.Records(),):
            self.context.send(node, message)
        if not answers:
            self._ready(alone=False)

    def _on_records(self, node: NodeId, message: m.Records) -> None:
        for record in message.records:
            # Those that a newcomer learns are no news to anybody else.
            self._hear(node, Rumour(record), tell=self.phase is not Phase.JOINING)
        if self._silent():
            return
        for answer in self._ledger.answer_records(message):
            self.context.send(node, answer)
        if not message.records and not message.wanted:
            self._ready(alone=False)
        elif self.phase is Phase.JOINING and len(message.records) < _FULL_CHUNK:
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

    # ----------------------------------------------------------------------- each step

    def _on_tick(self, event: ev.Tick) -> None:
        for kind, whose in self.context.agenda.take(self.context.now):
            self._on_due[kind](whose)

    def _settle(self) -> None:
        """What every step ends with: the right targets, and news on its way."""
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
        """A round of news, or an appointment for it."""
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
