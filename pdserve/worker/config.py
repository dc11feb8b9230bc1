"""What a worker is told: which model, on which engine, within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import TransferSpec
    from pdserve.messages.handoff import Disagg, Mode
    from pdserve.worker.pooling import Asked

DTYPES = ("auto", "float32", "bfloat16")
MODES = ("aggregated", "prefill", "decode")
DISAGG = ("rule", "predict", "always", "never")
TRANSFERS = ("auto", "rdma", "shm", "cuda_ipc", "tcp")
VERIFY = ("all", "sample", "off")
POOLINGS = ("auto", "none", "mean", "last")
# By name, as those of `pdserve.text`: what reads them is not needed to explain an option.
TOOL_PARSERS = ("auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")
REASONING_PARSERS = ("auto", "none", "think", "mistral")

Verify = Literal["all", "sample", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker. The defaults serve the bundled model on whatever the machine has."""

    model: str = ""
    """A directory in Hugging Face layout, or a hub id `organisation/name[@revision]`; empty: the
    model that comes with pdserve."""
    served_model_name: tuple[str, ...] = ()
    """The name clients ask for, then aliases; empty: the model's own name."""
    download_dir: str = ""
    """Where hub models are kept; empty: the Hugging Face cache, shared with other programs."""
    tool_parser: str = "auto"
    """One of `TOOL_PARSERS`: how the model writes calls of tools; `auto`: its template tells."""
    reasoning_parser: str = "auto"
    """One of `REASONING_PARSERS`: how it marks its reasoning, likewise."""
    engine: str = "torch"
    """Entry-point name in the group `pdserve.engines`, or `module:attribute`."""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    """Settings that only this engine knows; it validates them."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`; `auto` takes CUDA where it works."""
    dtype: str = "auto"
    """One of `DTYPES`; `auto` is float32 on CPU, else the checkpoint's."""
    threads: int = 0
    """Compute threads; 0: as many as affinity, control groups and Slurm allow."""
    block_size: int = 32
    """Tokens per KV block; 32 is what TensorRT-LLM uses, so blocks can travel."""
    kv_memory: Bytes = 0
    """For KV blocks; 0: the engine proposes from what is free."""
    kv_share: float = 1.0
    """Of that memory: the workers of one process divide it."""
    max_model_len: int = 0
    """Prompt and output tokens together; 0: the checkpoint's limit."""
    max_batch_tokens: int = 2048
    """Tokens one step may compute: bounds how long a long prompt can delay running streams."""
    max_sequences: int = 256
    """Sequences running at once."""
    max_waiting: int = 4096
    """Submissions waiting for their first step; one more is refused with 429."""
    prefix_cache: bool = True
    """Reuse the KV of equal prompt beginnings."""
    start_timeout: Seconds = 600.0
    """From starting the engine until it is ready, downloads apart."""
    stall_timeout: Seconds = 10.0
    """Without progress of an engine that could get on, after which it is restarted; 0: never."""
    canary_interval: Seconds = 0.0
    """An engine that has been idle for so long computes a token for itself; 0: never."""
    mode: Mode = "aggregated"
    """`prefill` workers compute prompts for `decode` workers, which take requests and decide for
    each where its prompt is prefilled; an `aggregated` one does everything by itself."""
    disagg: Disagg = "rule"
    """How a decode worker decides; may be changed while it runs."""
    disagg_min_tokens: int = 512
    """`rule`: prompts with more uncached tokens than this may be prefilled elsewhere; 0: all."""
    disagg_max_queue: int = 10
    """`rule`: while no more requests than this wait for a prefill worker."""
    transfer_backend: str = "auto"
    """One of `TRANSFERS`: by what KV is moved; `auto` takes the best that a pair of workers has."""
    itl_target: Seconds = 0.0
    """Streams that are slower than this between two tokens, for a while, have some of them moved to
    another worker; 0: they may be as slow as they are."""
    pooling: Asked = "auto"
    """How texts become vectors; `auto`: as the files of sentence-transformers beside the checkpoint
    say, if there are any; `none`: the worker makes no vectors."""
    verify_kv: Verify = "sample"
    """How much of the KV that came is compared with what was sent."""
    transfer: TransferSpec | None = None
    """How KV is moved, in full; None: not at all. An aggregated worker has some for requests that
    move to another worker."""

    def validate(self) -> None:
        """Raise `ConfigError` for what can never work, naming key and remedy."""
        for key, value, known in (
            ("mode", self.mode, MODES),
            ("disagg", self.disagg, DISAGG),
            ("transfer", self.transfer_backend, TRANSFERS),
            ("verify-kv", self.verify_kv, VERIFY),
            ("pooling", self.pooling, POOLINGS),
            ("tool-parser", self.tool_parser, TOOL_PARSERS),
            ("reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if value not in known:
                raise ConfigError(f"{key} {value!r} is unknown: use one of {', '.join(known)}")
        if self.stall_timeout < 0 or self.canary_interval < 0:
            raise ConfigError("stall-timeout and canary-interval must not be negative")
        if self.disagg_min_tokens < 0 or self.disagg_max_queue < 0:
            raise ConfigError("disagg-min-tokens and disagg-max-queue must not be negative")
        if not self.itl_target >= 0:
            raise ConfigError("itl-target must be 0 seconds or more")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown: use one of {', '.join(DTYPES)}")
        if self.block_size & (self.block_size - 1) or not 1 <= self.block_size <= 1024:
            raise ConfigError(
                f"block-size {self.block_size} is not possible: use a power of two from 1 to 1024"
            )
        for name in ("max_batch_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1")
        if self.max_batch_tokens < self.max_sequences:
            raise ConfigError(
                f"max-batch-tokens {self.max_batch_tokens} is less than max-sequences "
                f"{self.max_sequences}: every running sequence takes one token per step; raise "
                "the one or lower the other"
            )
