"""The frontend's settings: every field with its unit, its effect and the reason for its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Settings of one frontend process."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback: the API is open to whoever reaches it unless keys are set."""
    port: int = 8000
    """TCP port; 0 lets the system choose (`FrontendService.port` tells). 8000 is what vLLM uses."""
    reuse_port: bool = False
    """Share the port with other frontend processes (`--frontends N`); the kernel spreads."""
    group: str = ""
    """What those processes are called together: their numbers are summed. Empty: there is one."""
    backlog: int = 1024
    """Connections the kernel completes before they are accepted; bursts of clients fit."""

    max_connections: int = 4096
    """Open connections at once; for one more, an idle one of the host that has most is closed. An
    eighth of them, at most 64, do no work, so that probes find a place. Each idle one costs about
    20 KiB."""
    max_in_flight: int = 1024
    """Generation requests at once, waiting ones included; one more is answered 429. Four times an
    engine's usual batch: beyond that a client waits longer than it would elsewhere."""
    max_body: Bytes = 16 << 20
    """Largest request body, also after decompression (413). A million tokens of text are ~5 MB."""
    max_buffered: Bytes = 256 << 20
    """Bytes that all bodies may hold together, those under 64 KiB left out: while they arrive, are
    unpacked and decoded, and in decoded form until their prompts are ready; beyond it requests get
    429."""
    max_header_line: Bytes = 8190
    """Longest request line and longest single header (400); what most proxies allow."""
    max_headers: int = 100
    """Headers per request (400)."""
    max_prompts: int = 256
    """Prompts in one completion request (400): each is a submission of its own."""
    max_choices: int = 128
    """Prompts times `n` of one request (400): OpenAI's limit on `n`."""

    header_timeout: Seconds = 15.0
    """From a connection's beginning to its first byte, and from the first byte of a request to its
    last header; then the connection is closed. Long enough for a bad mobile link, short against
    slow-loris."""
    body_timeout: Seconds = 60.0
    """For the whole body to arrive (408)."""
    keepalive_timeout: Seconds = 75.0
    """An idle connection is closed after this; above the usual 60 s of load balancers, so that
    they close first and never race a request against our close."""
    request_timeout: Seconds = 600.0
    """From a request's last byte to its last token (504, naming the stage). OpenAI's SDK gives up
    after 600 s."""
    header_wait: Seconds = 10.0
    """A stream's status and headers wait so long for the first token, which gives them more to say:
    an error its status, the rest who served it. Then they go out as they are, and a comment as
    often. Below the 30 to 60 s after which proxies give a silent server up."""
    router_wait: Seconds = 10.0
    """A request waits this long for a router when there is none (503). All routers that restart at
    once are back sooner on a loaded machine: 2.5 s for the process, 1 s until they are dialled
    again (`GossipConfig.redial_refused`), 0.3 s until they take questions, twice."""
    migration: bool = True
    """A request whose worker dies, drains or stands still goes on at another one. Off: it ends with
    an error, as its client would rather have it, say, who keeps its own copy of what came."""
    worker_wait: Seconds = 30.0
    """A request that a worker has had waits this long for another one when there is none (503): a
    worker that restarts with a model in the page cache is back sooner."""
    poison_after: int = 3
    """A request at which so many workers died, one after another and without a token in between, is
    given to no other (500); 0: it always is. One may die of anything, two by chance."""
    remember_models: Seconds = 300.0
    """A model whose last worker is gone answers 503, not 404, for this long: a worker that restarts
    has loaded by then, or somebody should look."""
    drain_timeout: Seconds = 30.0
    """A process that drains has this long to finish its requests or hand them over; a frontend ends
    the rest with an error, a worker so that frontends send them on. Kubernetes kills after 30 s."""

    write_buffer: Bytes = 1 << 20
    """Bytes held for one connection that reads too slowly, beyond what the kernel holds; then the
    connection is cut. About 100,000 tokens, because held tokens are merged into one chunk."""
    write_stall_timeout: Seconds = 30.0
    """A connection that is behind and takes less than 64 KiB in this time is cut: twice TCP's worst
    usual recovery."""

    max_answer: Bytes = 64 << 20
    """What one answer that is sent whole may gather in memory, logprobs at 128 bytes each; beyond
    it 400 at once if the request asks for it in so many words, else 413 when it is so large. Half
    a million logprobs: four choices of 6,000 tokens with 20 each."""
    max_answers: Bytes = 1 << 30
    """What all such answers with logprobs may gather together; beyond it the largest ends (413)."""
    max_priority: int | None = None
    """The highest `priority` of requests without a key, and of keys without one of their own. None:
    any without a key, 0 with one: whoever hands out keys says who may overtake others."""

    strict_api: bool = False
    """Unknown request fields are a 400 with the nearest name instead of being ignored with a log
    line, and so are tools that would be left out and outputs that would be cut to fit; off, since
    clients send fields and tools of other servers, and ask for more than fits."""
    trust_request_chat_template: bool = False
    """Accept `chat_template` in requests. Off: a template is a program."""
    api_keys_file: Path | None = None
    """TOML file of API keys (docs/api-keys.md); None: no authentication."""
    cors_origins: tuple[str, ...] = ()
    """Origins (or `*`) whose pages may call the API; none: no CORS headers. Without API keys, other
    sites' pages are refused (403): any page could use the server of its reader's machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` that are answered beside addresses, loopback names, `host` and this machine's
    name; `*.name` is all below it, `*` all. Empty: with API keys, all. A page whose name resolves
    to this machine could read everything otherwise (DNS rebinding)."""
    retry_after: Seconds = 1.0
    """What Retry-After says when a bound without a clock of its own is reached."""

    def validate(self) -> None:
        """Errors: `ConfigError` names the field and the remedy."""
        if not 0 <= self.port <= 65535:
            raise ConfigError("port must be between 0 and 65535", param="port")
        if self.poison_after < 0:
            raise ConfigError("poison_after must be 0 (never) or more", param="poison_after")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0", param=name)
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
    *("max_answer", "max_answers"),
)
