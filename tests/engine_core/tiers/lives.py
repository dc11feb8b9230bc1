"""Random lives of one core with a host tier, a disk and a peer, in simulated time; what must hold.

A life begins with conversations that fill every tier, goes on with whatever its seed draws, and
ends when nothing is left to do. After every step these oracles look at it:

    books     pool, frames and claims check themselves; at the end nothing is held
    content   a block that can be found holds the bytes of its hash, on the device and on the host
    tokens    each request has the tokens that a core without a cache gives it
    places    nothing is written where a job reads or writes, and fetched blocks are held
    quota     fetches together hold no more blocks than they may
    lanes     a lane has as many bytes to move as its jobs have
    events    what the events have told is what is there
    time      no fetch makes a sequence wait beyond its deadline
    pins      a pinned block stays
    secret    what can be found has a hash of the present secret
    private   a block of `cache_scope: never` is on no lower tier
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import contextmanager, suppress
from errno import EIO, ENOSPC
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.blocks.hashing import block_hashes, prompt_root
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.tiers.core_tiers import TierStorage
from pdserve.engine_core.tiers.onboarder import SHARE, FetchPlan
from pdserve.kv.storage import BlockMemory
from pdserve.kv.tiers.disk.tier import DiskTier
from pdserve.kv.tiers.job_runner import JobRunner, MemoryCopier
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, Maintain, Spill, bytes_of, lane_of
from pdserve.kv.tiers.layer_groups import LayerGroups
from pdserve.kv.tiers.virtual_io import LaneRate, VirtualTierIo
from pdserve.messages.engine import ClearCache, EngineSpec, SetHashSecret
from pdserve.messages.kv_events import BlockRemoved, BlockStored, PoolCleared
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.tiers import KvSource, TierSpec
from pdserve.testing.inline_engine import InlineEngine
from pdserve.testing.scripted import (
    ENGINE,
    ScriptedExecutor,
    reference_entries,
    reference_tokens,
)
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.engine_core.executor import ModelInfo, StepPlan, StepResult
    from pdserve.engine_core.kv_fetch.ports import PullListener
    from pdserve.engine_core.scheduler.sequence import Sequence as EngineSequence
    from pdserve.engine_core.tiers.early_starts import EarlyStarts
    from pdserve.engine_core.tiers.onboarder import BlockFetch, FetchChooser, Onboarder
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.disk.records import ReadFault
    from pdserve.kv.tiers.jobs import JobDone, TierJob
    from pdserve.kv.tiers.lower_tiers import FetchDone
    from pdserve.messages.kv_events import KvEvent
    from pdserve.messages.tiers import LaneName, SourceName
    from pdserve.testing.output_checker import OutputChecker

__all__ = ["CORNERS", "OracleError", "TieredLife"]

BLOCK = 4
ENTRY = 16
BLOCK_BYTES = BLOCK * ENTRY
LAYERS = 4
"""Parts of a block that may come one after the other: here, its tokens stand for them."""
MAX_LEN = 48
VOCAB = 40
MODEL = "scripted"
SECRETS = (b"one", b"two")
SALTS = ("", "b")
PEER = "p"

STUCK: Seconds = 60.0
"""What a disk that hangs takes for a read."""


class OracleError(AssertionError):
    """A life has broken a rule."""

    def __init__(self, oracle: str, what: str) -> None:
        super().__init__(f"{oracle}: {what}")
        self.oracle = oracle


@contextmanager
def judged_by(oracle: str) -> Iterator[None]:
    """What goes wrong within is this oracle's finding."""
    try:
        yield
    except OracleError:
        raise
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise OracleError(oracle, f"{type(error).__name__}: {error}") from error


class Contents:
    """The bytes that belong to each hash."""

    def __init__(self) -> None:
        self.bytes: dict[bytes, bytes] = {}
        self.of: dict[bytes, set[bytes]] = {secret: set() for secret in SECRETS}
        """Hashes under each secret."""
        self.public: set[bytes] = set()
        """Hashes of requests that may be stored on lower tiers."""

    def note(self, request: GenerateRequest) -> None:
        """Learn the blocks of a request, under every secret."""
        for choice in range(request.n):
            output = reference_tokens(request, choice, vocab=VOCAB, max_len=MAX_LEN)
            tokens = [*request.prompt, *output]
            joined = b"".join(reference_entries(tokens))
            for secret in SECRETS:
                names = names_of(tokens, request.cache_salt, secret)
                for place, name in enumerate(names):
                    self.bytes[name] = joined[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
                self.of[secret].update(names)
                if request.cache_scope != "never":
                    self.public.update(names)


def names_of(tokens: Sequence[int], salt: str, secret: bytes) -> list[bytes]:
    """Hashes of the full blocks of a prompt."""
    root = prompt_root(secret, MODEL, salt)
    return [*block_hashes(list(tokens), BLOCK, parent=root, secret=secret)]


class WatchedIo(VirtualTierIo):
    """Jobs in simulated time; knows which are under way and looks where they write."""

    def __init__(self, life: TieredLife, runner: JobRunner, rates: dict[LaneName, LaneRate]):
        super().__init__(life.clock, BLOCK_BYTES, runner, rates)
        self.under_way: list[TierJob] = []
        self._life = life
        self._read: dict[TierJob, list[bytes]] = {}
        """What the frames held that a job reads, when it was submitted."""

    def submit(self, job: TierJob) -> None:
        self._look(job)
        self.under_way.append(job)
        if isinstance(job, CopyIn | Spill):
            self._read[job] = [self._life.frame(frame) for frame in job.frames]
        super().submit(job)

    def _look(self, job: TierJob) -> None:
        written = {place for each in self.under_way for place in written_by(each)}
        if touched := written & (written_by(job) | read_by(job)):
            raise OracleError("places", f"{type(job).__name__} touches {touched}, being written")
        read = {place for each in self.under_way for place in read_by(each)}
        if touched := read & written_by(job):
            raise OracleError("places", f"{type(job).__name__} writes {touched}, being read")
        if isinstance(job, CopyOut):
            self._look_at_sources(job)

    def _look_at_sources(self, job: CopyOut) -> None:
        """A real copy may read at once: the step that writes the blocks must be over."""
        for block, content in zip(job.blocks, job.contents, strict=True):
            if self._life.block(block) != self._life.contents.bytes.get(content.hash):
                raise OracleError("places", f"block {block} is copied before it is written")

    def _end(self, job: TierJob, seconds: Seconds) -> JobDone:
        self.under_way.remove(job)
        before = self._read.pop(job, [])
        if isinstance(job, CopyIn | Spill):
            for frame, content in zip(job.frames, before, strict=True):
                if self._life.frame(frame) != content:
                    raise OracleError("places", f"frame {frame} has changed while it was read")
        return super()._end(job, seconds)

    def close(self) -> None:
        super().close()
        self.under_way.clear()


def written_by(job: TierJob) -> set[tuple[str, int]]:
    """The places that a job writes to."""
    match job:
        case CopyOut():
            return {("frame", frame) for frame in job.frames}
        case CopyIn():
            return {("block", block * LAYERS + job.group) for block in job.blocks}
        case Fill():
            return {("frame", job.frame)}
    return set()


def read_by(job: TierJob) -> set[tuple[str, int]]:
    """The frames that a job reads."""
    return {("frame", f) for f in job.frames} if isinstance(job, CopyIn | Spill) else set()


class MixedPlanner:
    """Fetches what is here from here and the rest from a peer, now and then, where `FetchPlanner`
    would take it all from the peer. Deadlines are short, so that many fetches are late."""

    def __init__(self, planner: FetchChooser, dice: Random) -> None:
        self._planner = planner
        self._dice = dice

    def choose(
        self,
        device: int,
        local: Sequence[SourceName],
        peers: Sequence[KvSource],
        blocks: int,
        wait: Seconds,
        *,
        early: bool = False,
    ) -> FetchPlan | None:
        """As `FetchChooser.choose`."""
        plan = self._planner.choose(device, local, peers, blocks, wait, early=early)
        if plan is not None:
            plan = dataclasses.replace(plan, deadline=min(plan.deadline, 1.5 * plan.seconds + 0.02))
        rest = blocks - device - len(local)
        if plan is None or not local or not peers or rest <= 0 or self._dice.random() < 0.3:
            return plan
        return FetchPlan(len(local), rest, peers[0], plan.seconds, plan.deadline + 0.2)


class Pull:
    """One pull from the peer."""

    def __init__(
        self,
        number: int,
        hashes: list[bytes],
        blocks: list[int],
        deadline: Seconds,
        listener: PullListener,
    ) -> None:
        self.number, self.hashes, self.blocks = number, hashes, blocks
        self.deadline, self.listener = deadline, listener
        self.come = 0
        """Leading blocks that have come."""
        self.told = False
        self.fence: Seconds | None = None
        """When the peer can write no more; None: the pull goes on."""


class FakePeer:
    """Stands for `KvPuller`: blocks come in order, and until its fence a pull that has ended
    overwrites the blocks that did not come."""

    def __init__(self, life: TieredLife) -> None:
        self.pulls: dict[int, Pull] = {}
        self._life = life

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
        """As `KvPuller.pull`."""
        assert first_token % BLOCK == 0
        assert number not in self.pulls
        assert source.node == PEER
        self.pulls[number] = Pull(number, [*hashes], [*blocks], deadline, listener)

    def cancel(self, number: int, now: Seconds) -> None:
        """As `KvPuller.cancel`."""
        pull = self.pulls.get(number)
        if pull is not None and pull.fence is None:
            pull.told, pull.come = True, 0
            pull.fence = now + self._life.dice.choice((0.0, 0.3, 2.0))
            self._life.seen["pull cancelled"] += 1

    def step(self, now: Seconds) -> None:
        """Let something come, fail or end."""
        for pull in list(self.pulls.values()):
            if pull.fence is not None:
                self._close(pull, now)
            elif pull.deadline <= now:
                self._fail(pull, 0, "deadline", now)
            else:
                self._go_on(pull, now)

    def _go_on(self, pull: Pull, now: Seconds) -> None:
        dice = self._life.dice
        if pull.come == len(pull.blocks):
            del self.pulls[pull.number]
            pull.listener.on_pulled(pull.number, pull.come, "")
        elif dice.random() < self._life.faults / 3:
            self._fail(pull, dice.choice((0, pull.come)), "transfer", now)
        else:
            more = pull.blocks[pull.come :][: dice.randint(0, 4)]
            for block in more:
                content = self._life.contents.bytes[pull.hashes[pull.come]]
                self._life.write(block, content)
                pull.come += 1

    def _fail(self, pull: Pull, good: int, error: str, now: Seconds) -> None:
        """One that brought nothing is reported at once, another one with its fence."""
        pull.come, pull.fence = good, now + self._life.dice.choice((0.0, 0.3, 2.0))
        self._life.seen[f"pull {error}"] += 1
        if not good:
            pull.told = True
            pull.listener.on_pulled(pull.number, 0, error)

    def _close(self, pull: Pull, now: Seconds) -> None:
        assert pull.fence is not None
        if not pull.told and pull.deadline <= now:
            pull.told, pull.come = True, 0
            pull.listener.on_pulled(pull.number, 0, "deadline")
        if now < pull.fence:
            for block in pull.blocks[pull.come :]:
                self._life.write(block, bytes([0xEE]) * BLOCK_BYTES)
            return
        del self.pulls[pull.number]
        if not pull.told:
            pull.listener.on_pulled(pull.number, pull.come, "transfer")
        pull.listener.on_fenced(pull.number)


class TieredLife:
    """One life; `run` raises `OracleError` for what must not be."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = dice = Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = ManualClock()
        self.contents = Contents()
        self.secret = SECRETS[0]
        self.frames = dice.choice((8, 16, 40))
        self.faults = 0.0
        """Share of the jobs that fail."""
        self.rotten: ReadFault | None = None
        """How the next read fails."""
        self.full = False
        """Whether the disk has no room."""
        self.told: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}
        self._rates: dict[LaneName, LaneRate] = {
            lane: LaneRate(1e7, dice.choice((0.0, 0.002, 0.02)))
            for lane in ("d2h", "h2d", "disk_read", "disk_write")
        }
        self.groups = Random(seed + 1).choice((0, 2, 4))
        """Layer groups that blocks come back in; 0: they come whole."""
        self._pinned: dict[bytes, Seconds] = {}
        self._emptied = False
        """Whether this step has forgotten blocks on purpose."""
        self._start(dice.choice((20, 28)), dice.choice((8, 24)))
        self._talks = [self._talk() for _ in range(7)]

    def _start(self, blocks: int, batch: int) -> None:
        spec = EngineSpec(
            engine=ENGINE,
            model="",
            block_size=BLOCK,
            max_batch_tokens=batch,
            max_sequences=4,
            max_waiting=100,
            max_model_len=MAX_LEN,
            hash_secret=self.secret,
            options={"blocks": str(blocks), "vocab": str(VOCAB)},
            tiers=TierSpec(
                host_bytes=self.frames * BLOCK_BYTES, disk_path="memory", disk_bytes=1 << 20
            ),
        )
        self.executor = ScriptedExecutor()
        self.core = EngineCore(self.executor, self.clock)
        self.core._open_storage = self._open_storage  # type: ignore[method-assign]
        # Steps take no time here, but a fetch has to be worth it.
        self.core._step_cost.prefill = lambda length, cached=0: float(length - cached)  # type: ignore[method-assign]
        self.engine = InlineEngine(self.core, spec)
        tiers, onboarder = self.core._tiers, self.core._onboarder
        assert tiers is not None
        assert onboarder is not None
        self.lower, self.onboarder = tiers.lower, onboarder
        if self.groups:
            self.lower.layers = LayerGroups(LAYERS, BLOCK_BYTES, self.groups)
            self.lower._jobs.copy_blocks = 1  # so that a group takes several copies
        onboarder._planner = MixedPlanner(onboarder._planner, self.dice)
        self.peer = FakePeer(self)
        onboarder.puller = self.peer  # type: ignore[assignment]
        self._listen(onboarder)
        assert onboarder.early is not None
        self._listen_early(onboarder.early)

    def _open_storage(self, spec: TierSpec, info: ModelInfo, secret_id: bytes) -> TierStorage:
        self.arena = arena = BlockMemory(self.frames, (BLOCK_BYTES,))
        device = self.executor.region().view
        assert device is not None
        view = arena.view()
        disk = DiskTier.in_memory(self.dice.choice((40, 150)) * 8192, BLOCK_BYTES, clock=self.clock)
        runner = JobRunner(MemoryCopier(device, view, BLOCK_BYTES), arena, disk.files)
        self.io = WatchedIo(self, runner, self._rates)
        self.io.fault = self._fault

        def free() -> None:
            view.release()
            device.release()
            arena.close()

        return TierStorage(self.frames, BLOCK_BYTES, self.io, disk, runner, free)

    def _listen(self, onboarder: Onboarder) -> None:
        """Count what fetches come to."""
        ended, fetched = onboarder._ended, onboarder.fetched

        def onboarded(sequence: EngineSequence, fetch: BlockFetch) -> None:
            self.seen["onboarded again"] += sequence.preemptions > 0
            for source in {*fetch.arrived()} if not fetch.stale else ():
                self.seen[f"hit {source}"] += 1
            self.seen["mixed sources"] += len({*fetch.arrived()}) > 1
            ended(sequence, fetch)

        def took(done: FetchDone, now: Seconds) -> None:
            self.seen[f"fetch ended: {done.reason or 'whole'}"] += 1
            fetched(done, now)

        onboarder._ended = onboarded
        onboarder.fetched = took  # type: ignore[method-assign]

    def _listen_early(self, starts: EarlyStarts) -> None:
        """Count what becomes of sequences that have left early."""
        fail, execute = starts._fail, self.executor.execute

        def computed(plan: StepPlan) -> StepResult:
            result = execute(plan)
            early = [each.sequence.early for each in plan.chunks if each.sequence.early]
            if early and self.dice.random() < 0.5:
                # Copies go on while a step computes, and may be over when it is.
                for fetch in early:
                    for group in range(1, fetch.groups):
                        self.io.wait_copied(fetch.number, group, STUCK)
            return result

        def failed(sequence: EngineSequence, why: str) -> None:
            self.seen[f"left early: {why}"] += 1
            fail(sequence, why)

        starts._fail = failed  # type: ignore[method-assign]
        self.executor.execute = computed  # type: ignore[method-assign]

    def _fault(self, job: TierJob) -> tuple[str, ReadFault, int] | None:
        self.seen[type(job).__name__] += 1
        if isinstance(job, Spill) and self.full:
            self.seen["disk full"] += 1
            return "the disk is full", "io", ENOSPC
        if isinstance(job, Fill) and self.rotten:
            reason, self.rotten = self.rotten, None
            self.seen["failed Fill"] += 1
            return "the record is rotten", reason, EIO
        if isinstance(job, Maintain) or self.dice.random() >= self.faults:
            return None
        self.seen[f"failed {type(job).__name__}"] += 1
        return "the dice say so", "io", EIO

    # ------------------------------------------------------------------ memory

    def frame(self, number: int) -> bytes:
        """What a frame holds."""
        return bytes(self.arena.view(number))

    def block(self, number: int) -> bytes:
        """What a device block holds."""
        return bytes(self.executor._kv.view(number))

    def write(self, block: int, content: bytes) -> None:
        """A peer writes to a device block."""
        self.executor._kv.view(block)[:] = content

    # ------------------------------------------------------------------ the course

    def run(self, actions: int = 60) -> None:
        """Live, and end."""
        try:
            self._live(actions)
        except OracleError as error:
            error.add_note(f"in life {self.seed}")
            # What is broken may not be able to end in order; its memory is given back even so.
            with suppress(AssertionError, ValueError, KeyError):
                self.core.close()
            raise
        finally:
            self.core._executor.close()

    def _live(self, actions: int) -> None:
        for talk in self._talks:
            self.ask(talk)
            self.let_go_on(6)
        self.faults = self.dice.choice((0.0, 0.05, 0.3))
        for _ in range(actions):
            self.dice.choice(ACTIONS)(self)
            self.step()
        self.finish()

    def finish(self) -> None:
        """Let everything end, and look at what is left."""
        for _ in range(20_000):
            self.step()
            if self.core.has_work or self.peer.pulls:
                self.clock.advance(0.01)
                continue
            at = self._next_wake()
            if at is None:
                break
            self.clock.advance(max(0.0, at - self.clock.now()))
        else:
            raise OracleError("time", "the core makes no progress")
        with judged_by("books"):
            self._check_nothing_is_held()
        for ledger in self.engine.ledgers.values():
            self._check_tokens(ledger, ended=True)
        self.seen["preempted"] += self.core.scheduler.counters.preemptions
        assert self.onboarder.early is not None
        self.seen["left early"] += self.onboarder.early.started
        with judged_by("books"):
            assert self.engine.close() == 0

    def _next_wake(self) -> Seconds | None:
        """What waits for a disk that takes nothing may wait for ever."""
        at = self.core.wake_at()
        waits = self.io.next_due() is None and self.lower._spilling.no_room
        return None if waits and not self.lower._fetching else at

    def step(self) -> None:
        """One step of the peer and of the core; then every oracle looks."""
        now = self.clock.now()
        with judged_by("books"):
            self.peer.step(now)
            self.engine.step()
        if self.engine.failure is not None:
            raise OracleError("books", f"the core has failed: {self.engine.failure!r}")
        self._look(now)

    def let_go_on(self, count: int) -> None:
        """Steps with time between them, enough for blocks to reach the disk."""
        for _ in range(count):
            for _ in range(4):
                self.step()
            self.clock.advance(0.15)

    # ------------------------------------------------------------------ what may happen

    def _talk(self) -> GenerateRequest:
        dice = self.dice
        token = dice.randint(3, 5)  # few, so that conversations share their beginnings
        prompt = [token] * (BLOCK * dice.randint(0, 2))
        prompt += [dice.randint(3, 12) for _ in range(dice.randint(9, 20))]
        salt = dice.choice(SALTS)
        return GenerateRequest(
            request_id=f"r{dice.randint(0, 10**6)}",
            model="m",
            prompt=token_ids(prompt),
            sampling=SamplingParams(max_tokens=1),
            cache_salt=salt,
        )

    def ask(
        self,
        talk: GenerateRequest | None = None,
        *,
        most: int = 6,
        n: int = 1,
        peer: bool = False,
        private: bool = False,
    ) -> OutputChecker:
        """A request of a conversation. `peer`: a peer has all of it."""
        dice, talk = self.dice, talk or self.dice.choice(self._talks)
        some = dice.choice(((), (), (KvSource(PEER, 1, dice.randint(1, 8)),)))
        request = replace(
            talk,
            request_id=f"{talk.request_id}.{len(self.engine.ledgers)}",
            n=n,
            sampling=SamplingParams(
                max_tokens=dice.randint(1, most), ignore_eos=True, seed=dice.randint(0, 3)
            ),
            kv_sources=(KvSource(PEER, 1, MAX_LEN // BLOCK),) if peer else some,
            cache_ttl=dice.choice((None, None, None, 5.0)),
            cache_scope="never" if private or dice.random() < 0.1 else "",
        )
        self.contents.note(request)
        self.seen["private"] += request.cache_scope == "never"
        return self.engine.submit(request)

    def talk_on(self) -> None:
        """Somebody asks; now and then a conversation gets longer, or is another one."""
        index = self.dice.randrange(len(self._talks))
        if self.dice.random() < 0.15:
            self._talks[index] = self._talk()
        self.ask(self._talks[index], n=self.dice.choice((1, 1, 1, 2)))

    def ask_twice(self) -> None:
        """Two want the same blocks."""
        talk = self.dice.choice(self._talks)
        self.ask(talk)
        self.ask(talk)
        self.seen["joined"] += any(len(f.waiting) > 1 for f in self._fetches())
        self.step()
        self.seen["joined"] += any(len(f.waiting) > 1 for f in self._fetches())

    def crowd(self) -> None:
        """Four that grow long together: this is what runs out of blocks."""
        for talk in self.dice.sample(self._talks, 4):
            self.ask(talk, most=MAX_LEN)
        for _ in range(self.dice.randint(4, 20)):
            self.step()
            self.clock.advance(0.01)

    def evict(self) -> None:
        """Others take the whole device, and leave time for what they evict."""
        for _ in range(3):
            self._talks.append(self._talk())
            self.ask(self._talks.pop())
            self.let_go_on(3)

    def abort(self) -> None:
        """A client turns away; rather one that waits for a fetch."""
        waiting = {s.key[0] for fetch in self._fetches() for s in fetch.waiting}
        ledgers = self.engine.ledgers
        handles = [h for h in waiting if not ledgers[h].done]
        handles = handles or [h for h, ledger in ledgers.items() if not ledger.done]
        if handles:
            self.seen["aborted"] += 1
            self.engine.abort(ledgers[self.dice.choice(handles)])

    def _on_disk(self) -> GenerateRequest | None:
        """A conversation that would be read from disk. Others come first until there is one, but
        not for long."""
        for _ in range(3):
            for talk in self._talks:
                names = names_of(talk.prompt[:-1], talk.cache_salt, self.secret)
                device = len(self.core.pool.match(names))
                if "disk" in self.lower.run(names, device):
                    return talk
            self.evict()
        return None

    def ask_what_is_on_the_host(self) -> None:
        """Its copies take a while, layer group by layer group; much may happen meanwhile."""
        for talk in self._talks:
            names = names_of(talk.prompt[:-1], talk.cache_salt, self.secret)
            device = len(self.core.pool.match(names))
            if self.groups and "host" in self.lower.run(names, device)[:1]:
                break
        else:
            return
        usual = self._rates["h2d"]
        self._rates["h2d"] = LaneRate(1e7, self.dice.choice((0.003, 0.01)))
        ledger = self.ask(talk, n=self.dice.choice((1, 2)))
        for _ in range(self.dice.randint(4, 40)):
            self.step()
            self.clock.advance(0.003)
            if self.dice.random() < 0.02 and not ledger.done:
                self.dice.choice((self._rekey, lambda: self.engine.abort(ledger)))()
        self._rates["h2d"] = usual

    def ask_and_turn_away(self) -> None:
        """Somebody asks and hangs up a moment later."""
        ledger = self.ask(self._on_disk())
        self.step()
        if not ledger.done:
            self.engine.abort(ledger)

    def turn_away_too_late(self) -> None:
        """A client hangs up when all has been fetched and nothing been computed."""
        ledger = self.ask(self._talk(), peer=True, private=True)
        for _ in range(16):
            self.step()
            waits = self.onboarder.num_waiting
            with judged_by("books"):
                self.peer.step(self.clock.now())
            if waits and not self.onboarder.num_waiting and not ledger.done:
                self.engine.abort(ledger)
                return

    def wait(self) -> None:
        """Time passes."""
        self.clock.advance(self.dice.choice((0.001, 0.01, 0.05, 0.6)))

    def wait_long(self) -> None:
        """Much time passes: troubles of the disk are over, deadlines too."""
        self.clock.advance(self.dice.choice((3.0, 40.0, 700.0)))

    def hang(self) -> None:
        """The disk hangs for a while."""
        usual = self._rates["disk_read"]
        self._rates["disk_read"] = LaneRate(1e7, STUCK)
        for _ in range(2):
            self.ask(self._on_disk())
            self.let_go_on(2)
        self._rates["disk_read"] = usual
        self.let_go_on(self.dice.choice((2, 40)))

    def rot(self) -> None:
        """A record cannot be read, or is not what was written; a peer has what follows it."""
        talk = self._on_disk()
        if talk is not None:
            self.rotten = self.dice.choice(("io", "crc", "crc", "absent", "format"))
            more = [self.dice.randint(3, 12) for _ in range(2 * BLOCK)]
            self.ask(
                replace(talk, prompt=(talk.prompt + token_ids(more))[: MAX_LEN - 2]), peer=True
            )
            self.let_go_on(2)

    def fill_the_disk(self) -> None:
        """The disk has no room, or has some again."""
        self.full = not self.full

    def rekey(self) -> None:
        """The hash secret changes; rather while something is read or stored."""
        reading = any(isinstance(job, Fill) for job in self.io.under_way)
        storing = any(isinstance(job, CopyOut) for job in self.io.under_way)
        if reading or storing or self.dice.random() < 0.3:
            self._rekey()

    def _rekey(self) -> None:
        reading = any(isinstance(job, Fill) for job in self.io.under_way)
        storing = any(isinstance(job, CopyOut) for job in self.io.under_way)
        self.seen["renamed while reading"] += reading
        self.seen["renamed while storing"] += storing
        self.secret = SECRETS[self.secret == SECRETS[0]]
        self._emptied = True
        self.core.handle(SetHashSecret(hash_secret=self.secret))

    def rekey_while_reading(self) -> None:
        """Ask for what is on disk, and change the secret while it is read."""
        self.ask(self._on_disk())
        self.step()
        if any(isinstance(job, Fill) for job in self.io.under_way):
            self._rekey()

    def rekey_under_private(self) -> None:
        """The secret changes in the very step in which a private request ends."""
        if self.dice.random() < 0.5:
            return
        ledger = self.ask(self._talk(), most=1, private=True)
        for _ in range(6):
            if not ledger.done:
                self._rekey()
            self.step()

    def clear(self) -> None:
        """An operator forgets everything."""
        if self.dice.random() < 0.2:
            self._emptied = True
            self.core.handle(ClearCache())

    def _fetches(self) -> list[BlockFetch]:
        return [*self.onboarder._onboardings.values()]

    # ------------------------------------------------------------------ what must hold

    def _look(self, now: Seconds) -> None:
        with judged_by("books"):
            self.core.pool.check()
            self.lower.check()
        self._check_places()
        self._check_lanes()
        self._check_contents()
        self._check_events()
        self._check_times(now)
        for ledger in self.engine.ledgers.values():
            if not ledger.done:
                self._check_tokens(ledger, ended=False)

    def _check_places(self) -> None:
        pool = self.core.pool
        for job in self.io.under_way:
            if isinstance(job, CopyIn):
                free = [block for block in job.blocks if not pool.references(block)]
                if free:
                    raise OracleError("places", f"{free} are copied to and nobody holds them")
        for pull in self.peer.pulls.values():
            for block in pull.blocks[pull.come if pull.fence else 0 :]:
                if not pool.references(block) and block not in pool._quarantined:
                    raise OracleError("places", f"a peer may write to block {block}, which is free")

    def _check_lanes(self) -> None:
        owed: Counter[str] = Counter()
        for job in self.io.under_way:
            owed[lane_of(job)] += bytes_of(job, BLOCK_BYTES)
        for lane in self.lower.lanes():
            if lane.backlog != owed[lane.lane]:
                raise OracleError("lanes", f"{lane} has {owed[lane.lane]} bytes to move")

    def _check_contents(self) -> None:
        known = self.contents.bytes
        for name, block in self.core.pool._by_hash.items():
            if self.block(block) != known.get(name):
                raise OracleError("content", f"device block {block} is not what it is called")
        for name in self.lower.host.names():
            frame = self.lower.host.frame(name)
            assert frame is not None
            if self.frame(frame) != known.get(name):
                raise OracleError("content", f"frame {frame} is not what it is called")
            if name not in self.contents.public:
                raise OracleError("private", f"frame {frame} has a private block")

    def _check_events(self) -> None:
        events, self.engine.kv_events = self.engine.kv_events, []
        pinned = self._pinned
        now = self.clock.now()
        # What the core's last act has changed is told in its next step.
        for event in [*events, *self.lower.drain_events()]:
            self._take(event)
            if isinstance(event, BlockRemoved) and event.tier == "host" and not self._emptied:
                early = [name for name in event.hashes if pinned.get(name, 0.0) > now]
                if early:
                    raise OracleError("pins", "a pinned block was evicted")
        pool, lower = self.core.pool, self.lower
        if len(self._fetches()) > 1 and self.onboarder.in_flight > SHARE * pool.num_blocks:
            raise OracleError("quota", "fetches hold more blocks than they may")
        there = {"device": set(pool._by_hash), "host": set(lower.host.names())}
        if lower.disk is not None and not lower.disk_paused:
            there["disk"] = set(lower.disk.hashes())
        for tier, names in there.items():
            if not names <= self.contents.of[self.secret]:
                raise OracleError("secret", f"{tier}: a block has another secret's hash")
            if self.told[tier] != names:
                raise OracleError("events", f"{tier}: what was told is not what is there")
        self._pinned = dict(lower.host._pins)
        self.seen["pinned"] += bool(self._pinned)
        self.seen["disk pauses"] += not self._may_write(now)
        self._emptied = False

    def _may_write(self, now: Seconds) -> bool:
        return self.lower.disk is None or self.lower.disk.trouble.may_write(now)

    def _take(self, event: KvEvent) -> None:
        index = self.told[event.tier]
        match event:
            case BlockStored():
                if index & set(event.hashes):
                    raise OracleError("events", f"{event.tier}: a block was stored twice")
                index |= set(event.hashes)
            case BlockRemoved():
                if not index >= set(event.hashes):
                    raise OracleError("events", f"{event.tier}: a block was removed twice")
                index -= set(event.hashes)
            case PoolCleared():
                index.clear()

    def _check_times(self, now: Seconds) -> None:
        """Beyond its deadline a fetch waits for copies that have begun, and for nothing else."""
        copied = {job.fetch for job in self.io.under_way if isinstance(job, CopyIn)}
        for fetch in self._fetches():
            if not fetch.waiting or now < fetch.began + fetch.plan.deadline:
                continue
            if fetch.plan.local and fetch.local_done is None and fetch.number not in copied:
                raise OracleError("time", "a fetch waits for lower tiers beyond its deadline")
            if fetch.plan.peer and fetch.pulled is None:
                raise OracleError("time", "a fetch waits for a peer beyond its deadline")

    def _check_tokens(self, ledger: OutputChecker, *, ended: bool) -> None:
        request = ledger.request
        if ended and not ledger.done:
            raise OracleError("time", "a request has no end")
        if ledger.error is not None:
            raise OracleError("tokens", f"a request has failed: {ledger.error!r}")
        for choice, got in enumerate(ledger.tokens):
            if not got and not ended:
                continue
            right = reference_tokens(request, choice, vocab=VOCAB, max_len=MAX_LEN)
            whole = ended and not ledger.aborted
            if got != (right if whole else right[: len(got)]):
                raise OracleError("tokens", f"{got} instead of {right}")

    def _check_nothing_is_held(self) -> None:
        counts, held = self.core.pool.counts(), self.lower.host.counts()
        assert counts.used == counts.quarantined == 0, counts
        assert held.claimed == held.filling == held.leaving == 0, held
        assert not self.lower._fetching
        assert not self.lower._fills
        assert self.lower._spilling.under_way == self.lower._jobs.disk_jobs == 0
        assert not self._fetches()
        assert self.onboarder.in_flight == 0
        assert not self.onboarder._coming
        if self.lower.disk is not None:
            assert self.lower.disk.counts().claims == 0


ACTIONS: list[Callable[[TieredLife], None]] = [
    *[TieredLife.talk_on] * 8,
    *[TieredLife.wait] * 8,
    *[TieredLife.evict] * 3,
    *[TieredLife.ask_twice] * 2,
    *[TieredLife.ask_what_is_on_the_host] * 3,
    TieredLife.crowd,
    TieredLife.abort,
    TieredLife.ask_and_turn_away,
    TieredLife.turn_away_too_late,
    TieredLife.wait_long,
    TieredLife.hang,
    TieredLife.rot,
    TieredLife.fill_the_disk,
    TieredLife.rekey,
    TieredLife.rekey_while_reading,
    TieredLife.rekey_under_private,
    TieredLife.clear,
]

CORNERS = {cls.__name__ for cls in (CopyIn, CopyOut, Fill, Spill, Maintain)}
CORNERS |= {f"failed {cls.__name__}" for cls in (CopyIn, CopyOut, Fill, Spill)}
CORNERS |= {"hit host", "hit disk", "hit peer", "mixed sources", "joined", "onboarded again"}
CORNERS |= {f"fetch ended: {reason}" for reason in ("whole", "deadline", "cancelled", "io", "crc")}
CORNERS |= {"pull cancelled", "pull transfer", "pull deadline", "preempted", "aborted"}
CORNERS |= {"renamed while reading", "renamed while storing", "disk full", "disk pauses"}
CORNERS |= {"pinned", "private"}
CORNERS |= {"left early", "left early: late", "left early: not copied"}
