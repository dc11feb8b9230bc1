"""Lists every option in one table: flag, environment variable and TOML key.

An option names the config field that it fills; the field alone has the default. The table says how
text becomes the field's value, and has the help text. `resolve.py` reads files and the environment;
the command line draws `--help`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.agent.config import parse_slots, parse_workers, show_slots, show_workers
from pdserve.errors import ConfigError
from pdserve.ids import MAX_CHOICES
from pdserve.launch.config import units
from pdserve.net import address
from pdserve.observe.logs import LEVELS
from pdserve.tracing.export.otel_env import traces_url, without_password
from pdserve.tracing.rules import PARENT_MODES
from pdserve.worker.config import (
    ADMISSIONS,
    DISAGG,
    KV_FETCH,
    MODES,
    MOST_RANKS,
    POOLINGS,
    TRANSFERS,
    VERIFY,
    DiskKv,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

GROUPS = {
    "model": "what to serve",
    "server": "where to listen",
    "engine": "how to compute",
    "tiers": "where KV goes when it leaves the device, and when it is fetched",
    "limits": "what one client or all together may use",
    "security": "keys, certificates and what clients may do",
    "logging": "what to tell the operator",
    "cluster": "other nodes, and how requests reach them",
    "agent": "workers that an agent starts on its host",
    "process": "role, configuration, shutdown",
}

ROLES = ("all-in-one", "frontend", "router", "worker", "planner", "agent")
METRIC_NAMES = ("pdserve", "vllm", "both")
"""Those of `observe.scrapes.METRIC_NAMES`, which is too heavy to import for a help text."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    name: str
    """With dashes: `--kv-memory`, PDSERVE_KV_MEMORY, `kv-memory = …`."""
    target: str
    """`component.field` of the composed config."""
    group: str
    help: str
    metavar: str
    parse: Callable[[str], Any]
    """Parses the text. Errors: `ValueError` says what is wrong and what would be right."""
    show: Callable[[Any], str] = str
    unset: str = ""
    """What a zero, empty or absent value means, in a few words."""
    switch: bool = False
    """True for a flag without a value: `--name` and `--no-name`."""
    many: bool = False
    """True if the flag may be repeated; its texts are joined as lines."""
    imports: bool = False
    """True if a value `module:attribute` imports that module."""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return "PDSERVE_" + self.name.upper().replace("-", "_")

    def text(self, value: Any) -> str:
        """A value in the form in which it would be written."""
        if not value and self.unset:
            return self.unset
        return self.show(value)


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is unknown: use one of {', '.join(allowed)}")
        return text

    return parse


def _auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that reads `auto` as zero."""
    return lambda text: 0 if text.strip().lower() == "auto" else parse(text)


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser that reads empty text and `none` as None."""
    return lambda text: None if text.strip().lower() in ("", "none") else parse(text)


def _switch(name: str, target: str, group: str, help: str) -> Option:
    return Option(
        name, target, group, help, "", units.parse_switch, lambda v: str(v).lower(), switch=True
    )


def _size(name: str, target: str, group: str, help: str, *, auto: bool = False) -> Option:
    positive = _positive(units.parse_size)
    parse = _auto(positive) if auto else positive
    return Option(
        name, target, group, help, "SIZE", parse, units.format_size, "auto" if auto else ""
    )


def _duration(name: str, target: str, group: str, help: str) -> Option:
    return Option(
        name,
        target,
        group,
        help,
        "TIME",
        _positive(units.parse_duration),
        units.format_duration,
    )


def _count(
    name: str,
    target: str,
    group: str,
    help: str,
    *,
    auto: bool = False,
    most: int | None = None,
) -> Option:
    count = functools.partial(units.parse_count, least=1, most=most)
    parse = _auto(count) if auto else count
    return Option(name, target, group, help, "N", parse, unset="auto" if auto else "")


def _text(
    name: str,
    target: str,
    group: str,
    help: str,
    metavar: str,
    unset: str = "",
    *,
    imports: bool = False,
) -> Option:
    """An option with text. The word in `unset` may be written too, and means no value; so does an
    empty text, as of an unset shell variable."""

    def parse(text: str) -> str:
        word = _filled(str.strip)(text)
        return "" if word == unset else word

    return Option(name, target, group, help, metavar, parse, unset=unset, imports=imports)


def _filled(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser that refuses an empty result."""

    def checked(text: str) -> T:
        value = parse(text)
        if not value:
            raise ValueError("must not be empty")
        return value

    return checked


def _origins(text: str) -> tuple[str, ...]:
    origins = units.parse_list(text)
    for origin in origins:
        if origin != "*" and "://" not in origin:
            raise ValueError(f"{origin!r} is not an origin; write https://host or *")
    return origins


def _host_names(text: str) -> tuple[str, ...]:
    names = units.parse_list(text)
    for name in names:
        if "/" in name or ":" in name:
            raise ValueError(f"{name!r} is not a name; write it without scheme and port")
    return names


def _positive(parse: Callable[[str], float]) -> Callable[[str], Any]:
    def checked(text: str) -> float:
        value = parse(text)
        if value <= 0:
            raise ValueError(f"{text!r} must be greater than 0")
        return value

    return checked


def _pairs(text: str) -> dict[str, str]:
    """Reads one `name=value` per line or, on a single line, separated by commas."""
    parts = text.split("\n") if "\n" in text else text.split(",")
    return units.parse_pairs(part for part in parts if part.strip())


def _slo_times(text: str) -> dict[str, float]:
    """Reads one `TIME` or `MODEL=TIME` per line or, on a single line, separated by commas."""
    parts = text.split("\n") if "\n" in text else text.split(",")
    return units.parse_model_times(part for part in parts if part.strip())


def _show_slo_times(times: dict[str, float]) -> str:
    parts = [(model, units.format_duration(time)) for model, time in times.items()]
    return ",".join(f"{model}={time}" if model else time for model, time in parts)


def _address(text: str) -> str:
    """Checks `host:port` and returns it as it was written."""
    try:
        address.split(text.strip())
    except ConfigError as error:
        raise ValueError(error.message) from None
    return text.strip()


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(map(_address, units.parse_list(text)))


def _path(text: str) -> Path:
    return Path(text.strip()).expanduser()


def _host_kv(text: str) -> int | None:
    """Reads a size, `auto` as None, and `off` as 0."""
    word = text.strip().lower()
    if word == "auto":
        return None
    return 0 if word in ("", "off", "none") else units.parse_size(text)


def _show_host_kv(size: int | None) -> str:
    if size is None:
        return "auto"
    return units.format_size(size) if size else "off"


def _disk_kv(text: str) -> DiskKv | None:
    """Reads `DIR:SIZE`, and `off` as None."""
    if text.strip().lower() in ("", "off", "none"):
        return None
    path, colon, size = text.strip().rpartition(":")
    if not colon or not path:
        raise ValueError(f"{text!r} is not of the form DIR:SIZE, such as /var/lib/pdserve:200GiB")
    try:
        found = _positive(units.parse_size)(size)
    except ValueError as error:
        raise ValueError(f"{error}; write DIR:SIZE, such as {path}:200GiB") from None
    return DiskKv(str(_path(path)), found)


def _show_disk_kv(disk: DiskKv | None) -> str:
    return "off" if disk is None else f"{disk.path}:{units.format_size(disk.size)}"


_port = functools.partial(units.parse_count, least=0, most=65535)


_priority = functools.partial(units.parse_count, least=-(2**31), most=2**31 - 1)


def _show_pairs(pairs: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in pairs.items())


OPTIONS: tuple[Option, ...] = (
    _text(
        "model",
        "worker.model",
        "model",
        "Directory in Hugging Face layout, or hub model organisation/name[@revision].",
        "MODEL",
        "bundled",
    ),
    Option(
        "served-model-name",
        "worker.served_model_name",
        "model",
        "Name that clients ask for; further names, separated by commas, are aliases.",
        "NAME[,…]",
        _filled(units.parse_list),
        ",".join,
        "the model's own",
    ),
    Option(
        "lora",
        "worker.loras",
        "model",
        "LoRA adapter of the model, served under this name; may be repeated. The directory has "
        "adapter_config.json and the adapter's weights.",
        "NAME=DIR",
        _pairs,
        _show_pairs,
        "none",
        many=True,
    ),
    _text(
        "download-dir",
        "worker.download_dir",
        "model",
        "Directory for hub models.",
        "DIR",
        "Hugging Face cache",
    ),
    _count(
        "max-model-len",
        "worker.max_model_len",
        "model",
        "Maximum prompt and output tokens of a request together; auto: the checkpoint's limit.",
        auto=True,
    ),
    _text(
        "tool-parser",
        "worker.tool_parser",
        "model",
        "Format of the model's tool calls: a name from docs/tools.md, such as hermes or kimi_k2, "
        "or module:attribute, which frontends must be given, too; none: it makes no calls; auto: "
        "read it from the chat template.",
        "NAME",
        imports=True,
    ),
    _text(
        "reasoning-parser",
        "worker.reasoning_parser",
        "model",
        "How the model marks its reasoning: a name from docs/tools.md, such as think or harmony, "
        "or module:attribute, which frontends must be given, too; none: it does not; auto: read it "
        "from the chat template.",
        "NAME",
        imports=True,
    ),
    _text(
        "chat-template",
        "worker.chat_template",
        "model",
        "File with a chat template that replaces the model's default one.",
        "FILE",
        "the model's",
    ),
    Option(
        "pooling",
        "worker.pooling",
        "model",
        "How /v1/embeddings pools: mean (of all tokens), last (token) or none; auto: as the "
        "model's files say.",
        "NAME",
        _choice(*POOLINGS),
    ),
    _text("host", "frontend.host", "server", "Address to listen on.", "HOST"),
    Option(
        "port",
        "frontend.port",
        "server",
        "TCP port; 0 lets the system choose one.",
        "PORT",
        _port,
    ),
    Option(
        "metrics-port",
        "process.metrics_port",
        "server",
        "Serve /live, /health and /metrics on this port too, without API keys.",
        "PORT",
        _optional(_port),
        unset="none",
    ),
    _text(
        "metrics-host",
        "process.metrics_host",
        "server",
        "Address that --metrics-port listens on, for probes and scrapes from other machines.",
        "HOST",
        "as --host",
    ),
    Option(
        "metrics-names",
        "process.metrics_names",
        "server",
        "Names on /metrics: pdserve, vllm (vLLM's names for the same numbers), or both. "
        "/metrics?names=vllm asks for them, too.",
        "NAMES",
        _choice(*METRIC_NAMES),
    ),
    _count(
        "frontends",
        "process.frontends",
        "server",
        "Frontend processes that share the port; limits, also those of keys, hold for each of "
        "them.",
        most=256,
    ),
    _switch(
        "with-router",
        "process.with_router",
        "server",
        "Give each frontend process a router of its own, which it asks before all others.",
    ),
    Option(
        "slo-ttft",
        "frontend.slo_ttft",
        "server",
        "A request whose first token comes within this time is good in pdserve_slo_total: for all "
        "models, or for one; may be repeated.",
        "[MODEL=]TIME",
        _slo_times,
        _show_slo_times,
        "none",
        many=True,
    ),
    Option(
        "slo-itl",
        "frontend.slo_itl",
        "server",
        "The same for the mean time between a request's tokens.",
        "[MODEL=]TIME",
        _slo_times,
        _show_slo_times,
        "none",
        many=True,
    ),
    _count("backlog", "frontend.backlog", "server", "Connections that may wait to be accepted."),
    _text(
        "engine",
        "worker.engine",
        "engine",
        "torch, vllm, tensorrt_llm, sglang, sim (a timing model, to try out clusters), instant (no "
        "compute, to measure everything else), or module:attribute.",
        "NAME",
        imports=True,
    ),
    Option(
        "engine-option",
        "worker.engine_options",
        "engine",
        "Option of this engine; may be repeated. The error for a wrong name lists the right ones.",
        "NAME=VALUE",
        _pairs,
        _show_pairs,
        "none",
        many=True,
    ),
    _text("device", "worker.device", "engine", "auto, cpu, cuda or cuda:N.", "DEVICE"),
    Option(
        "dtype",
        "worker.dtype",
        "engine",
        "auto, float32 or bfloat16; auto is float32 on a CPU, else the checkpoint's.",
        "TYPE",
        _choice("auto", "float32", "bfloat16"),
    ),
    _count(
        "threads",
        "worker.threads",
        "engine",
        "Compute threads; auto: what CPU affinity, control groups and Slurm allow.",
        auto=True,
        most=1024,
    ),
    _count(
        "tp",
        "worker.tensor_parallel",
        "engine",
        "Processes that compute the model together on this host, each with a part of its "
        "weights and KV heads; engine torch. sim: pools among which KV heads are divided. vllm: "
        "--engine-option tensor_parallel_size=N.",
        most=MOST_RANKS,
    ),
    Option(
        "mode",
        "worker.mode",
        "engine",
        "What a worker does: prefill workers compute prompts for decode workers, decode "
        "workers take requests, aggregated workers do both themselves.",
        "MODE",
        _choice(*MODES),
    ),
    _switch(
        "aggregated",
        "process.aggregated",
        "engine",
        "All in one: run one aggregated worker instead of a prefill worker and a decode worker.",
    ),
    Option(
        "disagg",
        "worker.disagg",
        "engine",
        "When a decode worker has a prompt prefilled remotely: rule (long prompt, short "
        "queue), predict (when the first token comes sooner), always, never.",
        "HOW",
        _choice(*DISAGG),
    ),
    Option(
        "disagg-min-tokens",
        "worker.disagg_min_tokens",
        "engine",
        "With rule: only prompts with more uncached tokens than this; 0: all.",
        "N",
        functools.partial(units.parse_count, least=0),
    ),
    Option(
        "disagg-max-queue",
        "worker.disagg_max_queue",
        "engine",
        "With rule: only while at most this many requests wait for a prefill worker.",
        "N",
        functools.partial(units.parse_count, least=0),
    ),
    Option(
        "itl-target",
        "worker.itl_target",
        "engine",
        "Target time between two tokens of a stream: engines torch and sim compute less of "
        "prompts beside it, and a slower worker asks to move some requests to others.",
        "TIME",
        lambda text: 0.0 if text.strip().lower() == "off" else units.parse_duration(text),
        units.format_duration,
        "off",
    ),
    Option(
        "transfer",
        "worker.transfer_backend",
        "engine",
        "KV transfer backend: rdma, shm, cuda_ipc, tcp; auto: the best that both workers have.",
        "HOW",
        _choice(*TRANSFERS),
    ),
    Option(
        "verify-kv",
        "worker.verify_kv",
        "engine",
        "How much of the received KV is compared with what was sent: all, sample, off. In "
        "device memory cuda_ipc can compare and rdma cannot, so all excludes rdma there.",
        "HOW",
        _choice(*VERIFY),
    ),
    Option(
        "rdma-device",
        "worker.rdma_devices",
        "engine",
        "RDMA adapters to use, optionally with port and GID index; the first one pairs with "
        "the first one of other workers.",
        "NAME[:PORT[:GID]][,…]",
        _filled(units.parse_list),
        ",".join,
        "all",
    ),
    Option(
        "rdma-traffic-class",
        "worker.rdma_traffic_class",
        "engine",
        "RoCE traffic class, four times the DSCP; it marks the traffic that is lossless.",
        "N",
        functools.partial(units.parse_count, least=0, most=255),
    ),
    _count("block-size", "worker.block_size", "engine", "Tokens per KV block; a power of two."),
    _size(
        "kv-memory",
        "worker.kv_memory",
        "engine",
        "Memory for KV blocks; auto: a quarter of what a host has free, or what a GPU has left.",
        auto=True,
    ),
    Option(
        "gpu-memory-utilization",
        "worker.gpu_memory_utilization",
        "engine",
        "Fraction of a GPU's memory that this process may take; workers that share a GPU "
        "divide it.",
        "SHARE",
        units.parse_share,
        "{:g}".format,
    ),
    _switch(
        "prefix-cache",
        "worker.prefix_cache",
        "engine",
        "Reuse the KV of prompts that begin with the same tokens.",
    ),
    _count(
        "max-batch-tokens",
        "worker.max_batch_tokens",
        "engine",
        "Maximum tokens per step; fewer shorten the gaps between a stream's tokens.",
    ),
    _count(
        "max-sequences",
        "worker.max_sequences",
        "engine",
        "Maximum number of sequences running at once.",
    ),
    _duration(
        "start-timeout",
        "worker.start_timeout",
        "engine",
        "Give up if the engine is not ready after this long, not counting downloads.",
    ),
    Option(
        "stall-timeout",
        "worker.stall_timeout",
        "engine",
        "Restart an engine that has work and makes no progress for this long; 0: never.",
        "TIME",
        units.parse_duration,
        units.format_duration,
    ),
    Option(
        "canary-interval",
        "worker.canary_interval",
        "engine",
        "Let an engine that was idle for this long compute one token as a self-test; 0: never.",
        "TIME",
        units.parse_duration,
        units.format_duration,
    ),
    Option(
        "host-kv",
        "worker.host_kv",
        "tiers",
        "Host memory for KV that the device evicts; auto: 60% of what is free, less if the device "
        "computes in host memory itself.",
        "SIZE",
        _host_kv,
        _show_host_kv,
    ),
    Option(
        "disk-kv",
        "worker.disk_kv",
        "tiers",
        "Directory for KV that host memory evicts, and the most it may take there. It is found "
        "again after a restart.",
        "DIR:SIZE",
        _disk_kv,
        _show_disk_kv,
    ),
    Option(
        "kv-fetch",
        "worker.kv_fetch",
        "tiers",
        "When a worker fetches a prefix from another one: auto (when that is predicted to be "
        "sooner than to compute it), always (whenever it can), never.",
        "HOW",
        _choice(*KV_FETCH),
    ),
    Option(
        "host-kv-admission",
        "worker.host_kv_admission",
        "tiers",
        "What host memory takes in: all, reused (only blocks that were used again or belong to a "
        "conversation), auto (all, unless blocks stay too short a time).",
        "HOW",
        _choice(*ADMISSIONS),
    ),
    Option(
        "disk-kv-admission",
        "worker.disk_kv_admission",
        "tiers",
        "What the disk takes in: all, reused, auto (all while the write budget has credit).",
        "HOW",
        _choice(*ADMISSIONS),
    ),
    _size(
        "disk-kv-write-budget",
        "worker.disk_kv_write_budget",
        "tiers",
        "Most bytes that are written to disk in a day; auto: the size of the disk tier.",
        auto=True,
    ),
    Option(
        "kv-turn-bonus",
        "worker.kv_turn_bonus",
        "tiers",
        "How much younger a conversation's blocks count, for each of up to 4 earlier turns; 0: "
        "plain LRU.",
        "TIME",
        units.parse_duration,
        units.format_duration,
    ),
    _count(
        "max-waiting",
        "worker.max_waiting",
        "limits",
        "Maximum requests waiting for the engine; one more gets a 429.",
    ),
    _count(
        "max-in-flight",
        "frontend.max_in_flight",
        "limits",
        "Maximum generation requests at once; one more gets a 429.",
    ),
    _duration(
        "request-timeout",
        "frontend.request_timeout",
        "limits",
        "Time from a request's last byte to its last token; then 504.",
    ),
    _duration(
        "header-wait",
        "frontend.header_wait",
        "limits",
        "How long a stream's headers wait for its first token; then they are sent without it.",
    ),
    _count(
        "max-connections",
        "frontend.max_connections",
        "limits",
        "Maximum open connections; for one more, an idle one is closed.",
    ),
    _size("max-body", "frontend.max_body", "limits", "Largest request body; beyond it 413."),
    _size(
        "max-buffered",
        "frontend.max_buffered",
        "limits",
        "Memory of all larger request bodies until their prompts are ready; beyond it 429.",
    ),
    _count(
        "max-prompts",
        "frontend.max_prompts",
        "limits",
        "Maximum prompts in one completion request.",
    ),
    _count(
        "max-choices",
        "frontend.max_choices",
        "limits",
        "Maximum prompts times n of one request.",
        most=MAX_CHOICES,
    ),
    Option(
        "allowed-media-domains",
        "frontend.allowed_media_domains",
        "limits",
        "Hosts, separated by commas, from which images may be fetched; * is every public one.",
        "NAME[,…]",
        _host_names,
        ",".join,
        "none: images come inside of requests",
    ),
    _count(
        "max-images",
        "frontend.max_images",
        "limits",
        "Maximum images of one request; a model may take fewer.",
    ),
    _size("max-image-bytes", "frontend.max_image_bytes", "limits", "Largest file of an image."),
    _count(
        "max-image-pixels", "frontend.max_image_pixels", "limits", "Maximum pixels of one image."
    ),
    _size(
        "max-image-memory",
        "frontend.max_image_memory",
        "limits",
        "Memory of all images of running requests; beyond it 429.",
    ),
    _duration(
        "image-fetch-timeout",
        "frontend.image_fetch_timeout",
        "limits",
        "Time for an image to arrive from its URL, with redirects.",
    ),
    _size(
        "max-header-line", "frontend.max_header_line", "limits", "Longest header line of a request."
    ),
    _count("max-headers", "frontend.max_headers", "limits", "Maximum headers of one request."),
    _duration(
        "header-timeout",
        "frontend.header_timeout",
        "limits",
        "Time for a connection's first byte, and for a request's headers; then it is closed.",
    ),
    _duration(
        "body-timeout",
        "frontend.body_timeout",
        "limits",
        "Time for a request's body to arrive; then 408.",
    ),
    _duration(
        "keepalive-timeout",
        "frontend.keepalive_timeout",
        "limits",
        "Time after which an idle connection is closed.",
    ),
    _size(
        "max-answer",
        "frontend.max_answer",
        "limits",
        "Memory of one non-streamed answer with logprobs; beyond it 400 or 413.",
    ),
    _size(
        "max-answers",
        "frontend.max_answers",
        "limits",
        "Memory of all such answers together; beyond it the largest ends with 413.",
    ),
    Option(
        "max-priority",
        "frontend.max_priority",
        "limits",
        "Highest priority without an API key, or with a key that sets none; a higher one gets "
        "a 403.",
        "N",
        _optional(_priority),
        lambda value: "any, with a key 0" if value is None else str(value),
    ),
    _size(
        "write-buffer",
        "frontend.write_buffer",
        "limits",
        "Output held for a client that reads too slowly; beyond it the connection is closed.",
    ),
    _duration(
        "write-stall-timeout",
        "frontend.write_stall_timeout",
        "limits",
        "A client that is behind and reads almost nothing for this long is disconnected.",
    ),
    Option(
        "api-keys-file",
        "frontend.api_keys_file",
        "security",
        "TOML file of API keys and their limits; without one the API is open.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    _switch(
        "strict-api",
        "frontend.strict_api",
        "security",
        "Refuse unknown request fields, hosted tools and outputs that do not fit the context.",
    ),
    _switch(
        "trust-request-chat-template",
        "frontend.trust_request_chat_template",
        "security",
        "Accept chat_template in requests; a template is a program.",
    ),
    Option(
        "cors-origins",
        "frontend.cors_origins",
        "security",
        "Origins, separated by commas, whose pages may call the API; * is all.",
        "ORIGIN[,…]",
        _origins,
        ",".join,
        "none",
    ),
    Option(
        "allowed-hosts",
        "frontend.allowed_hosts",
        "security",
        "Host names, separated by commas, that requests may use beside addresses; * is all.",
        "NAME[,…]",
        _host_names,
        ",".join,
        "localhost, --host and this machine's name; all with API keys",
    ),
    Option(
        "listen",
        "cluster.listen",
        "cluster",
        "Address to listen on for other nodes; for all addresses, see --advertise.",
        "HOST:PORT",
        _address,
        unset="127.0.0.1, a router on port 7700",
    ),
    _text(
        "advertise",
        "cluster.advertise",
        "cluster",
        "Address that other nodes dial, if it differs from --listen.",
        "HOST[:PORT]",
        "the address that leads to the first seed",
    ),
    Option(
        "join",
        "cluster.join",
        "cluster",
        "Nodes to join through, separated by commas; one that answers is enough.",
        "HOST:PORT[,…]",
        _filled(_addresses),
        ",".join,
        "none",
    ),
    _text(
        "cluster",
        "cluster.cluster",
        "cluster",
        "Name of the cluster; nodes of others are refused.",
        "NAME",
    ),
    _text(
        "node-name",
        "cluster.node_name",
        "cluster",
        "Name of this node, unique in the cluster.",
        "NAME",
        "role, host and a random word",
    ),
    _text(
        "change",
        "cluster.change",
        "cluster",
        "Id of the planner's change that this worker is the outcome of; what starts workers for a "
        "planner gives it.",
        "ID",
        "none",
    ),
    _text(
        "admin-socket",
        "cluster.admin_socket",
        "cluster",
        "Unix socket of a server without a cluster, for status, top, trace, drain, disagg and "
        "tier; none: without.",
        "PATH",
        "in the user's runtime directory",
    ),
    _text(
        "policy",
        "router.policy",
        "cluster",
        "Routing policy: ttft, least_loaded, kv_load, round_robin, …, or module:attribute.",
        "NAME",
        imports=True,
    ),
    Option(
        "policy-option",
        "router.policy_options",
        "cluster",
        "Option of this policy; may be repeated. The error for a wrong name lists the right ones.",
        "NAME=VALUE",
        _pairs,
        _show_pairs,
        "none",
        many=True,
    ),
    Option(
        "hold-work",
        "router.hold_work",
        "cluster",
        "Requests wait in the router while every worker has this much predicted work; 0: never.",
        "TIME",
        units.parse_duration,
        units.format_duration,
    ),
    _count(
        "kv-copies",
        "router.kv_copies",
        "cluster",
        "Workers that may keep a prefix which they fetch from each other; auto: half of the "
        "model's, at least 2. Further ones let go of it after the request.",
        auto=True,
    ),
    _switch(
        "rebalance",
        "router.rebalance",
        "cluster",
        "Move requests that wait at a worker to another one that can start them sooner.",
    ),
    Option(
        "queue-order",
        "router.queue_order",
        "cluster",
        "Order of a tenant's waiting requests: sjf (least work first, with ageing) or fifo.",
        "ORDER",
        _choice("sjf", "fifo"),
    ),
    _count(
        "hold-limit",
        "router.hold_limit",
        "cluster",
        "Maximum requests of a model that may wait in a router; one more gets a 429.",
    ),
    _duration(
        "remember-models",
        "frontend.remember_models",
        "cluster",
        "How long requests get a 503 after a model's last worker has gone; then a 404.",
    ),
    _duration(
        "router-wait",
        "frontend.router_wait",
        "cluster",
        "How long a request waits for a router when none answers; then 503.",
    ),
    _switch(
        "migration",
        "frontend.migration",
        "cluster",
        "Continue a request whose worker dies, drains or stalls on another worker.",
    ),
    _duration(
        "worker-wait",
        "frontend.worker_wait",
        "cluster",
        "How long a request whose worker is lost waits for another one; then 503.",
    ),
    Option(
        "poison-after",
        "frontend.poison_after",
        "cluster",
        "A request on which this many workers die in a row is not retried; 0: it always is.",
        "N",
        units.parse_count,
    ),
    Option(
        "cluster-key-file",
        "cluster.cluster_key_file",
        "security",
        "Key that the nodes of a cluster share; needed beyond this machine.",
        "FILE",
        _optional(_path),
        unset="your own, made at first use",
    ),
    Option(
        "hash-secret-file",
        "cluster.hash_secret_file",
        "security",
        "Key of the KV block hashes, in place of the one that the nodes agree on.",
        "FILE",
        _optional(_path),
        unset="agreed on",
    ),
    Option(
        "tls-cert",
        "cluster.tls_cert",
        "security",
        "Certificate (PEM) of this node; it encrypts the links between nodes, not the API.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    Option(
        "tls-key",
        "cluster.tls_key",
        "security",
        "Private key of the certificate.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    Option(
        "tls-ca",
        "cluster.tls_ca",
        "security",
        "Require a certificate of this authority from every node.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    Option(
        "log-format",
        "process.log_format",
        "logging",
        "text for people, json for collectors.",
        "FORMAT",
        _choice("text", "json"),
    ),
    Option(
        "trace-sample",
        "frontend.trace_sample",
        "logging",
        "Share of requests whose traces are kept, drawn by lot. Requests that fail, move or miss "
        "their SLO are kept besides.",
        "SHARE",
        functools.partial(units.parse_share, zero=True),
        "{:g}".format,
    ),
    Option(
        "trace-rate",
        "frontend.trace_rate",
        "logging",
        "Most traces that are kept per second and frontend; 0: no traces.",
        "N",
        units.parse_rate,
        "{:g}".format,
    ),
    Option(
        "trace-parent",
        "frontend.trace_parent",
        "logging",
        "What the sampled bit of a client's traceparent does: trust it, limit it to 20 traces per "
        "second, or ignore it.",
        "MODE",
        _choice(*PARENT_MODES),
    ),
    _switch(
        "trace-content",
        "frontend.trace_content",
        "logging",
        "Traces have the text of prompts and answers; with API keys, only of keys that allow it.",
    ),
    Option(
        "log-level",
        "process.log_level",
        "logging",
        f"{', '.join(LEVELS)}; debug also shows tracebacks of failed starts.",
        "LEVEL",
        _choice(*LEVELS),
    ),
    _switch(
        "log-requests",
        "frontend.log_requests",
        "logging",
        "Log one line for each finished request: tokens, worker, times, outcome; never its text.",
    ),
    Option(
        "otlp-endpoint",
        "frontend.otlp_endpoint",
        "logging",
        "Collector that gets the traces of requests, as OTLP/HTTP JSON; /v1/traces is added.",
        "URL",
        lambda text: "" if text.strip().lower() in ("", "none") else traces_url(text),
        without_password,
        "none",
    ),
    Option(
        "agent-slots",
        "agent.slots",
        "agent",
        "Room for workers: cpu=x8 for eight without GPUs, gpu=0,1 for one on each of two GPUs, "
        "gpu=0+1,2+3 for two GPUs each. May be repeated; each name is a kind of worker.",
        "NAME=SLOTS",
        parse_slots,
        show_slots,
        "none",
        many=True,
    ),
    Option(
        "agent-worker",
        "agent.workers",
        "agent",
        "Flags of a kind's workers, besides the worker options of the agent itself, such as "
        "'gpu=--model=/models/a'. A kind gpu/NAME shares the slots of gpu. May be repeated.",
        "KIND=FLAGS",
        parse_workers,
        show_workers,
        "none",
        many=True,
    ),
    _text(
        "agent-dir",
        "agent.directory",
        "agent",
        "Directory of the workers' records and logs, by which a later agent finds them.",
        "DIR",
        "~/.local/state/pdserve/agent/CLUSTER",
    ),
    Option(
        "role",
        "process.role",
        "process",
        "What this process does: all-in-one, frontend, router, worker, planner or agent.",
        "ROLE",
        _choice(*ROLES),
    ),
    Option(
        "planner",
        "process.planner",
        "process",
        "What a planner does: off, advise (it logs and shows plans) or act (it carries them out).",
        "MODE",
        _choice("off", "advise", "act"),
    ),
    Option(
        "planner-file",
        "process.planner_file",
        "process",
        "TOML file with a planner's models, objectives and ways to start workers.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    Option(
        "planner-log",
        "process.planner_log",
        "process",
        "File for a planner's decisions, one line each, besides its log.",
        "FILE",
        _optional(_path),
        unset="none",
    ),
    Option(
        "config",
        "process.config",
        "process",
        "TOML file with any of these options as keys.",
        "FILE",
        _optional(_path),
        unset="./pdserve.toml, ~/.config/pdserve/pdserve.toml",
    ),
    _duration(
        "drain-timeout",
        "frontend.drain_timeout",
        "process",
        "How long a draining process may take to finish its requests or hand them over.",
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}
