"""Logs the settings' sources at start-up, and warns of settings that are allowed but likely
mistakes.

The process calls it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.launch.config.resolve import unused_flags
from pdserve.launch.frontend_processes import is_child_frontend
from pdserve.net.address import is_loopback
from pdserve.tracing.export.otel_env import looks_like_grpc

if TYPE_CHECKING:
    from pdserve.frontend.config import FrontendConfig
    from pdserve.launch.config.resolve import Config

__all__ = ["log_config_sources", "log_listening", "warn_about_config"]

_log = logging.getLogger(__name__)

_FRONTENDS: Final = ("all-in-one", "frontend")
"""Roles with a frontend."""


def log_config_sources(config: Config) -> None:
    """Logs the sources of settings other than the command line."""
    path = config.process.config
    if path is not None and "config" in config.sources:
        _log.info("settings are read from %s", path)
    elif path is not None:
        _log.info("settings are read from %s, which was found: --config none skips it", path)
    if config.ignored:
        _log.warning(
            "ignored, since Kubernetes sets them for services whose names begin with pdserve: %s; "
            "enableServiceLinks: false leaves them out",
            ", ".join(sorted(config.ignored)),
        )
    if config.process.role in _FRONTENDS and not is_child_frontend(config):
        _warn_about_export(config.frontend)


def _warn_about_export(config: FrontendConfig) -> None:
    """Warns of OpenTelemetry's variables that are ignored, and of a port that takes no HTTP."""
    for line in config.otel.warnings:
        _log.warning("%s", line)
    if looks_like_grpc(config.otlp_endpoint):
        _log.warning(
            "the endpoint for traces has port 4317, where collectors take gRPC: pdserve sends "
            "OTLP over HTTP, for which they usually have port 4318"
        )


def log_listening(config: Config, port: int) -> None:
    """Logs the API's address and its protection."""
    host, role = config.frontend.host, config.process.role
    doing = "loading" if role == "all-in-one" else "looking for workers"
    _log.info("listening on %s, port %d; %s", host, port, doing)
    if is_loopback(host):
        return
    if config.frontend.api_keys_file is None:
        _log.warning(
            "everyone who reaches this address may use the API: there is no --api-keys-file"
        )
    if config.cluster.tls_cert is not None:
        _log.warning(
            "HTTP is not encrypted: --tls-cert is for the links between nodes; put a proxy that "
            "ends TLS before this address"
        )


def warn_about_config(config: Config, address: str) -> None:
    """Warns of likely mistakes. `address`: of this process's first node."""
    role, mode = config.process.role, config.worker.mode
    idle = unused_flags(config)
    if idle:
        _log.warning("a %s has no use for %s", role, ", ".join(idle))
    _warn_of_nothing(config)
    if role == "all-in-one" and mode != "aggregated":
        _log.warning(
            "--mode=%s has no effect without --role=worker: all in one runs its own workers", mode
        )
    if role in ("frontend", "worker", "planner") and not config.cluster.join:
        _log.warning("there is no --join: this %s waits for others, at %s", role, address)


def _warn_of_nothing(config: Config) -> None:
    """Warns of settings without what they belong to."""
    process, frontend = config.process, config.frontend
    if process.metrics_host and process.metrics_port is None:
        _log.warning("--metrics-host has no effect without --metrics-port")
    if frontend.otlp_endpoint and frontend.trace_rate <= 0 and config.process.role in _FRONTENDS:
        _log.warning("no traces go to --otlp-endpoint: --trace-rate 0 switches them off")
