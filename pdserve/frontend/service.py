"""The frontend as a running thing: its sockets, its tasks, its beginning and its end.

Owns everything that lives as long as the process role: the listening socket, the connections, the
text pool, the keys, the sweep. Decisions are made elsewhere.

The end, in order: new requests are refused (503), running ones may finish within the drain timeout,
the rest are answered with an error, then everything is closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError, Draining
from pdserve.frontend.api import Api
from pdserve.frontend.bodies import BodyReader
from pdserve.frontend.connection import ConnectionServer
from pdserve.frontend.cors import Cors
from pdserve.frontend.explain import Explanations
from pdserve.frontend.generation import Generations
from pdserve.frontend.keys import KeyRing, parse_keys
from pdserve.frontend.models import ModelDirectory
from pdserve.frontend.naming import NAMELESS, Naming
from pdserve.frontend.small import SmallEndpoints
from pdserve.observe.metrics import Metrics
from pdserve.text.pool import TextPool

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pdserve.frontend.backend import Backend
    from pdserve.frontend.config import FrontendConfig
    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.observe.metrics import Pages

logger = logging.getLogger("pdserve.frontend")

SWEEP: Seconds = 1.0
"""Between two looks at deadlines of connections and at new models."""
_LAST_WORDS: Seconds = 2.0
"""For error answers to reach their clients before connections are dropped."""
_FIRST_WORDS: Seconds = 0.5
"""For a request to arrive on a connection that came just before the end."""
_TURNS = 3
"""Of the loop, in which whoever waits in the backlog has been accepted."""


class FrontendService:
    """One frontend. `start`, then `stop`; both on the same event loop."""

    def __init__(
        self,
        config: FrontendConfig,
        backend: Backend,
        metrics: Metrics | None = None,
        degraded: Mapping[str, str] | None = None,
        pages: Pages | None = None,
        naming: Naming = NAMELESS,
    ) -> None:
        """Args: `degraded` is a live view of reasons, shown by `/health`; `pages` answers
        `/metrics`, by default with `metrics`; `naming` names the blocks of prompts.

        Errors: `ConfigError` for settings that cannot be.
        """
        config.validate()
        self.config = config
        self.metrics = metrics if metrics is not None else Metrics()
        self._backend = backend
        self._naming = naming
        self._degraded = degraded if degraded is not None else {}
        self._pages = pages if pages is not None else self.metrics
        self._port = config.port
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; known from `start` on."""
        return self._port

    @property
    def listening(self) -> bool:
        """Between `start` and `stop`."""
        return self._listener is not None

    @property
    def active_requests(self) -> int:
        """Generation requests in progress, those included whose bodies are arriving."""
        return len(self._generations.active) if self.listening else 0

    @property
    def connections(self) -> int:
        """Open client connections."""
        return self._server.open_connections if self.listening else 0

    async def start(self) -> None:
        """Listen. Requests are served from now on, with 503 until the backend is ready.

        Errors: `ConfigError` when the address cannot be had or the key file is wrong.
        """
        config, metrics = self.config, self.metrics
        loop = asyncio.get_running_loop()
        self._loop = loop
        keys = self._read_keys()
        self._pool = TextPool()
        self._models = ModelDirectory(self._backend, self._pool)
        bodies = BodyReader(config)
        self._generations = Generations(
            config, self._backend, self._models, self._pool, bodies, metrics, self._naming
        )
        small = SmallEndpoints(
            config,
            self._backend,
            self._models,
            self._pool,
            bodies,
            metrics,
            loop.time,
            lambda: self.active_requests,
            lambda: self._generations.draining,
            self._degraded,
            self._pages,
        )
        explanations = Explanations(config, self._backend, bodies, self._generations)
        cors = Cors(config.cors_origins)
        self._api = Api(self._generations, explanations, small, metrics, keys, cors)
        self._server = ConnectionServer(self._api.handle, config, metrics)
        metrics.http_requests_in_flight.read_from(lambda: self.active_requests)
        metrics.http_connections.read_from(lambda: self._server.open_connections)
        try:
            self._listener = await self._listen(loop)
        except BaseException:
            await self._pool.close()
            raise
        self._port = self._listener.sockets[0].getsockname()[1]
        self._sweeper = loop.create_task(self._sweep_forever(), name="frontend-sweep")

    def check_port(self) -> None:
        """Before `start` of the first that shares its port: others' sharing it would go unnoticed.

        Errors: `ConfigError` if anybody listens on it.
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
        """Make every served model's tokenizer and templates, which otherwise happens by and by.

        Errors: `ConfigError` names the model that cannot be served.
        """
        for card in {id(card): card for card in self._backend.cards().values()}.values():
            try:
                await self._models.get(card)
            except ConfigError as error:
                raise ConfigError(
                    f"model {card.name!r} cannot be served: {error.message}"
                ) from None

    async def usable_model(self) -> ModelCard | None:
        """One of the served models whose text can be dealt with; the log names those where not."""
        await self._models.prepare()
        served = self._backend.cards().values()
        return next((c for c in served if self._models.get_nowait(c) is not None), None)

    async def stop(self, drain_timeout: Seconds | None = None) -> None:
        """Shut down in order; returns when every connection is closed. Idempotent.

        Args: `drain_timeout` replaces the configured one.
        Cancellation: skips to dropping connections.
        """
        if self._listener is None:
            return
        timeout = self.config.drain_timeout if drain_timeout is None else drain_timeout
        self._generations.draining = True
        if self.config.reuse_port:  # others take what comes now; here it would only be refused
            await self._let_in(self._listener)
            self._listener.close()
        try:
            await self._wait_idle(timeout)
            left = tuple(self._generations.active)
            for exchange in left:
                exchange.fail(Draining("the server is shutting down", retry_after=1.0))
            if left:
                logger.warning("%d requests did not finish within %g s", len(left), timeout)
                await self._wait_idle(_LAST_WORDS)
        finally:
            await self._close()

    def reload_api_keys(self) -> None:
        """Read the key file again; requests in progress keep what they were admitted with. Before
        `start` there is nothing to do.

        Errors: `ConfigError`; the old keys then stay in force.
        """
        if not self.listening:
            return
        self._api.keys = self._read_keys()
        self._generations.admission.forget_keys()

    # ------------------------------------------------------------------ inside

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        config = self.config
        try:
            return await loop.create_server(
                self._server,
                config.host,
                config.port,
                backlog=config.backlog,
                reuse_port=config.reuse_port or None,
            )
        except (OSError, OverflowError) as error:
            raise _cannot_listen(config.host, config.port, error) from None

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            try:
                self._server.sweep(self._loop.time())
                await self._models.prepare()
            except Exception:  # deadlines of connections depend on the next time
                logger.exception("a sweep failed")

    async def _wait_idle(self, timeout: Seconds) -> None:
        """Until no generation is in progress, for `timeout` seconds at most."""
        deadline = self._loop.time() + timeout
        while self._generations.active and self._loop.time() < deadline:
            await asyncio.wait(
                [exchange.task for exchange in self._generations.active],
                timeout=deadline - self._loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        assert listener is not None  # the caller has looked
        await self._let_in(listener)
        listener.close()
        await self._hear_out()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self._server.pre_shutdown()
        await self._server.shutdown(_LAST_WORDS)
        self._server.abort_all()
        await self._models.close()
        await self._pool.close()

    async def _let_in(self, listener: asyncio.Server) -> None:
        """Accept who waits in the backlog, since to close it is to reset them; who dials from now
        on is left to dial again, and refused. What was to be done anyway comes first in a turn of
        the loop, what the kernel has to say after it."""
        for listening in listener.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as door:
                door.listen(0)
        until, seen = self._loop.time() + _FIRST_WORDS, -1
        while self._server.accepted != seen and self._loop.time() < until:
            seen = self._server.accepted
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    async def _hear_out(self) -> None:
        """Whose first request is still on its way gets an answer, if it comes soon."""
        until = self._loop.time() + _FIRST_WORDS
        while self._server.unheard and self._loop.time() < until:  # noqa: ASYNC110  at its end
            await asyncio.sleep(_FIRST_WORDS / 20)

    def _read_keys(self) -> KeyRing | None:
        path = self.config.api_keys_file
        if path is None:
            return None
        return read_api_keys(path)


def read_api_keys(path: Path) -> KeyRing:
    """Errors: `ConfigError` names the file, the line and the remedy."""
    try:
        data = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}", param="api_keys_file"
        ) from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s can be read by other users; chmod 600 it", path)
    return parse_keys(data, str(path))


def _cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """Cause and remedy, without asyncio's preamble that repeats the address."""
    number = error.errno if isinstance(error, OSError) else None
    cause = os.strerror(number) if number is not None and number > 0 else error
    # Names that do not resolve have negative numbers of their own.
    of_port = number in (None, errno.EADDRINUSE, errno.EACCES)
    remedy = "--port" if of_port else "--host"
    return ConfigError(
        f"cannot listen on {host}:{port}: {cause}; choose another {remedy}", param="port"
    )
