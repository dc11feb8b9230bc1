"""Runs `pdserve tier ACTION`: looks into KV tiers, checks, empties and warms them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.console.layout import Table, lines_of
from pdserve.cli.console.reach import add_reach, reach_of
from pdserve.cli.console.tier_rows import tier_table
from pdserve.cli.outputs import printable
from pdserve.cli.parser import Parser, value_of
from pdserve.cli.status_tables import age, as_json
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.launch.config.resolve import closest_match
from pdserve.launch.config.units import approximate_size, parse_duration

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pdserve.cli.tier.survey import BlockCheck, WorkerPart

__all__ = ["run"]

_DESCRIPTION: Final = """\
Look into the KV tiers below the workers' devices, and manage them.

status         size, use, retention, hits and trouble of every worker's tiers
inspect DIR    what a directory of --disk-kv holds, also without a worker
verify DIR     read every block there and compare it with its checksum
drop           have workers forget KV: --all, --tenant, --salt, --older
warm           send prompts for one token each, so that their KV is cached; or, with
               --from, have workers pull what another one has cached"""
_LONGEST_TTL: Final = 86400.0
_WIDE: Final = 1000


def run(arguments: list[str]) -> int:
    """Runs one action; the exit status is 0 if it was done and nothing is wrong."""
    parsed = _parser().parse(arguments)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "status": _status,
        "inspect": _inspect,
        "verify": _verify,
        "drop": _drop,
        "warm": _warm,
    }
    if parsed.action not in actions:
        close = closest_match(parsed.action, actions)
        hint = f", did you mean {close!r}?" if close else f": use one of {', '.join(actions)}"
        raise ConfigError(f"{parsed.action!r} is unknown{hint}")
    if parsed.where and parsed.action not in ("inspect", "verify"):
        raise ConfigError(f"{parsed.action} takes no directory (try pdserve tier --help)")
    return actions[parsed.action](parsed)


def _parser() -> Parser:
    parser = Parser("pdserve tier", _DESCRIPTION)
    add = parser.own.add_argument
    add("action", metavar="ACTION", help="One of the above.")
    add("where", metavar="DIR", nargs="?", default="", help="For inspect and verify.")
    add("--json", action="store_true", help="As JSON: status, inspect, verify.")
    add("--all", action="store_true", help="drop: everything.")
    text = "drop: of an API key's tenant with cache isolation; may be repeated."
    add("--tenant", metavar="NAME", action="append", default=[], help=text)
    text = "drop: of requests with this cache_salt and no such tenant; may be repeated."
    add("--salt", metavar="TEXT", action="append", default=[], help=text)
    text = "drop: what nothing has used for so long, below the device."
    add("--older", metavar="TIME", default="", help=text)
    text = "drop, warm: only this worker; may be repeated."
    add("--worker", metavar="NODE", action="append", default=[], help=text)
    text = "warm: a text, .json with a request's body, or .jsonl with many; may be repeated."
    add("--prompt", metavar="FILE", action="append", default=[], help=text)
    text = "warm: the worker whose blocks the others, or --worker, are to pull."
    add("--from", metavar="NODE", dest="source", default="", help=text)
    add("--ttl", metavar="TIME", default="", help="warm: cache_ttl of the requests.")
    environ = os.environ
    url = environ.get("PDSERVE_URL", "http://127.0.0.1:8000")
    add("--url", metavar="URL", default=url, help=f"warm: the server. [{url}]")
    key = environ.get("PDSERVE_API_KEY", "")
    add("--api-key", metavar="KEY", default=key, help="warm: if the server requires one.")
    add("--model", metavar="NAME", default="", help="warm: [the first one served]")
    add_reach(parser)
    return parser


# ---------------------------------------------------------------------- a cluster


def _status(parsed: argparse.Namespace) -> int:
    reach = reach_of(parsed)

    async def ask() -> int:
        visitor = reach.client()
        try:
            status = await visitor.status()
        finally:
            await visitor.close()
        if parsed.json:
            tiers = {m.node: as_json(m.report.tiers) for m in status.members if m.report}
            print(json.dumps({node: found for node, found in tiers.items() if found}, indent=2))
            return exit_codes.OK
        lines = lines_of(tier_table(status), _WIDE)
        print("\n".join(lines) or "no worker has KV tiers below its device")
        return exit_codes.OK

    return asyncio.run(ask())


def _drop(parsed: argparse.Namespace) -> int:
    from pdserve.cli.tier.drop import drop, order_of

    return asyncio.run(drop(reach_of(parsed), order_of(parsed), parsed.worker))


# ---------------------------------------------------------------------- a directory


def _inspect(parsed: argparse.Namespace) -> int:
    from pdserve.cli.tier.survey import read_parts

    parts = read_parts(_directory(parsed))
    if parsed.json:
        print(json.dumps([_part_as_json(part) for part in parts], indent=2))
    elif not parts:
        print("no worker has stored KV here")
    else:
        print("\n".join(lines_of(_part_table(parts, time.time()), _WIDE)))
    return exit_codes.OK


def _directory(parsed: argparse.Namespace) -> Path:
    if not parsed.where:
        raise ConfigError(f"name the directory of --disk-kv: pdserve tier {parsed.action} DIR")
    return Path(parsed.where).expanduser()


def _part_table(parts: list[WorkerPart], now: float) -> Table:
    heads = (
        *("PART", "OWNER", "STATE", "MODEL", "DTYPE", "RANK", "BLOCKS", "BYTES", "ON DISK"),
        *("SEGMENTS", "CHAINS", "WRITTEN", "OPENED"),
    )
    return Table(heads, [_part_row(part, now) for part in parts])


def _part_row(part: WorkerPart, now: float) -> tuple[str, ...]:
    state, disk = "in use" if part.in_use else "free", approximate_size(part.disk)
    about = part.fingerprint
    if about is None:
        return (part.name, "", state, "of another release", *("",) * 4, disk, *("",) * 4)
    return (
        *(part.name, part.owner, state, about.content[:12], about.dtype),
        f"{about.rank + 1}/{about.ranks}",
        str(part.records),
        approximate_size(part.payload),
        disk,
        f"{part.segments} ({part.sealed} sealed)",
        str(part.chains),
        f"{age(now - part.newest)} ago" if part.newest else "-",
        f"{age(now - part.opened)} ago",
    )


def _part_as_json(part: WorkerPart) -> dict[str, Any]:
    found = dataclasses.asdict(part)
    about = part.fingerprint
    if about is not None:
        found["fingerprint"] = dataclasses.asdict(about) | {"secret_id": about.secret_id.hex()}
    return found


def _verify(parsed: argparse.Namespace) -> int:
    from pdserve.cli.tier.survey import read_parts, verify_part

    root, verdicts = _directory(parsed), {}
    for part in read_parts(root):
        verdicts[part.name] = verify_part(root / part.name, _progress(part))
        if not parsed.json:
            print(printable(f"{part.name}: {_judged(part, verdicts[part.name])}"))
    if parsed.json:
        found = {name: dataclasses.asdict(verdict) for name, verdict in verdicts.items()}
        print(json.dumps(found, indent=2))
    elif not verdicts:
        print("no worker has stored KV here")
    return exit_codes.FAILED if any(one.bad for one in verdicts.values()) else exit_codes.OK


def _progress(part: WorkerPart) -> Callable[[BlockCheck], None]:
    """Shows how much was read, where somebody watches."""

    def told(verdict: BlockCheck) -> None:
        done = (
            f"\r{part.name}: {approximate_size(verdict.read)} of {approximate_size(part.payload)}"
        )
        print(f"{done}  ", end="", file=sys.stderr, flush=True)

    return told if sys.stderr is not None and sys.stderr.isatty() else lambda verdict: None


def _judged(part: WorkerPart, verdict: BlockCheck) -> str:
    if part.fingerprint is None:
        return "of another release, not read"
    text = f"{verdict.whole} blocks are whole ({approximate_size(verdict.read)}"
    if verdict.seconds:
        text += f", {approximate_size(int(verdict.read / verdict.seconds))}/s"
    text += ")"
    if verdict.vanished:
        text += f"; {verdict.vanished} were removed meanwhile"
    reasons = {
        "crc": "do not match their checksum",
        "format": "have no header of theirs",
        "io": "cannot be read",
        "absent": "are gone",
    }
    for reason, count in verdict.bad.items():
        text += f"; {count} {reasons[reason]}"
    return text


# ---------------------------------------------------------------------- a server


def _warm(parsed: argparse.Namespace) -> int:
    if parsed.source:
        from pdserve.cli.tier.warm_from import warm_from

        if parsed.prompt or parsed.ttl:
            raise ConfigError("--from takes neither --prompt nor --ttl: it sends no request")
        return asyncio.run(warm_from(reach_of(parsed), parsed.source, parsed.worker))
    from pdserve.cli.tier.warm import read_prompts, warm
    from pdserve.client.client import Client

    prompts, ttl = read_prompts(parsed.prompt), _ttl(parsed.ttl)

    async def send() -> int:
        key, model = parsed.api_key or None, parsed.model or None
        async with Client(parsed.url, key, model=model) as client:
            return await warm(client, prompts, parsed.worker, ttl)

    return asyncio.run(send())


def _ttl(text: str) -> float:
    if not text:
        return 0.0
    seconds = value_of("--ttl", parse_duration, text)
    if seconds > _LONGEST_TTL:
        raise ConfigError("--ttl: a day is the most that is kept")
    return seconds
