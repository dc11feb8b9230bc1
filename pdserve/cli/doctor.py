"""Runs `pdserve doctor`: prints what this machine has, and what pdserve will use of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import TYPE_CHECKING

from pdserve.cli.parser import Parser
from pdserve.launch import exit_codes
from pdserve.launch.machine import read_facts

if TYPE_CHECKING:
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
    parser.own.add_argument("--json", action="store_true", help="As a JSON array.")
    parsed = parser.parse(arguments)
    facts = read_facts()
    if parsed.json:
        print(json.dumps([dataclasses.asdict(fact) for fact in facts], indent=2))
    else:
        print(report(facts, unicode=(sys.stdout.encoding or "").lower().startswith("utf")))
    bad = any(fact.state == "problem" for fact in facts)
    return exit_codes.FAILED if bad else exit_codes.OK


def report(facts: list[MachineFact], *, unicode: bool = True) -> str:
    """The facts as a person reads them, by section."""
    marks = _MARKS if unicode else _PLAIN_MARKS
    width = max(len(fact.name) for fact in facts)
    lines: list[str] = []
    for section, members in itertools.groupby(facts, lambda fact: fact.section):
        lines.append(section)
        lines += [f"  {marks[fact.state]} {fact.name:<{width}}  {fact.value}" for fact in members]
    return "\n".join(lines)
