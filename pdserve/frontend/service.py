"""Runs the frontend: starts and stops its sockets and tasks.

Owns what lives as long as the process role: the listening socket, the connections, the text pool,
the keys, the sweep. Other files make the decisions.

Shutdown order: new requests are refused (503), running ones may finish within the drain timeout,
the rest get an error, then everything is closed. `undo_stop` takes that back, even after its end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import time
from random import Random
from typing import TYPE_CHECKING

from pdserve.clock import SystemClock, until_next
from pdserve.errors import ConfigError, Draining
from pdserve.frontend.access.api_keys import MIN_KEY_LENGTH, KeyRing, parse_keys
from pdserve.frontend.access.trusted_hosts import TrustedHosts
from pdserve.frontend.active_requests import ActiveRequests
from pdserve.frontend.api.app import Api
from pdserve.frontend.api.ollama_endpoints import OllamaEndpoints
from pdserve.frontend.api.route_explain import RouteExplainer
from pdserve.frontend.api.utility_endpoints import UtilityEndpoints
from pdserve.frontend.generation import GenerationHandler
from pdserve.frontend.http.body_reader import BodyReader
from pdserve.frontend.http.connection import ConnectionServer
from pdserve.frontend.http.cors import Cors
from pdserve.frontend.http.last_connections import end_backlog
from pdserve.frontend.model_registry import ModelRegistry
from pdserve.frontend.preprocess.prompt_hashes import NO_HASHING, PromptHasher
from pdserve.frontend.request_log import RequestLog
from pdserve.frontend.request_traces import RequestTraces
from pdserve.net.timers import Timers
from pdserve.observe.metrics import Metrics
from pdserve.observe.scrapes import CachedPages
from pdserve.observe.slo import SloTable
from pdserve.runtime.paced_timer import PacedTimer
from pdserve.text.text_pool import TextPool, TextPoolStats
from pdserve.tracing.sink import NO_SINK
from pdserve.tracing.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pdserve.frontend.config import FrontendConfig
    from pdserve.frontend.dispatch.backend import Backend
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.observe.degraded import Degradations
    from pdserve.observe.scrapes import ScrapeHandler
    from pdserve.tracing.sink import TraceSink

logger = logging.getLogger("pdserve.frontend")

SWEEP: Seconds = 1.0
"""Seconds between two sweeps of connection deadlines, and between two checks for new models."""
_REST: Seconds = 30.0
"""Most seconds between two looks at the served models while no member or model changes."""
_LAST_WORDS: Seconds = 2.0
"""Seconds for error responses to reach their clients before connections are closed."""
_LET_IN: Seconds = 10.0
"""Most seconds in which the backlog is accepted. Its end comes much sooner on an idle machine."""
_FIRST_WORDS: Seconds = 0.5
"""Seconds for a request to arrive on a connection that was opened just before the end."""
_TURNS = 3
"""Turns of the event loop in which one connection of the backlog is accepted, if there is one."""


class FrontendService:
    """One frontend. `start`, then `stop`; both on the same event loop."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        metrics: Metrics | None = None,
        degraded: Mapping[str, str] | None = None,
        pages: ScrapeHandler | None = None,
        naming: PromptHasher = NO_HASHING,
        degradations: Degradations | None = None,
        traces: TraceSink = NO_SINK,
    ) -> None:
        """Args: `degraded` is a live view of reasons, shown by `/health`; `pages` answers
        `/metrics`, by default with `metrics`; `naming` computes the block hashes of prompts;
        `degradations` receives the degradations of this frontend; `traces` takes the traces that
        are kept.

        Errors: `ConfigError` for settings that cannot work.
        """
        config.validate()
        self.config = config
        self.metrics = metrics if metrics is not None else Metrics()
        self.metrics.set_objectives(SloTable(config.slo_ttft, config.slo_itl))
        self._backend = backend
        self._naming = naming
        self._degradations = degradations
        self._degraded = degraded if degraded is not None else {}
        self._pages = pages if pages is not None else self.metrics
        self.tracer = Tracer(
            config.trace_rules,
            traces,
            time=time.monotonic,
            random=Random(),  # seeded by the system
            wall=time.time_ns,
            on_kept=lambda reason: self.metrics.traces_kept.labels(reason).inc(),
            on_limited=lambda limit: self.metrics.traces_limited.labels(limit).inc(),
        )
        """Traces this frontend's requests."""
        self._port = config.port
        self._listener: asyncio.Server | None = None
        self._closing: asyncio.Task[None] | None = None
        """Closes everything; None before that."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.on_second: Callable[[], None] = lambda: None
        """Called about once a second after `start`, less often without connections; must be quick
        and must not raise."""

    @property
    def port(self) -> int:
        """The port it listens on; known after `start`."""
        return self._port

    @property
    def listening(self) -> bool:
        """True between `start` and `stop`."""
        return self._listener is not None

    @property
    def active_requests(self) -> int:
        """Requests with a body in progress, including those whose bodies are arriving."""
        return len(self._active_requests.active) if self.listening else 0

    @property
    def connections(self) -> int:
        """Open client connections."""
        return self._server.open_connections if self.listening else 0

    async def start(self) -> None:
        """Starts to listen, after `stop` on the same port. Requests get a 503 until the backend is
        ready.

        Errors: `ConfigError` when the address cannot be used or the key file is wrong.
        """
        config, metrics = self.config, self.metrics
        loop = asyncio.get_running_loop()
        self._loop, self._closing = loop, None
        keys = self._read_keys()
        self._pool = TextPool()
        self._pool.on_stuck = self._note_stuck
        self._models = ModelRegistry(self._backend, self._pool, config.parser_modules)
        self._models.on_difference = self._note_difference
        self._bodies = bodies = BodyReader(config)
        self._active_requests = active_requests = ActiveRequests(config, bodies, SystemClock().now)
        traces = RequestTraces(
            self.tracer,
            SloTable(config.slo_ttft, config.slo_itl),
            loop.call_soon,
            content=config.trace_content,
            on_lost=metrics.traces_lost.inc,
        )
        self._generations = GenerationHandler(
            config,
            self._backend,
            self._models,
            self._pool,
            active_requests,
            metrics,
            self._naming,
            traces=traces,
        )
        small = UtilityEndpoints(
            config,
            self._backend,
            self._models,
            self._pool,
            active_requests,
            metrics,
            loop.time,
            self._degraded,
            CachedPages(self._pages, loop.time),
        )
        explanations = RouteExplainer(self._backend, active_requests, self._generations)
        cors = Cors(config.cors_origins)
        visitors = TrustedHosts(config)
        self._api = Api(
            self._generations,
            active_requests,
            explanations,
            small,
            metrics,
            keys,
            cors,
            visitors,
            OllamaEndpoints(
                config, self._backend, self._models, active_requests, self._generations, metrics
            ),
            traces,
            RequestLog(SystemClock().now) if config.log_requests else None,
        )
        self._server = ConnectionServer(self._api.handle, config, metrics)
        metrics.http_requests_in_flight.read_from(lambda: self.active_requests)
        metrics.http_connections.read_from(lambda: self._server.open_connections)
        try:
            self._listener = await self._listen(loop)
        except BaseException:
            await self._generations.images.close()
            await self._bodies.close()
            await self._pool.close()
            raise
        self._port = self._listener.sockets[0].getsockname()[1]
        self._timers = Timers(loop)
        self._sweeps = PacedTimer(self._timers, SWEEP, self._sweep)
        self._server.on_accepted = self._wake
        self._sweeps.start()
        self._tasks = (loop.create_task(self._prepare_forever(), name="frontend-models"),)

    def check_port(self) -> None:
        """Checks, before the first of several processes starts, that no other program listens on
        the shared port; sharing would hide that.

        Errors: `ConfigError` if one does.
        """
        host, port = self.config.host, self.config.port
        if not port:
            return
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(address)
        except (OSError, OverflowError) as error:
            raise _cannot_listen(host, port, error) from None

    async def make_models(self) -> None:
        """Prepares every served model's tokenizer and templates now instead of later.

        Errors: `ConfigError` names a model that cannot be served.
        """
        for card in {id(card): card for card in self._backend.cards().values()}.values():
            try:
                await self._models.get(card)
            except ConfigError as error:
                raise ConfigError(
                    f"model {card.name!r} cannot be served: {error.message}"
                ) from None

    async def usable_model(self) -> ModelCard | None:
        """Prepares the served models and returns one that can be used; None if none can. Models
        that cannot be prepared are logged."""
        self._begin_metrics()
        await self._models.prepare()
        served = self._backend.cards().values()
        return next((c for c in served if self._models.get_nowait(c) is not None), None)

    async def stop(self, drain_timeout: Seconds | None = None) -> None:
        """Shuts down in order; returns when every connection is closed. Idempotent.

        Args: `drain_timeout` replaces the configured one. Cancellation: requests go on, and new
        ones are refused still, until `stop` or `undo_stop`. What is being closed already will be.
        """
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._listener is None:
            return
        timeout = self.config.drain_timeout if drain_timeout is None else drain_timeout
        self._active_requests.draining = True
        # Other processes on this port take new connections; this one would only refuse the
        # requests.
        if self.config.reuse_port:
            await self._let_in(self._listener)
            self._listener.close()
        await self._wait_idle(timeout)
        left = tuple(self._active_requests.active)
        for active in left:
            active.fail(Draining("the server is shutting down", retry_after=1.0))
        if left:
            logger.warning("%d requests did not finish within %g s", len(left), timeout)
            await self._wait_idle(_LAST_WORDS)
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="frontend-close")
        await asyncio.shield(self._closing)

    async def undo_stop(self) -> None:
        """Takes requests again, after a `stop` that was cancelled or has ended. Idempotent.

        Errors: as `start`, where everything was closed.
        """
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._listener is None:
            await self.start()
            return
        if not self._listener.is_serving():
            self._listener = await self._listen(self._loop)
        self._active_requests.draining = False

    def reload_api_keys(self) -> None:
        """Reads the key file again; requests in progress keep their limits. Does nothing before
        `start`.

        Errors: `ConfigError`; the old keys then stay in force.
        """
        if not self.listening:
            return
        self._api.keys = self._read_keys()
        self._active_requests.admission.forget_keys()

    # ------------------------------------------------------------------ inside

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        config = self.config
        try:
            return await loop.create_server(
                self._server,
                config.host,
                self._port,
                backlog=config.backlog,
                reuse_port=config.reuse_port or None,
            )
        except (OSError, OverflowError) as error:
            raise _cannot_listen(config.host, self._port, error) from None

    def _wake(self) -> None:
        """A connection has come: after a rest a sweep is due before its request counts."""
        if self._sweeps.wake():
            _ = self._sweep()

    def _sweep(self) -> bool:
        """Enforces the deadlines of connections. Returns True if there are connections."""
        try:
            self._server.sweep(self._loop.time())
            self.on_second()
        except Exception:
            logger.exception("a sweep failed")
        return self._server.open_connections > 0

    async def _prepare_forever(self) -> None:
        """Prepares the tokenizers of new models, however long one takes."""
        while True:
            await asyncio.sleep(until_next(self._loop.time(), SWEEP))
            try:
                self._begin_metrics()
                done = await self._models.prepare()
            except Exception:
                logger.exception("a model could not be prepared")
            else:
                if done:
                    await self._backend.wait_change(timeout=_REST)

    def _begin_metrics(self) -> None:
        """Lets each served model's metrics begin with 0: the first requests of a series that was
        not there are no increase to Prometheus, and autoscalers want a number."""
        for card in self._backend.cards().values():
            self.metrics.of_model(card.name)

    async def _wait_idle(self, timeout: Seconds) -> None:
        """Waits until no generation is in progress, for `timeout` seconds at most."""
        deadline = self._loop.time() + timeout
        while self._active_requests.active and self._loop.time() < deadline:
            await asyncio.wait(
                [active.task for active in self._active_requests.active],
                timeout=deadline - self._loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        assert listener is not None
        await self._let_in(listener)
        listener.close()
        await self._hear_out()
        self._timers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.pre_shutdown()
        await self._server.shutdown(_LAST_WORDS)
        self._server.abort_all()
        await self._generations.images.close()
        await self._models.close()
        await self._bodies.close()
        await self._pool.close()

    async def _let_in(self, listener: asyncio.Server) -> None:
        """Accepts the connections in the backlog, since closing the listener would reset them;
        clients that connect later are refused and can retry."""
        for listening in listener.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as door:
                end_backlog(door)
        # A loop may accept one connection per turn, and a busy machine makes turns long.
        until, seen = self._loop.time() + _LET_IN, -1
        while self._server.accepted != seen and self._loop.time() < until:
            seen = self._server.accepted
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _hear_out(self) -> None:
        """Waits a moment for first requests that are still on their way, so that they get an
        answer."""
        until = self._loop.time() + _FIRST_WORDS
        while self._server.unheard and self._loop.time() < until:  # noqa: ASYNC110  no event
            await asyncio.sleep(_FIRST_WORDS / 20)

    def _note_stuck(self, text: TextPoolStats) -> None:
        """Reports that text jobs which took too long were given up, or that their threads have
        ended."""
        self.metrics.text_jobs_given_up.value = text.given_up
        self.metrics.text_threads_stuck.value = text.stuck
        if self._degradations is None:
            return
        if text.stuck:
            self._degradations.add(
                "text_stuck",
                "work on a request's text did not end in time; other threads took over. If it "
                "stays so, restart this process and report the request",
            )
        else:
            self._degradations.clear("text_stuck")

    def _note_difference(self, detail: str) -> None:
        """Reports that a model's texts are encoded slowly."""
        if self._degradations is not None:
            self._degradations.add("tokenizer_differs", detail)

    def _read_keys(self) -> KeyRing | None:
        path = self.config.api_keys_file
        if path is None:
            return None
        return read_api_keys(path)


def read_api_keys(path: Path) -> KeyRing:
    """Reads the key file. Errors: `ConfigError` names the file, the line and the remedy."""
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"--api-keys-file {path} cannot be read: {error.strerror}; docs/api-keys.md says what "
            "is in it",
            param="api_keys_file",
        ) from None
    keys = parse_keys(data, str(path))
    _check_access(path, mode, keys)
    for number in keys.short:
        logger.warning(
            "%s, key %d: it has fewer than %d characters and could be guessed; draw one with "
            "`openssl rand -hex 32`",
            *(path, number, MIN_KEY_LENGTH),
        )
    return keys


def _check_access(path: Path, mode: int, keys: KeyRing) -> None:
    """Checks the file's permissions. Errors: `ConfigError` if other users can read its keys, or
    change it."""
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        what = "others can change it"
    elif keys.in_clear and mode & (stat.S_IRGRP | stat.S_IROTH):
        what = "others can read its keys"
    else:
        return
    remedy = "" if not keys.in_clear else ", or let it hold 'key_sha256' only"
    raise ConfigError(
        f"{path} has mode {stat.S_IMODE(mode):04o}: {what}; do `chmod 600 {path}`{remedy}",
        param="api_keys_file",
    )


def _cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """The error for an address that cannot be used: cause and remedy, without asyncio's repetition
    of the address."""
    number = error.errno if isinstance(error, OSError) else None
    cause = os.strerror(number) if number is not None and number > 0 else error
    # Errors of name resolution have negative numbers.
    of_port = number in (None, errno.EADDRINUSE, errno.EACCES)
    remedy = "--port" if of_port else "--host"
    return ConfigError(
        f"cannot listen on {host}:{port}: {cause}; choose another {remedy}", param="port"
    )
