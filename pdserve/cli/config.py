"""Runs `pdserve config`: prints the effective settings and their sources; takes serving flags."""

from __future__ import annotations

import json

from pdserve.cli.parser import Parser, add_options, given_flags
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import Config, option_rows, resolve


def run(arguments: list[str]) -> int:
    """Prints the table, or with `--json` an object of `{option: {value, source[, meaning]}}`."""
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
    rows = {}
    for row in option_rows(config):
        rows[row.name] = {"value": row.value, "source": row.source}
        if row.meaning:
            rows[row.name]["meaning"] = row.meaning
    return json.dumps(rows, indent=2)


def _as_table(config: Config) -> str:
    rows = [("option", "value", "source", "which means")]
    rows += [(row.name, row.value, row.source, row.meaning) for row in option_rows(config)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join(map(str.ljust, row, [*widths, 0])) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
