"""Settings of the Kubernetes actuator: `[planner.actuator]` with type `kubernetes`."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pdserve.errors import ConfigError
from pdserve.planner.actuators.settings import PlainKind, read_kinds
from pdserve.toml import read_table

__all__ = ["DeploymentKind", "KubernetesConfig", "read_config"]

_FILES: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


class DeploymentKind(PlainKind, frozen=True, kw_only=True):
    """A Deployment, whose pods are workers: a table `[planner.actuator.kinds.NAME]`."""

    deployment: str
    """Its name."""
    mode: Literal["aggregated", "prefill", "decode"] = "aggregated"
    """The mode in which its template starts workers."""


class KubernetesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The API server, and a Deployment per kind."""

    kinds: dict[str, DeploymentKind]
    namespace: str = "default"
    """Where the Deployments are."""
    api: str = "https://kubernetes.default.svc"
    """Address of the API server."""
    token_file: str = f"{_FILES}/token"
    """Read for each request: Kubernetes replaces it every hour. Empty: no token is sent."""
    ca_file: str = f"{_FILES}/ca.crt"
    """Certificates that the server's must be signed by. Empty: those of the system."""


def read_config(table: object, place: str) -> KubernetesConfig:
    """Reads the table; `place` names it in errors. Errors: `ConfigError`."""
    config = read_table(table, KubernetesConfig, place)
    assert isinstance(table, dict)
    kinds = read_kinds(table, DeploymentKind, place)
    names = [one.deployment for one in kinds.values()]
    if len(set(names)) < len(names):
        raise ConfigError(f"{place}: two kinds have the same deployment: give each its own")
    if not config.api.startswith(("https://", "http://")):
        raise ConfigError(f"{place}: api must begin with https://")
    return config
