"""Composes the command lines of workers that an agent starts, and checks those of actuators.

A worker gets its agent's own worker and cluster options, then the flags of its kind. Nothing that
another node says becomes a flag, but for the mode and the change, which have fixed forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import ConfigError
from pdserve.launch.config.options import BY_NAME
from pdserve.launch.config.resolve import closest_match, resolve, unknown_option
from pdserve.net.address import join, split, without_port
from pdserve.toml import readable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.launch.cluster.addresses import ClusterConfig
    from pdserve.launch.config.resolve import Config

__all__ = ["as_arguments", "check_worker_flags", "joining_flags", "kind_flags", "shared_flags"]

_ALSO: Final = ("log-format", "log-level", "drain-timeout", "metrics-names", "metrics-host")
"""Options outside of the worker's own that a worker uses."""
_BY_AGENT: Final = ("mode", "role", "node-name", "change", "join", "listen", "advertise", "config")
"""Options that the agent sets for each worker."""


def kind_flags(kind: str, words: Sequence[str]) -> dict[str, str]:
    """Reads and checks the flags of a kind.

    Errors: `ConfigError` names the kind, the flag and the nearest one that is possible.
    """
    place = f"agent-worker {kind}"
    flags = _read(place, words, _check_kind_flag)
    try:
        resolve(flags, {"PDSERVE_CONFIG": "none"})
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}") from None
    return flags


def check_worker_flags(place: str, words: Sequence[str]) -> None:
    """Checks flags of workers that may run on another host: their names and each value by itself.
    No file is looked for. A flag that workers do not use is none that ends them, so it is let pass.

    Errors: `ConfigError` names the place, the flag and the nearest one that is possible.
    """
    for name, text in _read(place, words, _check_known).items():
        try:
            BY_NAME[name].parse(text)
        except ValueError as error:
            raise ConfigError(f"{place}: --{name}: {readable(str(error))}") from None


def _read(
    place: str, words: Sequence[str], check: Callable[[str, str, str], None]
) -> dict[str, str]:
    """Texts by option; `check` is called with the place, each option's name and its word."""
    flags: dict[str, str] = {}
    rest = list(words)
    while rest:
        name, text = _next_flag(place, rest, check)
        option = BY_NAME[name]
        earlier = flags.get(name, "") if option.many else ""
        flags[name] = f"{earlier}{text}\n" if option.many else text
    return flags


def _next_flag(
    place: str, rest: list[str], check: Callable[[str, str, str], None]
) -> tuple[str, str]:
    """Takes one flag and its value from the front of `rest`."""
    word, equals, value = rest.pop(0).partition("=")
    name = word.removeprefix("--")
    if not word.startswith("--"):
        raise ConfigError(f"{place}: {word!r} is no flag; write --name=value")
    if name.startswith("no-") and name not in BY_NAME and not equals:
        name, equals, value = name.removeprefix("no-"), "=", "false"
    check(place, name, word)
    if BY_NAME[name].switch and not equals:
        return name, "true"
    if not equals:
        if not rest:
            raise ConfigError(f"{place}: {word} needs a value")
        value = rest.pop(0)
    return name, value


def _check_known(place: str, name: str, word: str) -> None:
    if name not in BY_NAME:
        near = closest_match(name, [one for one in BY_NAME if _is_workers(one)])
        if near is not None:
            raise ConfigError(f"{place}: {word} is unknown, did you mean --{near}?")
        error = unknown_option(name, word, lambda option: option.flag)
        raise ConfigError(f"{place}: {error.message}")


def _check_kind_flag(place: str, name: str, word: str) -> None:
    if name in _BY_AGENT:
        raise ConfigError(f"{place}: {word} is set by the agent for each worker; leave it out")
    _check_known(place, name, word)
    if not _is_workers(name):
        raise ConfigError(f"{place}: {word} is no option of a worker; leave it out")


def _is_workers(name: str) -> bool:
    return BY_NAME[name].target.partition(".")[0] == "worker" or name in _ALSO


def shared_flags(config: Config, seed: str) -> dict[str, str]:
    """Flags of all workers of an agent with this configuration. Args: `seed` is the agent's
    address."""
    flags = {
        name: text
        for name, text in config.given.items()
        if name not in _BY_AGENT
        and (_is_workers(name) or BY_NAME[name].target.startswith("cluster."))
    }
    if config.process.metrics_port is not None:
        flags["metrics-port"] = "0"
    return flags | {"role": "worker", "config": "none"} | joining_flags(config.cluster, seed)


def joining_flags(cluster: ClusterConfig, seed: str) -> dict[str, str]:
    """Flags with which another process on this host joins the same cluster through `seed`, on a
    port of its own."""
    flags = {"join": ",".join(dict.fromkeys((seed, *cluster.join)))}
    if cluster.listen:
        flags["listen"] = join(split(cluster.listen)[0], 0)
    if cluster.advertise:
        flags["advertise"] = without_port(cluster.advertise)
    return flags


def as_arguments(flags: Mapping[str, str]) -> tuple[str, ...]:
    """Flags as words of a command line."""
    words: list[str] = []
    for name, text in flags.items():
        option = BY_NAME[name]
        if option.switch:
            words.append(option.flag if text == "true" else f"--no-{name}")
        elif option.many:
            words += [f"{option.flag}={line}" for line in text.split("\n") if line]
        else:
            words.append(f"{option.flag}={text}")
    return tuple(words)
