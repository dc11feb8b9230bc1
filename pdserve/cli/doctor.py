"""Runs `pdserve doctor`: prints what this machine has, and what pdserve will use of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import TYPE_CHECKING

from pdserve.cli.parser import Parser
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.launch.machine import read_facts

if TYPE_CHECKING:
    import argparse

    from pdserve.launch.machine import MachineFact

_MARKS = {"ok": "✓", "absent": "·", "problem": "✗"}
_PLAIN_MARKS = {"ok": "+", "absent": ".", "problem": "!"}


def run(arguments: list[str]) -> int:
    """Prints the report; the exit status is not 0 if a problem was found."""
    parser = Parser(
        "pdserve doctor",
        "Show what this machine has and what pdserve will use.\n"
        "Marks: ✓ fine, · absent but optional, ✗ a problem.",
    )
    add = parser.own.add_argument
    text = "tiers: measure memory and disks, and say which KV tiers can win for a model."
    add("what", metavar="tiers", nargs="?", default="", help=text)
    add("--json", action="store_true", help="As JSON.")
    text = "tiers: a directory for --disk-kv, to measure its disk; may be repeated."
    add("--disk", metavar="DIR", action="append", default=[], help=text)
    text = "tiers: the model's directory, to know the KV of a token."
    add("--model-dir", metavar="DIR", default="", help=text)
    text = "tiers: bytes of KV of a token, if there is no such directory."
    add("--bytes-per-token", metavar="SIZE", default="", help=text)
    text = "tiers: prompt tokens that a worker computes per second."
    add("--prefill-rate", metavar="N", default="", help=text)
    parsed = parser.parse(arguments)
    if parsed.what:
        return _tiers(parsed)
    _refuse_measuring(parsed)
    facts = read_facts()
    if parsed.json:
        print(json.dumps([dataclasses.asdict(fact) for fact in facts], indent=2))
    else:
        print(report(facts, unicode=(sys.stdout.encoding or "").lower().startswith("utf")))
    bad = any(fact.state == "problem" for fact in facts)
    return exit_codes.FAILED if bad else exit_codes.OK


def _refuse_measuring(parsed: argparse.Namespace) -> None:
    """Errors: `ConfigError` for a flag that only `doctor tiers` reads."""
    for name in ("disk", "model_dir", "bytes_per_token", "prefill_rate"):
        if getattr(parsed, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for the tiers: pdserve doctor tiers {flag} ...")


def _tiers(parsed: argparse.Namespace) -> int:
    from pdserve.cli.tier.machine import report_tiers, token_cost

    if parsed.what != "tiers":
        raise ConfigError(
            f"{parsed.what!r} is unknown: use tiers, or nothing for the whole machine"
        )
    cost = token_cost(parsed.bytes_per_token, parsed.model_dir, parsed.prefill_rate)
    found = report_tiers(parsed.disk, cost)
    print(json.dumps(found.as_json(), indent=2) if parsed.json else "\n".join(found.lines()))
    return exit_codes.FAILED if any(disk.trouble for disk in found.disks) else exit_codes.OK


def report(facts: list[MachineFact], *, unicode: bool = True) -> str:
    """The facts as a person reads them, by section."""
    marks = _MARKS if unicode else _PLAIN_MARKS
    width = max(len(fact.name) for fact in facts)
    lines: list[str] = []
    for section, members in itertools.groupby(facts, lambda fact: fact.section):
        lines.append(section)
        lines += [f"  {marks[fact.state]} {fact.name:<{width}}  {fact.value}" for fact in members]
    return "\n".join(lines)
