"""Configuration of a frontend: each field with its unit, its effect and the reason for its
default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.tracing.export.otel_env import NO_OTEL, OtelSettings
from pdserve.tracing.rules import PARENT_MODES, TraceRules

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds
    from pdserve.tracing.rules import ParentMode


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Settings of one frontend process."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default, because without keys the API is open to every
    client that can connect."""
    port: int = 8000
    """TCP port; 0 lets the system choose (see `FrontendService.port`). 8000 is vLLM's default."""
    reuse_port: bool = False
    """Share the port with other frontend processes (`--frontends N`); the kernel distributes
    connections."""
    group: str = ""
    """Name of the group of those processes, whose metrics are summed. Empty: there is one
    process."""
    backlog: int = 1024
    """Connections that the kernel completes before they are accepted; enough for bursts of
    clients."""

    slo_ttft: Mapping[str, Seconds] = field(default_factory=dict)
    """Seconds from a request's arrival to its first token that count as good, by model; the empty
    name stands for all other models. It is measured only: no request is refused for it."""
    slo_itl: Mapping[str, Seconds] = field(default_factory=dict)
    """The same for the mean time between a request's tokens."""

    parser_modules: frozenset[str] = frozenset()
    """Formats `module:attribute` of tool calls and reasoning that this process was told to load.
    Others that a worker names are not imported."""

    max_connections: int = 4096
    """Most open connections; for one more, an idle one of the host with the most is closed. An
    eighth of them, at most 64, cannot be used for work, so that probes find a place. Each idle one
    costs about 20 KiB."""
    max_in_flight: int = 1024
    """Most generation requests at once, waiting ones included; one more gets a 429. Four times the
    usual batch of an engine: beyond that a client waits longer than it would elsewhere."""
    max_body: Bytes = 16 << 20
    """Largest request body, also after decompression (413). A million tokens of text are ~5 MB."""
    max_buffered: Bytes = 256 << 20
    """Bytes that all bodies may hold together, except those under 64 KiB: while they arrive, are
    decompressed and decoded, and in decoded form until their prompts are ready. Beyond it requests
    get a 429."""
    max_header_line: Bytes = 8190
    """Longest request line and longest single header, in bytes (400); the limit of most proxies."""
    max_headers: int = 100
    """Most headers per request (400)."""
    max_prompts: int = 256
    """Most prompts in one completion request (400): each is a submission of its own."""
    max_choices: int = 128
    """Most choices (prompts times `n`) of one request (400): OpenAI's limit on `n`."""

    header_timeout: Seconds = 15.0
    """Seconds from a connection's start to its first byte, and from the first byte of a request to
    its last header; then the connection is closed. Long enough for a bad mobile link, short against
    slow-loris attacks."""
    body_timeout: Seconds = 60.0
    """Seconds in which the whole body must arrive (408)."""
    keepalive_timeout: Seconds = 75.0
    """Seconds after which an idle connection is closed. Above the usual 60 s of load balancers, so
    that they close first and never send a request while we close."""
    request_timeout: Seconds = 600.0
    """From a request's last byte to its last token (504, naming the stage). OpenAI's SDK gives up
    after 600 s."""
    header_wait: Seconds = 10.0
    """Seconds that a stream's status and headers wait for the first token, which can add an error
    status and the headers about the worker. Then they are sent without it, and a comment as often.
    Below the 30 to 60 s after which proxies give up on a silent server."""
    router_wait: Seconds = 10.0
    """Seconds that a request waits for a router when there is none (503). Routers that all restart
    at once are back sooner, also on a loaded machine: 2.5 s for the process, 1 s until they are
    dialled again (`GossipConfig.redial_refused`), 0.3 s until they take requests, twice."""
    migration: bool = True
    """If true, a request whose worker dies, drains or stalls continues on another one. If false, it
    ends with an error, for clients that prefer to continue themselves from the tokens they have."""
    worker_wait: Seconds = 30.0
    """Seconds that a request which has lost its worker waits for another when there is none (503);
    a worker that restarts with its model in the page cache is back sooner."""
    poison_after: int = 3
    """Number of workers that die while running a request, without a token in between, after which
    it is not retried (500); 0: it always is retried. One worker may die of anything, two by
    chance."""
    remember_models: Seconds = 300.0
    """Seconds for which a model whose last worker is gone gets a 503 instead of a 404: a restarting
    worker has loaded by then, or an operator should look."""
    drain_timeout: Seconds = 30.0
    """Seconds that a draining process has to finish its requests or hand them over. Then a frontend
    ends the rest with an error, and a worker ends them so that frontends migrate them. Kubernetes
    kills after 30 s."""

    write_buffer: Bytes = 1 << 20
    """Most bytes held for one connection that reads too slowly, beyond the kernel's buffers; then
    the connection is closed. About 100,000 tokens, because held tokens are merged into one
    chunk."""
    write_stall_timeout: Seconds = 30.0
    """Seconds; a connection that is behind and takes less than 64 KiB in this time is closed. Twice
    TCP's worst usual recovery."""

    max_answer: Bytes = 64 << 20
    """Most bytes that one non-streamed answer may hold in memory, with logprobs at 128 bytes each.
    Beyond it: 400 at once if the request asks for that much explicitly, else 413 when the limit is
    reached. Half a million logprobs: four choices of 6,000 tokens with 20 each."""
    max_answers: Bytes = 1 << 30
    """Most bytes that all such answers with logprobs may hold together; beyond it the largest one
    ends (413)."""
    max_priority: int | None = None
    """Highest `priority` of requests without a key, and of keys without a limit of their own. None:
    any without a key, 0 with one, because the operator who issues keys decides about priority."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images of requests are fetched, by http or https; `*.name` is everything
    below it, `*` every host. Their addresses must be public in any case. Empty: none, images come
    as `data:` URLs, because a server that fetches what clients say is a door into its network."""
    max_images: int = 16
    """Most images of one request (400). A model may take fewer."""
    max_image_bytes: Bytes = 20 << 20
    """Largest file of an image (400): OpenAI's limit."""
    max_image_pixels: int = 64_000_000
    """Most pixels of one image (400): each takes 3 bytes of the worker's memory, whatever the
    size of its file. Cameras of phones make 50 million."""
    max_image_memory: Bytes = 512 << 20
    """Bytes that the images of all requests may hold together, until their requests end; beyond it
    requests with images get a 429."""
    image_fetch_timeout: Seconds = 5.0
    """Seconds in which an image must arrive from its URL, with all redirects (400); vLLM's
    default."""

    trace_sample: float = 0.01
    """Share of requests, drawn by lot, whose traces are kept (docs/tracing.md). Requests that fail,
    move or miss their SLO are kept besides."""
    trace_rate: float = 50.0
    """Most traces that are kept per second, for whatever reason; 0: no traces. Building a trace
    costs some 30 us, so 50 cost 0.2 % of a core."""
    trace_parent: ParentMode = "limit"
    """What the sampled bit of a client's `traceparent` does: `trust` it, `limit` it to 20 traces
    per second, or `ignore` it. Limited, because any client can send it."""
    log_requests: bool = False
    """If true, each finished request has one line in the log (docs/operations.md). Off, because it
    is as much log as there are requests: some 600 bytes each."""
    otlp_endpoint: str = ""
    """URL to which traces are posted as OTLP/HTTP JSON. Empty: they stay in this process's memory,
    where `pdserve trace` finds the last ones."""
    otel: OtelSettings = NO_OTEL
    """OpenTelemetry's environment variables: what the export needs besides the URL."""
    trace_content: bool = False
    """If true, traces have the first 4,096 characters of prompt and answer. With API keys, only for
    keys whose `trace_content` is true. Off, since traces go where the operator's other data
    goes."""

    strict_api: bool = False
    """If true, these get a 400: unknown request fields (with the nearest name), tools that would be
    left out, and outputs that would be cut to fit. If false, they are ignored or cut, with a log
    line. Off, since clients send fields and tools of other servers and ask for more than fits."""
    trust_request_chat_template: bool = False
    """If true, `chat_template` is accepted in requests. Off, because a template is a program."""
    api_keys_file: Path | None = None
    """TOML file of API keys (docs/api-keys.md); None: no authentication."""
    cors_origins: tuple[str, ...] = ()
    """Origins (or `*`) whose pages may call the API; empty: no CORS headers. Without API keys,
    pages of other sites get a 403, because any page could use the server on its reader's
    machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Names allowed in `Host`, beside addresses, loopback names, `host` and this machine's name;
    `*.name` is everything below it, `*` everything. Empty: with API keys, all. Otherwise a page
    whose name resolves to this machine could read everything (DNS rebinding)."""
    retry_after: Seconds = 1.0
    """Seconds in Retry-After for a limit that has no time of its own."""

    @property
    def trace_rules(self) -> TraceRules:
        """Which requests are traced."""
        return TraceRules(sample=self.trace_sample, rate=self.trace_rate, parent=self.trace_parent)

    def validate(self) -> None:
        """Errors: `ConfigError` names the field and the remedy."""
        if not 0 <= self.port <= 65535:
            raise ConfigError("port must be between 0 and 65535", param="port")
        if not 0 <= self.trace_sample <= 1:
            raise ConfigError(
                "trace_sample must be a share between 0 and 1, such as 0.01", param="trace_sample"
            )
        if not self.trace_rate >= 0:
            raise ConfigError(
                "trace_rate must be 0 (no traces) or more per second", param="trace_rate"
            )
        if self.trace_parent not in PARENT_MODES:
            raise ConfigError(
                f"trace_parent must be one of {', '.join(PARENT_MODES)}", param="trace_parent"
            )
        if self.poison_after < 0:
            raise ConfigError("poison_after must be 0 (never) or more", param="poison_after")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0", param=name)
        for name in self.allowed_media_domains:
            if "/" in name or ":" in name:
                raise ConfigError(
                    f"allowed_media_domains: {name!r} is not a name; write it without scheme and "
                    "port",
                    param="allowed_media_domains",
                )
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ConfigError(
                    f"cors_origins: {origin!r} is not an origin; write https://host or *",
                    param="cors_origins",
                )
        for name in self.allowed_hosts:
            if "/" in name or ":" in name:
                raise ConfigError(
                    f"allowed_hosts: {name!r} is not a name; write it without scheme and port",
                    param="allowed_hosts",
                )


_POSITIVE = (
    *("backlog", "max_connections", "max_in_flight", "max_body", "max_buffered"),
    *("max_header_line", "max_headers", "max_prompts", "max_choices", "header_timeout"),
    *("body_timeout", "keepalive_timeout", "request_timeout", "drain_timeout", "write_buffer"),
    *("write_stall_timeout", "retry_after", "router_wait", "remember_models", "header_wait"),
    "worker_wait",
    *("max_images", "max_image_bytes", "max_image_pixels", "max_image_memory"),
    "image_fetch_timeout",
    *("max_answer", "max_answers"),
)
