"""`pdserve config`: the settings in force and where each comes from; takes the flags of serving."""

from __future__ import annotations

import json

from pdserve.cli.parser import Parser, add_options, given_flags
from pdserve.launch import exit_codes
from pdserve.launch.config import Config, resolve, table


def run(arguments: list[str]) -> int:
    """Print the table, or with `--json` an object of `{option: {value, source}}`."""
    parser = Parser(
        "pdserve config",
        "Show the settings in force and where each comes from: a flag, an environment variable, a\n"
        "TOML file or the default.",
    )
    parser.own.add_argument("--json", action="store_true", help="As a JSON object.")
    add_options(parser)
    parsed = parser.parse(arguments)
    config = resolve(given_flags(parsed))
    print(_as_json(config) if parsed.json else _as_table(config))
    return exit_codes.OK


def _as_json(config: Config) -> str:
    rows = {name: {"value": value, "source": source} for name, value, source in table(config)}
    return json.dumps(rows, indent=2)


def _as_table(config: Config) -> str:
    rows = [("option", "value", "source"), *table(config)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
