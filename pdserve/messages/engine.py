"""Defines the messages of the engine port: commands to an engine core, events from it.

Tags are integers and never reused. The sender of `Submit` chooses a handle, which identifies the
submission until its last delta.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.messages.card import ImagePlaceholder
from pdserve.messages.handoff import Handoff
from pdserve.messages.kv_events import KvEvent, Tier
from pdserve.messages.kv_pull import KvChains, KvPullGrant
from pdserve.messages.lora import LoraAdapter
from pdserve.messages.request import GenerateRequest, TokenDelta
from pdserve.messages.tiers import LaneLoad, PlanStats, TierSpec, TierStats
from pdserve.messages.transfer import TransferControl, TransferTicket


class TransferSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Settings of KV transfer for one worker."""

    backends: tuple[str, ...] = ()
    """Backends that may be used, best first; empty: all that work here."""
    verify: Literal["all", "sample", "off"] = "sample"
    host: str = "127.0.0.1"
    """Address on which bulk connections are accepted."""
    advertise: str = ""
    """Address that peers dial instead of `host`."""
    tls: tuple[str, str, str] | None = None
    """Certificate, key and CA files; set if the cluster's links are encrypted."""
    unfilled: float = 0.3
    """Largest fraction of the KV pool set aside for prompts that other workers prefill."""
    optional: bool = False
    """True: the engine serves without KV transfer if it cannot move KV."""
    rdma_devices: tuple[str, ...] = ()
    """`name`, `name:port` or `name:port:gid-index`; empty: every adapter with an active port."""
    rdma_traffic_class: int = 0
    """RoCE traffic class; 0: the adapter default."""


class EngineSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine is to load; the same record whether the core is a process or a thread."""

    engine: str
    """Entry-point name in the group `pdserve.engines`, or `module:attribute`."""
    model: str
    """A local directory in Hugging Face layout."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`; `auto` takes CUDA if it works."""
    dtype: str = "auto"
    """`float32`, `bfloat16`; `auto` is float32 on CPU, else the checkpoint's."""
    threads: int = 0
    """Compute threads; 0: as many as this process may use."""
    block_size: int = 32
    kv_memory: int = 0
    """Bytes for KV blocks; 0: the engine chooses from what is free."""
    kv_share: float = 1.0
    """Fraction of the KV memory for this worker, where several workers of one machine share it."""
    max_model_len: int = 0
    """0: the checkpoint's limit."""
    max_batch_tokens: int = 2048
    """Tokens one step may compute."""
    max_sequences: int = 256
    """Sequences running at once."""
    max_waiting: int = 4096
    """Submissions waiting for their first step; one more is refused."""
    prefix_cache: bool = True
    hash_secret: bytes = b""
    """Key of the block-hash chain."""
    seed: int = 0
    options: dict[str, str] = {}
    """Engine-specific settings (`--engine-option name=value`), validated by the engine."""
    transfer: TransferSpec | None = None
    """KV transfer settings; None: this engine neither sends nor receives KV."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory that this process may take with weights, KV and steps together;
    used if `kv_memory` is 0.
    """
    kv_cap: int = 0
    """Upper bound in bytes for KV, set after a larger pool did not fit; 0: no bound."""
    loras: tuple[LoraAdapter, ...] = ()
    """LoRA adapters to load besides the model. Only an engine with the feature `lora` can."""
    tiers: TierSpec | None = None
    """Tiers of KV below the device; None: what the device evicts is lost."""
    tensor_parallel: int = 1
    """Processes that compute the model together, each with a part of its weights and KV heads."""
    itl_target: float = 0.0
    """Target seconds between two tokens of a stream, for what steps compute beside it; 0: none."""

    @property
    def moves_optionally(self) -> bool:
        """True if the engine also serves when it cannot move KV."""
        return self.transfer is None or self.transfer.optional


class EngineRank(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One of several processes that compute a model together."""

    pid: int
    device: str


class EngineCapabilities(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a loaded engine can do; fixed from `CoreReady` until it stops."""

    engine: str
    model_type: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    block_bytes: int
    max_batch_tokens: int
    max_sequences: int
    prompt_logprobs: bool = True
    kv_events: bool = True
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    compat_hash: str = ""
    transfers: tuple[str, ...] = ()
    """Backends by which this engine can move KV; empty: none."""
    features: tuple[str, ...] = ()
    """Features beyond plain text, as in `ModelCard.features`."""
    embedding_size: int = 0
    """Dimensions of an embedding; 0: it makes none."""
    reduced: str = ""
    """Why the context or the pool is smaller than the checkpoint or the spec ask for, and the
    remedy; empty: it is not.
    """
    untested: str = ""
    """Why the engine's library may behave otherwise than this release of pdserve expects, and the
    remedy; empty: its version is a tested one.
    """
    num_labels: int = 0
    """Outputs of the model's classification head; 0: it has none."""
    image: ImagePlaceholder | None = None
    """Set with the feature `images`, as in `ModelCard.image`."""
    tiers: tuple[str, ...] = ()
    """Names of the tiers below the device that are in use."""
    fetches: tuple[str, ...] = ()
    """Backends by which blocks of the prefix cache can be exchanged, while no other KV is; empty:
    `transfers`."""
    kv_layers: int = 0
    """The model's layers, if blocks come from host memory in groups of them; 0: they come whole."""
    slow_kernels: str = ""
    """Why a slower library computes in place of the engine's own kernels; empty: they compute, or
    were not wanted."""
    ranks: tuple[EngineRank, ...] = ()
    """The tensor-parallel ranks in order, the engine's own process first; empty: there is one."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of one engine core. Counters only grow during one life of the core."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Blocks never used, or freed with nothing worth keeping."""
    blocks_cached: int = 0
    """Unreferenced but still valid: reusable as prefix, evictable at once."""
    blocks_used: int = 0
    blocks_quarantined: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Sum over all steps, in seconds."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences."""
    cached_tokens: int = 0
    """Prompt tokens of admitted sequences that were taken from the prefix cache."""
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    uncomputed_tokens: int = 0
    """Prompt tokens that no step has computed yet, at this moment."""
    kv_tokens: int = 0
    """Tokens of running sequences at this moment: what a decode step reads."""
    itl: float = 0.0
    """Recent seconds between two tokens of a sequence; 0: unknown."""
    remote: int = 0
    """Sequences whose prompt is being prefilled by another worker."""
    sending: int = 0
    """Prefilled sequences whose blocks are still being sent."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from a peer and was used."""
    received_blocks: int = 0
    received_bytes: int = 0
    """Bytes of KV blocks that came from peers."""
    sent_blocks: int = 0
    sent_bytes: int = 0
    attempts: int = 0
    """Attempts opened for a peer to fill."""
    attempts_failed: int = 0
    """Opened attempts that failed; their blocks were not used."""
    inexact_continuations: int = 0
    """Requests with earlier output that the engine continued only nearly as it would have gone on:
    drawn with other noise, or with penalties that it cannot apply to earlier output.
    """
    failed_loads: int = 0
    """Prompts from other workers whose KV the engine could not load, at least in part: it has
    computed those tokens itself.
    """
    images: int = 0
    """Images of admitted requests that the engine has read."""
    images_unexpected: int = 0
    """Those that took another number of tokens than the frontend expected: routers did not find
    what was cached of them."""
    tiers: tuple[TierStats, ...] = ()
    """Tiers below the device."""
    lanes: tuple[LaneLoad, ...] = ()
    """Lanes of the tiers, for predictions."""
    pulled_blocks: int = 0
    """Blocks fetched from other workers' pools."""
    pulled_bytes: int = 0
    served_blocks: int = 0
    """Blocks of this pool that other workers fetched."""
    served_bytes: int = 0
    pulls: int = 0
    """KV fetches begun."""
    pulls_failed: int = 0
    """KV fetches that ended with an error; `KvPullEnded` says why."""
    plans: tuple[PlanStats, ...] = ()
    """What became of plans to fetch prefixes, by source."""
    missed_blocks: dict[str, int] = {}
    """Blocks that were known below the device or at another worker and were not fetched, by
    reason."""
    steps_ahead: int = 0
    """Steps that were begun before the one before them had ended."""
    graph_steps: int = 0
    """Steps that a CUDA graph has computed."""
    eager_decodes: int = 0
    """Steps that only decode and that no CUDA graph could compute, in an engine that has some."""


class StartCore(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first command: load this model."""

    spec: EngineSpec


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    handle: int
    request: GenerateRequest
    counted: bool = True
    """True: its tokens and its end count in the statistics."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Drops a submission and frees its blocks within one step. No further delta follows."""

    handle: int


class QueryStats(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks for an `EngineStats` event."""


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Drops every cached, unreferenced block."""


class StopCore(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Aborts all requests, frees everything, and ends the core."""


class SetHashSecret(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Hashes blocks with another secret; cached blocks are dropped. `EngineSpec.hash_secret` is
    what the core began with; a restarted core begins with the newest secret.
    """

    hash_secret: bytes


class SetNodeLife(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Sets the node, and its life, that this core belongs to: paths are made in its name. A later
    life ends what was begun in an earlier one.
    """

    node: str
    epoch: int


class SubmitRemote(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Takes a request whose prompt another worker will prefill: reserves capacity, computes
    nothing. Answered by `Admitted`, at once or when there is room, or by `Rejected`.
    """

    handle: int
    request: GenerateRequest


class OpenAttemptBlocks(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Binds fresh blocks to a peer's attempt and lets the peer fill them. Answered by
    `AttemptBlocksOpened` or `AttemptLost`. An attempt that is already open is aborted first.
    """

    handle: int
    attempt: int
    node: str
    epoch: int


class Activate(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Starts to decode once all parts of a handed-off attempt are here and checked. Answered by the
    deltas of the first tokens, or by `AttemptLost`.
    """

    handle: int
    attempt: int
    handoff: Handoff


class AbortAttempt(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Aborts an attempt. Its blocks are freed once they are fenced; `OpenAttemptBlocks` may name
    the next attempt at once. Unknown attempts are ignored.
    """

    handle: int
    attempt: int


class PrefillLocally(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Prefills a `SubmitRemote` request here after all; an open attempt is aborted."""

    handle: int


class PrefillForPeer(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Computes a prompt and sends its KV to the blocks of a peer's ticket. Answered by `Prefilled`
    or `Rejected`; ends with `PrefillSent`. `Abort` withdraws it.
    """

    handle: int
    request: GenerateRequest
    ticket: TransferTicket
    node: str
    epoch: int


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Reports that a node life is over, or the engine of one: closes the paths to it, which fences
    what it could write."""

    node: str
    epoch: int
    returns: bool = False
    """True: the same life of the node starts its engine again, so it may be asked later."""


class InboundControl(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """A control call from a peer's transport to ours. Answered by `InboundControlReply`."""

    number: int
    node: str
    epoch: int
    backend: str
    control: TransferControl


class OutboundControlReply(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Answers an `OutboundControl` with a reply or an error (`kind` as in `Rejected`)."""

    number: int
    control: TransferControl | None
    kind: str = ""
    message: str = ""


class MakePath(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """Makes the path to a peer before a transfer needs it. Nothing answers: `PathStates` show it.
    Ignored if there is a path, or none is possible."""

    node: str
    epoch: int


class KvPullAnswer(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Answers a `KvPullOpened` with what the owner has sent."""

    number: int
    grant: KvPullGrant


class ServeKvPull(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=19):
    """Sends blocks of this pool to the blocks of a peer's ticket. Answered by `KvPullServed`."""

    number: int
    node: str
    epoch: int
    hashes: bytes
    """Block hashes of the ticket's blocks."""
    ticket: TransferTicket
    timeout: float
    """Seconds that the peer still waits."""


class StopKvPull(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Sends nothing more for a `ServeKvPull`, whose answer is not wanted any more."""

    number: int


class AbsorbKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=21):
    """Pulls blocks that no request waits for from a peer into the prefix cache. Answered by
    `KvAbsorbed`."""

    number: int
    node: str
    epoch: int
    first: int
    """Index of the first block in its chain."""
    parent: bytes
    """Hash before the first block; for a chain's first block its root."""
    hashes: bytes
    timeout: float
    mark: bytes = b""
    turns: int = 1
    """The blocks' owner and age, as in `OfferedChain`."""


class DropKv(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Forgets reusable blocks on every tier and overwrites them on disk. Blocks in use stay.
    Answered by `KvDropped`."""

    number: int
    owners: tuple[str, ...] | None = None
    """Only blocks of prompts whose cache salts have one of these owners, see
    `blocks.hashing.salt_owner`; None: of all."""
    older: float = 0.0
    """Only blocks on lower tiers that nothing has used for this many seconds; 0: whatever their
    age, and on the device, too."""


class ListKvChains(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Asks for the chains of cached blocks that are worth most, `blocks` blocks at most. Answered
    by `KvChainsListed`."""

    number: int
    blocks: int


Command = (
    StartCore
    | Submit
    | Abort
    | QueryStats
    | ClearCache
    | StopCore
    | SetHashSecret
    | SetNodeLife
    | SubmitRemote
    | OpenAttemptBlocks
    | Activate
    | AbortAttempt
    | PrefillLocally
    | PrefillForPeer
    | PeerGone
    | KvPullAnswer
    | ServeKvPull
    | StopKvPull
    | AbsorbKv
    | DropKv
    | ListKvChains
)
"""What the node tells the thread that computes."""

ControlCommand = SetNodeLife | PeerGone | InboundControl | OutboundControlReply | MakePath
"""What the node tells the thread of the transports, by a socket of their own."""


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Progress of loading: a stage in words, and its fraction (0 to 1; None: unknown)."""

    stage: str
    fraction: float | None = None


class CoreReady(msgspec.Struct, frozen=True, array_like=True, tag=2):
    capabilities: EngineCapabilities
    transports: bool = True
    """Whether the core's own transports read control commands. An engine whose library moves KV has
    none."""


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What one step produced, for all sequences at once."""

    deltas: list[TokenDelta]


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ends a submission that the engine cannot take or had to give up; no delta follows.

    `kind` names a class in `pdserve.errors`, the other fields are that error's arguments.
    """

    handle: int
    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class KvEvents(msgspec.Struct, frozen=True, array_like=True, tag=5):
    events: list[KvEvent]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=6):
    stats: EngineStats


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The core cannot load or go on, and ends after this event. `kind` as in `Rejected`."""

    kind: str
    message: str


class CoreStopped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The last event of a core that ended normally."""

    leaked_blocks: int = 0


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """There is room for a `SubmitRemote` request."""

    handle: int
    cached_tokens: int
    """Leading prompt tokens that are in the pool now."""


class AttemptBlocksOpened(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The peer may fill the blocks of this ticket."""

    handle: int
    attempt: int
    ticket: TransferTicket


class AttemptLost(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """An attempt failed; the request waits for the next one, or for `PrefillLocally`. `kind` as in
    `Rejected`.
    """

    handle: int
    attempt: int
    kind: str
    message: str


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A prompt has been computed; all its parts are sent or being sent."""

    handle: int
    handoff: Handoff


class PrefillSent(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The blocks of a prefilled or withdrawn sequence are no longer read: the end of its handle.
    `kind` and `message` say why it failed, if it did.
    """

    handle: int
    kind: str = ""
    message: str = ""


class OutboundControl(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A control call from our transport to a peer's. Answered by `OutboundControlReply` within
    `timeout` seconds.
    """

    number: int
    node: str
    epoch: int
    backend: str
    control: TransferControl
    timeout: float


class InboundControlReply(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Answers an `InboundControl`."""

    number: int
    control: TransferControl | None
    kind: str = ""
    message: str = ""


class PathState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One KV transfer path, as status and metrics show it."""

    node: str
    epoch: int
    backend: str
    """Name of the backend; `none`: KV cannot move to or from that peer."""
    why: str = ""
    """Why this backend is used and no better one, in words."""
    expected: float = 0.0
    """Bytes per second that this backend usually reaches; 0: unknown."""
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_seconds: float = 0.0
    """Seconds during which something was being sent."""
    failures: int = 0
    down: str = ""
    """Why the path has ended; empty while it is up, and, where no backend works, once it is worth
    trying again.
    """
    degraded: str = ""
    """Why a better backend that both ends have is not used, or why there is none; empty: no better
    one is possible.
    """
    measured: float = 0.0
    """Bytes per second from the peer, measured when this end made the path; 0: not measured."""
    unmeasured: str = ""
    """Why it was not measured, in words; empty: it was, or the peer made the path."""


class PathStates(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """All existing paths; sent whenever one comes or goes, and with the statistics."""

    paths: list[PathState]


class BlocksFreed(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Aborted submissions hold no blocks any more. Answers every `Abort`."""

    handles: list[tuple[int, str]]
    """(handle, what it was doing when the abort came); empty: it had ended by itself."""


class KvPullOpened(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=18):
    """The peer may fill the ticket's blocks with those of its pool that have these hashes: ask it.
    Answered by `KvPullAnswer`, unless `KvPullEnded` comes before it."""

    number: int
    node: str
    epoch: int
    hashes: bytes
    ticket: TransferTicket
    timeout: float
    """Seconds after which the pull ends by itself."""


class KvPullEnded(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """A pull has ended; an answer that has not come is not wanted any more."""

    number: int
    blocks: int
    """Blocks that have arrived and are used."""
    error: str = ""
    """Why they are fewer than wanted, in one word; empty: they are not, or the owner had only
    those."""
    seconds: float = 0.0
    """Time from the first message to the end."""


class KvPullServed(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Answers a `ServeKvPull`: every granted block has been handed to the transports."""

    number: int
    grant: KvPullGrant


class KvAbsorbed(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Answers an `AbsorbKv`."""

    number: int
    blocks: int
    """Leading blocks of the order that are in the pool now."""
    pulled: int = 0
    """Those of them that came from the peer."""
    error: str = ""
    """Why the others are not, in one word; empty: all are."""


class KvDropped(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Answers a `DropKv`."""

    number: int
    blocks: dict[Tier, int] = {}
    """Blocks that are gone, by tier."""
    kind: str = ""
    message: str = ""


class KvChainsListed(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Answers a `ListKvChains`."""

    number: int
    listed: KvChains


Event = (
    LoadProgress
    | CoreReady
    | StepOutput
    | Rejected
    | KvEvents
    | Stats
    | CoreFailed
    | CoreStopped
    | Admitted
    | AttemptBlocksOpened
    | AttemptLost
    | Prefilled
    | PrefillSent
    | BlocksFreed
    | KvPullOpened
    | KvPullEnded
    | KvPullServed
    | KvAbsorbed
    | KvDropped
    | KvChainsListed
)
"""What the thread that computes tells the node."""

ControlEvent = OutboundControl | InboundControlReply | PathStates
"""What the thread of the transports tells the node."""
