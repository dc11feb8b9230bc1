"""What crosses the engine port: commands to an engine core, events from it.

Tags are integers and never reused. A handle is chosen by the sender of `Submit` and names the
submission until its last delta.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.messages.handoff import Handoff
from pdserve.messages.kv import KvEvent
from pdserve.messages.request import GenerateRequest, TokenDelta
from pdserve.messages.transfer import Control, Ticket


class TransferSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one worker moves KV."""

    backends: tuple[str, ...] = ()
    """That may be used, best first; empty: whatever is possible here."""
    verify: Literal["all", "sample", "off"] = "sample"
    host: str = "127.0.0.1"
    """Where bulk connections are listened for."""
    advertise: str = ""
    """What peers dial instead of `host`."""
    tls: tuple[str, str, str] | None = None
    """Certificate, key and CA files where the cluster's links are encrypted."""
    unfilled: float = 0.3
    """Of the pool, at most so much is set aside for prompts that others prefill."""
    optional: bool = False
    """An engine that cannot move KV serves without."""


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
    """Of that memory: several workers of one machine divide it."""
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
    """How KV is moved; None: this engine neither sends nor receives any."""

    @property
    def moves_optionally(self) -> bool:
        """It serves even if it cannot move KV."""
        return self.transfer is None or self.transfer.optional


class EngineCapabilities(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a loaded engine can do; fixed from `Ready` until it stops."""

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
    """Back ends by which this engine can move KV; empty: none."""
    features: tuple[str, ...] = ()
    """As in `ModelCard`."""
    embedding_size: int = 0
    """Numbers of a vector; 0: it makes none."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A snapshot of one engine core. Counters only grow during one life of the core."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    """Never used, or given back with nothing worth keeping."""
    blocks_cached: int = 0
    """Unreferenced but still valid: reusable as prefix, evictable at once."""
    blocks_used: int = 0
    blocks_quarantined: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Sum over all steps."""
    prompt_tokens: int = 0
    """Prompt tokens of admitted sequences."""
    cached_tokens: int = 0
    """Of those, taken from the prefix cache."""
    computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    uncomputed_tokens: int = 0
    """Prompt tokens of this moment that no step has computed yet."""
    kv_tokens: int = 0
    """Of running sequences at this moment: what a decode step reads."""
    itl: float = 0.0
    """Seconds between two tokens of a sequence, lately; 0: unknown."""
    remote: int = 0
    """Sequences whose prompt is prefilled elsewhere at this moment."""
    sending: int = 0
    """Prefilled sequences whose blocks are still being sent at this moment."""
    received_tokens: int = 0
    """Prompt tokens whose KV came from a peer, of sequences that went on with it."""
    received_blocks: int = 0
    received_bytes: int = 0
    """What those blocks take here."""
    sent_blocks: int = 0
    sent_bytes: int = 0
    attempts: int = 0
    """Opened to be filled by a peer."""
    attempts_failed: int = 0
    """Of those, given up; what was in their blocks was not used."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first command: load this."""

    spec: EngineSpec


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    handle: int
    request: GenerateRequest
    counted: bool = True
    """Its tokens and its end are in the statistics."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget a submission and free its blocks within one step. No further delta follows."""

    handle: int


class QueryStats(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Asks for a `Stats` event."""


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Drop every cached, unreferenced block."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Abort what runs, free everything, end."""


class Rekey(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Name blocks with another secret: what is cached is forgotten. `EngineSpec.hash_secret` is
    what the core began with; one that starts again begins with the newest."""

    hash_secret: bytes


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The node that this core belongs to, and its life: paths are made in its name. A later one
    ends what was begun in an earlier one."""

    node: str
    epoch: int


class SubmitRemote(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Take a request whose prompt will be prefilled elsewhere: set capacity aside, compute nothing.
    Answered by `Admitted`, at once or when there is room, or `Rejected`."""

    handle: int
    request: GenerateRequest


class Open(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Bind fresh blocks to an attempt of the peer's and let it fill them. Answered by `Opened` or
    `AttemptLost`. An attempt that is open is given up first."""

    handle: int
    attempt: int
    node: str
    epoch: int


class Activate(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The attempt's handoff has come: once all its parts are here and checked, decode. The first
    tokens' deltas answer it, or `AttemptLost`."""

    handle: int
    attempt: int
    handoff: Handoff


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Want nothing more of an attempt. Its blocks come back once they are fenced; `Open` may name
    the next one at once. Unknown ones are ignored."""

    handle: int
    attempt: int


class PrefillHere(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A request of `SubmitRemote` is to be computed here after all; an open attempt is given up."""

    handle: int


class Prefill(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Compute a prompt and bring its KV to the blocks of a peer's ticket. Answered by `Prefilled`
    or `Rejected`; ends by `Sent`. `Abort` withdraws it."""

    handle: int
    request: GenerateRequest
    ticket: Ticket
    node: str
    epoch: int


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """That life of a node is over: close the paths to it, which fences what it could write."""

    node: str
    epoch: int


class TransferCall(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """A peer's transport asks ours. Answered by `TransferReply`."""

    number: int
    node: str
    epoch: int
    backend: str
    control: Control


class TransferAnswered(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """To a `TransferQuestion`: the answer, or what went wrong (`kind` as in `Rejected`)."""

    number: int
    control: Control | None
    kind: str = ""
    message: str = ""


Command = (
    Start
    | Submit
    | Abort
    | QueryStats
    | ClearCache
    | Stop
    | Rekey
    | Attach
    | SubmitRemote
    | Open
    | Activate
    | GiveUp
    | PrefillHere
    | Prefill
    | PeerGone
    | TransferCall
    | TransferAnswered
)


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Loading goes on: a stage in words, and how far it is (0 to 1; None: unknown)."""

    stage: str
    fraction: float | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    capabilities: EngineCapabilities


class Step(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What one step produced, for all sequences at once."""

    deltas: list[TokenDelta]


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A submission the engine cannot take or had to give up; no delta follows.

    `kind` names a class in `pdserve.errors`, the rest are that error's arguments.
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


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The core cannot go on (or could not load); it ends after this. `kind` as in `Rejected`."""

    kind: str
    message: str


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The last event of a core that ended in order."""

    leaked_blocks: int = 0


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """There is room for a request of `SubmitRemote`."""

    handle: int
    cached_tokens: int
    """Leading prompt tokens that are in the pool now."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The peer may fill the blocks of this ticket."""

    handle: int
    attempt: int
    ticket: Ticket


class AttemptLost(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Nothing came of an attempt; the request waits for the next one, or for `PrefillHere`. `kind`
    as in `Rejected`."""

    handle: int
    attempt: int
    kind: str
    message: str


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A prompt has been computed; all its parts are sent or on their way."""

    handle: int
    handoff: Handoff


class Sent(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A prefilled or withdrawn sequence's blocks are not read any more: the end of its handle.
    `kind` and `message` say why it failed, if it did."""

    handle: int
    kind: str = ""
    message: str = ""


class TransferQuestion(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Our transport asks a peer's. Answered by `TransferAnswered`, within `timeout` seconds."""

    number: int
    node: str
    epoch: int
    backend: str
    control: Control
    timeout: float


class TransferReply(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """To a `TransferCall`."""

    number: int
    control: Control | None
    kind: str = ""
    message: str = ""


class PathState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One path, as status and metrics show it."""

    node: str
    epoch: int
    backend: str
    """`none`: there is no way to move KV to or from that peer."""
    why: str = ""
    """Why this back end and none better, in words."""
    expected: float = 0.0
    """Bytes per second that this back end usually brings; 0: unknown."""
    sent_bytes: int = 0
    received_bytes: int = 0
    sent_seconds: float = 0.0
    """During which something was being sent."""
    failures: int = 0
    down: str = ""
    """Why it has ended; empty while it is up, and where there is no way, once it is worth trying
    again."""
    degraded: str = ""
    """Why a better back end, which both have, is not used, or none at all; empty: no better one
    could be."""


class Paths(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """All paths that there are: whenever one comes or goes, and with the statistics."""

    paths: list[PathState]


class Freed(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Of submissions that were aborted nothing is held any more. Every `Abort` is answered so."""

    handles: list[tuple[int, str]]
    """And what each was doing when the abort came; empty: it had ended by itself."""


Event = (
    Progress
    | Ready
    | Step
    | Rejected
    | KvEvents
    | Stats
    | Failed
    | Stopped
    | Admitted
    | Opened
    | AttemptLost
    | Prefilled
    | Sent
    | TransferQuestion
    | TransferReply
    | Paths
    | Freed
)
