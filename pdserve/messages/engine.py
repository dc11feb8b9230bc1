"""What crosses the engine port: commands to an engine core, events from it.

Tags are integers and never reused. A handle is chosen by the sender of `Submit` and names the
submission until its last delta.
"""

from __future__ import annotations

import msgspec

from pdserve.messages.kv import KvEvent
from pdserve.messages.request import GenerateRequest, TokenDelta


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


class Start(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first command: load this."""

    spec: EngineSpec


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    handle: int
    request: GenerateRequest


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


Command = Start | Submit | Abort | QueryStats | ClearCache | Stop | Rekey


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


Event = Progress | Ready | Step | Rejected | KvEvents | Stats | Failed | Stopped
