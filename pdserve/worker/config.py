"""Configuration of a worker: its model, its engine, and its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from pdserve.errors import ConfigError
from pdserve.text.reasoning_parsers import reasoning_format
from pdserve.text.tool_parsers import tool_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.engine import TransferSpec
    from pdserve.messages.handoff import Disagg, WorkerMode
    from pdserve.messages.tiers import Admission, KvFetchMode, TierSpec
    from pdserve.worker.pooling import PoolingOption

DTYPES = ("auto", "float32", "bfloat16")
MODES = ("aggregated", "prefill", "decode")
DISAGG = ("rule", "predict", "always", "never")
TRANSFERS = ("auto", "rdma", "shm", "cuda_ipc", "tcp")
VERIFY = ("all", "sample", "off")
POOLINGS = ("auto", "none", "mean", "last")
KV_FETCH = ("auto", "always", "never")
ADMISSIONS = ("auto", "all", "reused")

WITHOUT_TIERS: Final = {
    "instant": "it keeps no KV",
    "sglang": "SGLang keeps its cache itself",
    "tensorrt_llm": "TensorRT-LLM keeps its cache itself",
}
"""Engines that have no KV tiers below the device, and why."""

MOST_RANKS: Final = 64
"""Most tensor-parallel ranks of a worker."""
_BY_OPTION = "divides a model by --engine-option"
WITHOUT_RANKS: Final = {
    "vllm": f"{_BY_OPTION} tensor_parallel_size=N",
    "sglang": f"{_BY_OPTION} tp_size=N",
    "tensorrt_llm": f"{_BY_OPTION} tensor_parallel_size=N",
    "instant": "computes nothing that could be divided",
}
"""Engines that take no `tp`, and what to do instead."""

Verify = Literal["all", "sample", "off"]

MAX_LORAS = 64
"""Most adapters of a worker: with the longest names they fill most of a node's card."""
_MAX_TURN_BONUS: Seconds = 86400.0
_LORA_NAME = re.compile(r"[^\s=,@]{1,64}")


@dataclass(frozen=True, slots=True)
class DiskKv:
    """Where the disk tier is."""

    path: str
    """A directory; each worker takes a subdirectory of its own."""
    size: Bytes
    """Most bytes that it takes there."""

    def __str__(self) -> str:
        return f"{self.path}:{self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Configuration of one worker. The defaults serve the bundled model on any machine."""

    model: str = ""
    """A directory in Hugging Face layout, or a hub id `organisation/name[@revision]`; empty: the
    model that comes with pdserve."""
    served_model_name: tuple[str, ...] = ()
    """The name clients ask for, then aliases; empty: the model's own name."""
    loras: Mapping[str, str] = field(default_factory=dict)
    """Directories of LoRA adapters by the names that clients ask for."""
    download_dir: str = ""
    """Directory for hub models; empty: the Hugging Face cache, shared with other programs."""
    tool_parser: str = "auto"
    """Format of the model's tool calls: a name in `text.tool_parsers`, an entry point in the group
    `pdserve.tool_parsers`, or `module:attribute`; `auto`: read from the chat template; `none`."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: a name in `text.reasoning_parsers`, an entry point in the
    group `pdserve.reasoning_parsers`, or `module:attribute`; `auto`, `none` as above."""
    chat_template: str = ""
    """File with a chat template that replaces the model's default one; empty: the model's own."""
    engine: str = "torch"
    """Entry-point name in the group `pdserve.engines`, or `module:attribute`."""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    """Settings specific to the engine, which validates them."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`; `auto` takes CUDA where it works."""
    dtype: str = "auto"
    """One of `DTYPES`; `auto` is float32 on CPU, else the checkpoint's."""
    threads: int = 0
    """Compute threads; 0: as many as affinity, control groups and Slurm allow."""
    tensor_parallel: int = 1
    """Processes that compute the model together, with a part of its weights and KV heads each."""
    block_size: int = 32
    """Tokens per KV block; 32 is what TensorRT-LLM uses, so blocks can travel."""
    kv_memory: Bytes = 0
    """Bytes for KV blocks; 0: the engine chooses from the free memory."""
    kv_share: float = 1.0
    """Fraction of the KV memory for this worker, where workers of one process share it."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's whole memory that this process may take; the rest is for the driver and
    other programs. Processes that share one GPU divide the GPU among them with this setting.
    """
    max_model_len: int = 0
    """Prompt and output tokens together; 0: the checkpoint's limit."""
    max_batch_tokens: int = 2048
    """Tokens one step may compute: bounds how long a long prompt can delay running streams."""
    max_sequences: int = 256
    """Sequences running at once."""
    max_waiting: int = 4096
    """Submissions waiting for their first step; one more is refused with 429."""
    prefix_cache: bool = True
    """Reuse the KV of prompts that begin with the same tokens."""
    host_kv: Bytes | None = 0
    """Bytes of host memory for KV that the device evicts; 0: none; None: a share of what is
    free."""
    disk_kv: DiskKv | None = None
    """Directory and bytes for KV that host memory evicts; None: no disk."""
    kv_fetch: KvFetchMode = "auto"
    """When a prefix is fetched from another worker instead of computed."""
    host_kv_admission: Admission = "auto"
    """What host memory takes in. `auto`: everything, unless blocks stay too short a time."""
    disk_kv_admission: Admission = "auto"
    """What the disk takes in. `auto`: everything while its write budget has credit."""
    disk_kv_write_budget: Bytes = 0
    """Most bytes that are written to disk in a day; 0: as many as the disk tier has."""
    kv_turn_bonus: Seconds = 60.0
    """Seconds by which the blocks of a conversation count as younger, for each of up to 4 earlier
    turns. It keeps conversations that go on; 0: plain LRU."""
    start_timeout: Seconds = 600.0
    """Seconds from starting the engine until it is ready; downloads are not counted."""
    stall_timeout: Seconds = 10.0
    """Seconds without progress, despite work to do, after which the engine restarts; 0: never."""
    canary_interval: Seconds = 0.0
    """Seconds of idleness after which the engine computes one token as a self-test; 0: never."""
    mode: WorkerMode = "aggregated"
    """`prefill` workers compute prompts for `decode` workers. `decode` workers take requests and
    decide where each prompt is prefilled. `aggregated` workers do both themselves.
    """
    disagg: Disagg = "rule"
    """How a decode worker decides where to prefill a prompt; can be changed while the
    worker runs."""
    disagg_min_tokens: int = 512
    """With `rule`: prompts with more uncached tokens than this may be prefilled remotely;
    0: all."""
    disagg_max_queue: int = 10
    """With `rule`: prefill remotely only while at most this many requests wait for a prefill
    worker.
    """
    transfer_backend: str = "auto"
    """One of `TRANSFERS`: the KV transfer backend; `auto` takes the best one each pair of workers
    has.
    """
    itl_target: Seconds = 0.0
    """Target seconds between two tokens of a stream; 0: no target. Engines with pdserve's scheduler
    compute so much of prompts in a step that streams keep it. If they are slower for a while, the
    worker asks to move some of them to another worker.
    """
    pooling: PoolingOption = "auto"
    """How the worker pools hidden states into embeddings; `auto`: as the sentence-transformers
    files beside the checkpoint say, if there are any; `none`: the worker serves no embeddings.
    """
    verify_kv: Verify = "sample"
    """How much of the received KV is compared with what was sent."""
    rdma_devices: tuple[str, ...] = ()
    """`name`, `name:port` or `name:port:gid-index`; empty: every adapter with an active port."""
    rdma_traffic_class: int = 0
    """RoCE traffic class; 0: the adapter default, best effort."""
    transfer: TransferSpec | None = None
    """Full settings of KV transfer; None: no transfer. An aggregated worker has them for requests
    that migrate to another worker.
    """
    tiers: TierSpec | None = None
    """Full settings of the tiers below the device; None: the engine has none."""

    @property
    def wants_tiers(self) -> bool:
        """True if KV tiers below the device are asked for."""
        return self.host_kv != 0 or self.disk_kv is not None

    def validate(self) -> None:
        """Raises `ConfigError` for settings that cannot work; the message names the key and a
        remedy.
        """
        for key, value, known in (
            ("mode", self.mode, MODES),
            ("disagg", self.disagg, DISAGG),
            ("transfer", self.transfer_backend, TRANSFERS),
            ("verify-kv", self.verify_kv, VERIFY),
            ("pooling", self.pooling, POOLINGS),
            ("kv-fetch", self.kv_fetch, KV_FETCH),
            ("host-kv-admission", self.host_kv_admission, ADMISSIONS),
            ("disk-kv-admission", self.disk_kv_admission, ADMISSIONS),
        ):
            if value not in known:
                raise ConfigError(f"{key} {value!r} is unknown: use one of {', '.join(known)}")
        if self.tool_parser not in ("auto", "none"):
            tool_format(self.tool_parser)
        if self.reasoning_parser not in ("auto", "none"):
            reasoning_format(self.reasoning_parser)
        if self.stall_timeout < 0 or self.canary_interval < 0:
            raise ConfigError("stall-timeout and canary-interval must not be negative")
        if self.disagg_min_tokens < 0 or self.disagg_max_queue < 0:
            raise ConfigError("disagg-min-tokens and disagg-max-queue must not be negative")
        if not self.itl_target >= 0:
            raise ConfigError("itl-target must be 0 seconds or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu-memory-utilization {self.gpu_memory_utilization:g} must be greater than 0 "
                "and 1 at most: a share of the GPU's memory, such as 0.45 for each of two workers"
            )
        self._check_loras()
        self._check_tiers()
        self._check_ranks()
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

    def _check_ranks(self) -> None:
        """Checks that the engine divides models itself; it checks the model when it loads."""
        if not 1 <= self.tensor_parallel <= MOST_RANKS:
            raise ConfigError(f"tp {self.tensor_parallel} must be from 1 to {MOST_RANKS}")
        if self.tensor_parallel > 1 and (remedy := WITHOUT_RANKS.get(self.engine)):
            raise ConfigError(
                f"tp is an option of engines torch and sim; engine {self.engine} {remedy}"
            )

    def _check_tiers(self) -> None:
        """Checks that this engine can have the tiers that are asked for; the machine is checked at
        the start."""
        if not 0 <= self.kv_turn_bonus <= _MAX_TURN_BONUS:
            raise ConfigError(f"kv-turn-bonus must be 0 to {_MAX_TURN_BONUS:g} seconds")
        if not self.wants_tiers:
            return
        asked = "host-kv" if self.host_kv != 0 else "disk-kv"
        if self.engine in WITHOUT_TIERS:
            why = WITHOUT_TIERS[self.engine]
            raise ConfigError(
                f"{asked}: engine {self.engine} has no KV tiers, since {why}; leave {asked} out, "
                "or use engine torch or vllm"
            )
        if not self.prefix_cache:
            raise ConfigError(
                f"{asked} keeps prefixes, and prefix-cache is off; leave one of the two out"
            )

    def _check_loras(self) -> None:
        """Checks the number and names of the adapters; their files are read at the start."""
        if len(self.loras) > MAX_LORAS:
            raise ConfigError(
                f"lora: {len(self.loras)} adapters are named, a worker serves {MAX_LORAS} at most"
            )
        for name, path in self.loras.items():
            if not _LORA_NAME.fullmatch(name):
                raise ConfigError(
                    f"lora {name!r}: a name has 1 to 64 characters, none of them a space, '=', ',' "
                    "or '@'"
                )
            if not path:
                raise ConfigError(f"lora {name!r}: the directory is missing, write {name}=DIR")
