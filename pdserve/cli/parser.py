"""Builds the command line from the option table: flags, grouped help, errors with the nearest name.

Values stay text here; `pdserve.launch.config.resolve` parses them, so that a flag, a variable and a
file give the same error messages.
"""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, NoReturn, TypeVar

from pdserve.cli.flag_hints import FLAGS
from pdserve.errors import ConfigError
from pdserve.launch.config.options import BY_NAME, GROUPS, OPTIONS
from pdserve.launch.config.resolve import Config, closest_match, resolve, unknown_option

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pdserve.launch.config.options import Option

T = TypeVar("T")


def value_of(flag: str, parse: Callable[[str], T], text: str) -> T:
    """The value that `text` stands for. Errors: `ConfigError` names the flag."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of printing usage and exiting."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Formatter,
            add_help=False,
        )
        self.own = self.add_argument_group("this command")
        self.own.add_argument("-h", "--help", action="help", help="Show this text.")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (try {self.prog} --help)")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all of `arguments`. Errors: `ConfigError`, with the nearest flag."""
        # vLLM's help has groups (--help=all); here one text has them all.
        given = ["--help" if word.startswith("--help=") else word for word in arguments]
        known, rest = self.parse_known_args(given)
        if rest:
            raise self._unknown(rest[0])
        return known

    def _unknown(self, argument: str) -> ConfigError:
        word = argument.partition("=")[0]
        if not word.startswith("-"):
            serves = self.prog == "pdserve"
            hint = f": a model is named by `pdserve serve {argument}`" if serves else ""
            return ConfigError(f"unexpected argument {argument!r}{hint} (try {self.prog} --help)")
        if word in FLAGS:
            return ConfigError(f"{word} is unknown: {FLAGS[word]}")
        close = closest_match(word, self._option_string_actions)
        if close is not None:
            return ConfigError(f"{word} is unknown, did you mean {close}?")
        return unknown_option(word.lstrip("-"), word, lambda option: option.flag)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110) - 2
        super().__init__(prog, max_help_position=34, width=width)


def add_options(parser: Parser, only: Collection[str] = BY_NAME) -> None:
    """Adds the options of the table, by group, with default and variable; or only those named in
    `only`."""
    defaults = resolve({}, {"PDSERVE_CONFIG": "none"})
    for group, title in GROUPS.items():
        members = [one for one in OPTIONS if one.group == group and one.name in only]
        if members:
            section = parser.add_argument_group(f"{group}: {title}")
            for option in members:
                _add(section, option, defaults)


def _add(section: argparse._ArgumentGroup, option: Option, defaults: Config) -> None:
    default = option.text(defaults.value(option))
    text = f"{option.help} [{default}; {option.variable}]".replace("%", "%%")
    if option.switch:
        section.add_argument(
            option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    section.add_argument(
        option.flag,
        action="append" if option.many else "store",
        metavar=option.metavar,
        default=argparse.SUPPRESS,
        help=text,
    )


def given_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """The given flags as text, by option name."""
    found = {}
    for attribute, value in vars(arguments).items():
        name = attribute.replace("_", "-")
        if name in BY_NAME:
            found[name] = _text(value)
    return found


def _text(value: bool | str | Iterable[str]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else "".join(f"{line}\n" for line in value)
