"""Composes one typed configuration from all sources, and records where each value came from.

A flag wins over the environment, the environment over a TOML file, the file over OpenTelemetry's
variables, and these over the field's default. An unknown name is an error that suggests the nearest
known one. Nothing else in pdserve reads the environment or a configuration file.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.agent.config import AgentConfig
from pdserve.errors import ConfigError
from pdserve.frontend.config import FrontendConfig
from pdserve.launch.cluster.addresses import ClusterConfig
from pdserve.launch.config.kubernetes_env import is_service_variable
from pdserve.launch.config.options import BY_NAME, OPTIONS, Option
from pdserve.router.config import RouterConfig
from pdserve.toml import read_toml, readable
from pdserve.tracing.export.otel_env import read_otel_environment
from pdserve.worker.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pdserve.observe.logs import LogFormat
    from pdserve.observe.scrapes import MetricNames
    from pdserve.planner.config import PlannerMode
    from pdserve.tracing.export.otel_env import OtelSettings

PREFIX = "PDSERVE_"
RESERVED = (
    *("PDSERVE_PURE", "PDSERVE_URL", "PDSERVE_API_KEY"),
    *("PDSERVE_TRACES", "PDSERVE_RDMA_VM", "PDSERVE_AGENTS"),
)
"""Variables that other code reads: pure-Python fallbacks, build, chat client, tests."""
RESERVED_PREFIXES = ("PDSERVE_TEST_", "PDSERVE_BENCH_", "PDSERVE_REQUIRE_")

_ROLES = ("frontend", "router", "worker", "agent")
"""Components of the configuration that belong to one role only."""
_FOR_ALL = ("host", "drain-timeout", "tool-parser", "reasoning-parser")
"""Options of one role that others use too: for probes, for the drain, to read what models write."""
_FRONTENDS = ("frontends", "with-router")
"""Options of processes that have a frontend."""
_FILE_NAME = "pdserve.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings of the process as a whole."""

    role: str = "all-in-one"
    """`frontend`, `router`, `worker`, `planner` or `agent`; `all-in-one` is one process with one of
    each of the first three."""
    config: Path | None = None
    """The configuration file that was read, if one was."""
    metrics_port: int | None = None
    """A second port for probes and scrapes; None: only the API's port."""
    metrics_names: MetricNames = "pdserve"
    """The names on /metrics where a scrape asks for none."""
    metrics_host: str = ""
    """Address of that port; empty: the API's host."""
    aggregated: bool = False
    """All-in-one with one worker. Otherwise it has one for prefill and one for decode, if the
    engine can move KV."""
    frontends: int = 1
    """Number of frontend processes that share the port, this one included. Each uses one core."""
    with_router: bool = False
    """Each frontend process has a router of its own, besides what its role says."""
    log_format: LogFormat = "text"
    log_level: str = "info"
    planner: PlannerMode = "off"
    """What a planner does with its plans: nothing by itself until an operator says so."""
    planner_file: Path | None = None
    """Its models and objectives; a planner does not start without."""
    planner_log: Path | None = None
    """A file for its decisions; None: only its log has them."""


@dataclass(frozen=True, slots=True)
class Config:
    """The complete configuration."""

    process: ProcessConfig
    frontend: FrontendConfig
    worker: WorkerConfig
    router: RouterConfig
    cluster: ClusterConfig
    agent: AgentConfig = field(default_factory=AgentConfig)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Option name to the place its value came from; absent: the default."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Option name to the text of its value, for all that is not the default: flags that would
    produce the same configuration."""
    ignored: tuple[str, ...] = ()
    """Variables that begin like pdserve's and were set by Kubernetes."""

    def value(self, option: Option) -> Any:
        """The present value of an option."""
        component, _, name = option.target.partition(".")
        return getattr(getattr(self, component), name)

    def source(self, option: Option) -> str:
        return self.sources.get(option.name, "default")


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as text, and its place for messages."""

    text: str
    source: str


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> Config:
    """Composes the configuration.

    Args: `flags` maps option names to their texts.

    Errors: `ConfigError` names the place, what is wrong and what would be right.
    """
    by_flag = {name: _Given(text, f"--{name}") for name, text in flags.items()}
    ignored = tuple(name for name, text in environ.items() if is_service_variable(name, text))
    given = _from_environment(environ, ignored) | by_flag
    path = _config_path(given.get("config"), environ, Path.cwd() if cwd is None else cwd)
    if path is not None:
        found = _from_file(path)
        if "config" not in given:
            _refuse_code(path, found, environ)
        given = found | given
    values = {name: _parse(BY_NAME[name], one) for name, one in given.items()} | {"config": path}
    otel = read_otel_environment(environ)
    from_otel = {name: one for name, one in _otel_values(otel).items() if name not in values}
    values |= {name: one.value for name, one in from_otel.items()}
    worker = WorkerConfig(**_fields("worker", values))
    modules = frozenset(one for one in (worker.tool_parser, worker.reasoning_parser) if ":" in one)
    config = Config(
        ProcessConfig(**_fields("process", values)),
        FrontendConfig(**_fields("frontend", values), parser_modules=modules, otel=otel),
        worker,
        RouterConfig(**_fields("router", values)),
        ClusterConfig(**_fields("cluster", values)),
        AgentConfig(**_fields("agent", values)),
        {name: one.source for name, one in (given | from_otel).items()},
        {name: one.text for name, one in given.items()},
        ignored,
    )
    config.frontend.validate()
    config.worker.validate()
    config.router.validate()
    config.cluster.validate()
    return config


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles of a process of this configuration, in the order in which they join."""
    role = config.process.role
    if role == "all-in-one":
        return ("router", "worker", "frontend")
    carries = role == "frontend" and config.process.with_router
    return ("router", "frontend") if carries else (role,)


def has_worker_pair(config: Config) -> bool:
    """True if an all-in-one process of this configuration has two workers. An engine without KV has
    nothing to move."""
    worker, process = config.worker, config.process
    moves = worker.engine == "torch" or worker.engine_options.get("content") == "on"
    return process.role == "all-in-one" and not process.aggregated and moves


def unused_flags(config: Config) -> list[str]:
    """The given flags that no role of this process uses. Variables and files may be shared by
    several roles, so they are not reported."""
    role, roles = config.process.role, roles_of(config)
    if role == "agent":
        roles = ("agent", "worker")  # it passes a worker's options on
    if role == "all-in-one":
        given = config.sources.items()
        return sorted(s for name, s in given if name.startswith("planner") and s.startswith("--"))
    found = []
    for name, source in config.sources.items():
        owner = BY_NAME[name].target.partition(".")[0]
        idle = owner in _ROLES and owner not in roles and name not in _FOR_ALL
        idle |= name == "aggregated" or (name in _FRONTENDS and role != "frontend")
        idle |= name.startswith("planner") and role != "planner"
        if source.startswith("--") and idle:
            found.append(source)
    return sorted(found)


def closest_match(word: str, known: Iterable[str]) -> str | None:
    """The known word with the most similar spelling, if any is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown_option(name: str, shown: str, spell: Callable[[Option], str]) -> ConfigError:
    """The error for an unknown option.

    Args: `shown` is what was written; `spell` writes an option in the same form.
    """
    close = closest_match(name, BY_NAME)
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


def _from_environment(environ: Mapping[str, str], ignored: Collection[str]) -> dict[str, _Given]:
    known = {option.variable: option.name for option in OPTIONS}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED or variable in ignored:
            continue
        if variable.startswith(RESERVED_PREFIXES):
            continue
        if variable not in known:
            name = variable.removeprefix(PREFIX).lower().replace("_", "-")
            raise unknown_option(name, variable, lambda option: option.variable)
        found[known[variable]] = _Given(text, variable)
    return found


@dataclass(frozen=True, slots=True)
class _FromOtel:
    """A value that one of OpenTelemetry's variables gives, parsed by their rules."""

    value: Any
    source: str


def _otel_values(otel: OtelSettings) -> dict[str, _FromOtel]:
    """By option. Options that pdserve's own sources give win over them."""
    sampler = "OTEL_TRACES_SAMPLER"
    found = {
        "otlp-endpoint": _FromOtel(otel.endpoint or None, otel.endpoint_variable),
        "trace-sample": _FromOtel(otel.sample, sampler),
        "trace-parent": _FromOtel(otel.parent, sampler),
    }
    return {name: one for name, one in found.items() if one.value is not None}


def _config_path(given: _Given | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The requested file, else the first of the usual ones that exists."""
    if given is not None:
        path = BY_NAME["config"].parse(given.text)
        if path is not None and not path.is_file():
            raise ConfigError(f"{given.source}: there is no file {str(path)!r}")
        return path if path is None else Path(path)
    usual = (cwd / _FILE_NAME, _home_file(environ))
    return next((path for path in usual if path.is_file()), None)


def _home_file(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config"
    return Path(home) / "pdserve" / _FILE_NAME


def _refuse_code(path: Path, found: Mapping[str, _Given], environ: Mapping[str, str]) -> None:
    """Refuses Python code named by a file that was found in the current directory, because it may
    be someone else's, such as that of a repository just cloned."""
    if path == _home_file(environ):
        return
    for name, one in found.items():
        if BY_NAME[name].imports and ":" in one.text:
            raise ConfigError(
                f"{one.source}: {one.text!r} names code to import, which a file that is found in "
                "the current directory must not do: if the file is yours, pass it with --config "
                f"{path}, or say --{name}"
            )


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
            "[engine-option], [policy-option], [lora], [agent-slots] and [agent-worker]"
        )
    return unknown_option(name, f"{path}: key '{key}'", lambda option: f"'{option.name}'")


def _as_text(option: Option, value: Any, place: str) -> str:
    """A TOML value as it would be written on the command line, so that both have one parser."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, dict) and option.many:
        return "".join(f"{name}={_as_text(option, one, place)}\n" for name, one in value.items())
    if isinstance(value, list) and option.metavar.endswith("[,…]"):
        return ",".join(_as_text(option, one, place) for one in value)
    raise ConfigError(f"{place}: a {type(value).__name__} is not possible here")


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One line of `pdserve config`."""

    name: str
    value: str
    """The value as text; empty if it cannot be written."""
    source: str
    meaning: str = ""
    """What an empty value means."""


def option_rows(config: Config) -> list[OptionRow]:
    """Every option, in the table's order."""
    return [_row(option, config) for option in OPTIONS]


def _row(option: Option, config: Config) -> OptionRow:
    source, value = config.source(option), config.value(option)
    if option.name == "mode" and config.process.role == "all-in-one":
        workers = (
            "a prefill and a decode worker" if has_worker_pair(config) else "one aggregated worker"
        )
        return OptionRow(option.name, "", source, f"all in one: {workers}")
    if option.name == "config" and value is None:
        # The help names the usual places of the file.
        return OptionRow(option.name, "none", source)
    text = option.text(value)
    prose = value in (None, "", ()) and " " in text
    return (
        OptionRow(option.name, "", source, text) if prose else OptionRow(option.name, text, source)
    )
