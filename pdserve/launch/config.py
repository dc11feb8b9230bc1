"""One typed configuration, composed from the components' own, and where each value came from.

A flag wins over the environment, that over a TOML file, that over the field's default. A name that
nobody knows is an error with the nearest known one, wherever it stands. Nothing else in pdserve
reads the environment or a configuration file.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError
from pdserve.frontend.config import FrontendConfig
from pdserve.launch.addresses import ClusterConfig
from pdserve.launch.options import BY_NAME, OPTIONS, Option
from pdserve.router.config import RouterConfig
from pdserve.toml import read_toml, readable
from pdserve.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.observe.logs import LogFormat

PREFIX = "PDSERVE_"
RESERVED = (
    *("PDSERVE_PURE", "PDSERVE_REQUIRE_NATIVE", "PDSERVE_URL", "PDSERVE_API_KEY"),
    *("PDSERVE_TRACES", "PDSERVE_RDMA_VM", "PDSERVE_REQUIRE_RDMA"),
)
"""Variables with a reader of their own: the twins, the build, the chat client, the tests."""
RESERVED_PREFIXES = ("PDSERVE_TEST_", "PDSERVE_BENCH_")

_ROLES = ("frontend", "router", "worker")
"""Components of the configuration that one role alone has."""
_FOR_ALL = ("host", "drain-timeout")
"""Options of the frontend that the others use, too: for probes, and at the end."""
_FILE_NAME = "pdserve.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """What belongs to the process rather than to a component in it."""

    role: str = "all-in-one"
    """`frontend`, `router` or `worker`; `all-in-one` is one process with one of each."""
    config: Path | None = None
    """The configuration file that was read, if one was."""
    metrics_port: int | None = None
    """A second listener for probes and scrapes, on the same host; None: only the API's port."""
    aggregated: bool = False
    """All-in-one with one worker; else one for prefill and one for decode, where the engine can
    move KV."""
    frontends: int = 1
    """Frontend processes that share the port, this one included: one uses one core."""
    log_format: LogFormat = "text"
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything, resolved."""

    process: ProcessConfig
    frontend: FrontendConfig
    worker: WorkerConfig
    router: RouterConfig
    cluster: ClusterConfig
    sources: Mapping[str, str] = field(default_factory=dict)
    """Option name to the place its value came from; absent: the default."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Option name to the text of its value, for what is not the default: flags that would make the
    same configuration again."""

    def value(self, option: Option) -> Any:
        """The value in force."""
        component, _, name = option.target.partition(".")
        return getattr(getattr(self, component), name)

    def source(self, option: Option) -> str:
        return self.sources.get(option.name, "default")


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as text, and the words that name its place in messages."""

    text: str
    source: str


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Config:
    """Compose the configuration.

    Args: `flags` maps option names to what was written.
    Errors: `ConfigError` names the place, what is wrong and what would be right.
    """
    by_flag = {name: _Given(text, f"--{name}") for name, text in flags.items()}
    given = _from_environment(environ) | by_flag
    path = _config_path(given.get("config"), environ, Path.cwd() if cwd is None else cwd)
    if path is not None:
        given = _from_file(path) | given
    values = {name: _parse(BY_NAME[name], one) for name, one in given.items()} | {"config": path}
    config = Config(
        ProcessConfig(**_fields("process", values)),
        FrontendConfig(**_fields("frontend", values)),
        WorkerConfig(**_fields("worker", values)),
        RouterConfig(**_fields("router", values)),
        ClusterConfig(**_fields("cluster", values)),
        {name: one.source for name, one in given.items()},
        {name: one.text for name, one in given.items()},
    )
    config.frontend.validate()
    config.worker.validate()
    config.router.validate()
    config.cluster.validate()
    return config


def splits(config: Config) -> bool:
    """Whether an all-in-one of this configuration has two workers. An engine that keeps no KV has
    nothing that could move."""
    worker, process = config.worker, config.process
    moves = worker.engine == "torch" or worker.engine_options.get("content") == "on"
    return process.role == "all-in-one" and not process.aggregated and moves


def idle_flags(config: Config) -> list[str]:
    """The flags that were given and that no role of this process looks at. Variables and files may
    be shared by several roles, so nobody is told of those."""
    role = config.process.role
    if role == "all-in-one":
        return []
    found = []
    for name, source in config.sources.items():
        owner = BY_NAME[name].target.partition(".")[0]
        idle = owner in _ROLES and owner != role and name not in _FOR_ALL
        idle |= name == "aggregated" or (name == "frontends" and role != "frontend")
        if source.startswith("--") and idle:
            found.append(source)
    return sorted(found)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that looks most alike, if any does."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown_option(name: str, shown: str, spell: Callable[[Option], str]) -> ConfigError:
    """The error for an option that does not exist.

    Args: `shown` is what was written, `spell` writes an option the same way.
    """
    close = nearest(name, BY_NAME)
    hint = f", did you mean {spell(BY_NAME[close])}?" if close else ""
    return ConfigError(f"{shown} is unknown{hint}")


def _fields(component: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields of one component."""
    found = {}
    for name, value in values.items():
        owner, _, attribute = BY_NAME[name].target.partition(".")
        if owner == component:
            found[attribute] = value
    return found


def _parse(option: Option, given: _Given) -> Any:
    try:
        return option.parse(given.text)
    except ValueError as error:
        raise ConfigError(f"{given.source}: {readable(str(error))}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    known = {option.variable: option.name for option in OPTIONS}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        if variable.startswith(RESERVED_PREFIXES):
            continue
        if variable not in known:
            name = variable.removeprefix(PREFIX).lower().replace("_", "-")
            raise unknown_option(name, variable, lambda option: option.variable)
        found[known[variable]] = _Given(text, variable)
    return found


def _config_path(given: _Given | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The file that was asked for, else the first usual one that exists."""
    if given is not None:
        path = BY_NAME["config"].parse(given.text)
        if path is not None and not path.is_file():
            raise ConfigError(f"{given.source}: there is no file {str(path)!r}")
        return path if path is None else Path(path)
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    usual = (cwd / _FILE_NAME, Path(home) / "pdserve" / _FILE_NAME)
    return next((path for path in usual if path.is_file()), None)


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    table = read_toml(data, str(path))
    found = {}
    for written, value in table.items():
        key, name = readable(written), written.replace("_", "-")
        if name not in BY_NAME or name == "config":
            raise _unknown_key(path, key, name, value)
        if name in found:
            raise ConfigError(f"{path}: key '{key}' is there twice, once with dashes")
        found[name] = _Given(_as_text(BY_NAME[name], value, f"{path}: {key}"), f"{path}: {key}")
    return found


def _unknown_key(path: Path, key: str, name: str, value: Any) -> ConfigError:
    if name == "config":
        return ConfigError(
            f"{path}: 'config' cannot be set in the file: use --config or PDSERVE_CONFIG"
        )
    if isinstance(value, dict):
        return ConfigError(
            f"{path}: '{key}' is a table; settings stand at the top of the file, in none but "
            "[engine-option] and [policy-option]"
        )
    return unknown_option(name, f"{path}: key '{key}'", lambda option: f"'{option.name}'")


def _as_text(option: Option, value: Any, place: str) -> str:
    """A TOML value as it would be written on the command line, so that one parser serves both."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, dict) and option.many:
        return "".join(f"{name}={_as_text(option, one, place)}\n" for name, one in value.items())
    if isinstance(value, list) and option.metavar.endswith("[,…]"):
        return ",".join(_as_text(option, one, place) for one in value)
    raise ConfigError(f"{place}: a {type(value).__name__} is not possible here")


def table(config: Config) -> list[tuple[str, str, str]]:
    """(option, value as a person writes it, source) for every option, in the table's order."""
    return [
        (option.name, _shown(option, config.value(option)), config.source(option))
        for option in OPTIONS
    ]


def _shown(option: Option, value: Any) -> str:
    """The help names the usual places of the file; here it is the one that was read."""
    return "none" if option.name == "config" and value is None else option.text(value)
