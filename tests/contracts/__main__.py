"""Says how a release of an engine differs from what pdserve's adapters use of it.

    python -m tests.contracts diff sglang PATH      a wheel, or a folder of source text
    python -m tests.contracts diff vllm             the package installed beside this Python
    python -m tests.contracts show sglang PATH module:Name

`diff` prints one line for each difference and exits with 1 if there is any; with 2 if the release
cannot be read. `show` prints a name as an entry for the data file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contracts.compare import differences
from tests.contracts.contract import ENGINES, load
from tests.contracts.installed import InstalledReader
from tests.contracts.references import ReferenceReader
from tests.contracts.source import SourceReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.contracts.compare import Reader
    from tests.contracts.contract import Contract


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    given = _parser().parse_args(arguments)
    contract = load(given.engine)
    if given.path is None and importlib.util.find_spec(given.engine) is None:
        print(f"{given.engine} is not installed beside this Python", file=sys.stderr)
        return 2
    if given.path is not None and not given.path.exists():
        print(f"{given.path} does not exist", file=sys.stderr)
        return 2
    reader = reader_of(contract, given.path)
    if given.command == "show":
        print(_shown(reader, given.at))
        return 0
    found = differences(contract, reader)
    print("\n".join(found) or f"{len(contract.entries)} names are as in {contract.version}")
    return 1 if found else 0


def reader_of(contract: Contract, path: Path | None) -> Reader:
    """The reader for a wheel or a tree; None: for the installed package."""
    if path is None:
        return InstalledReader()
    manifests = any(".yaml" in entry.source for entry in contract.entries)
    return ReferenceReader(path, contract) if manifests else SourceReader(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.contracts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    diff = commands.add_parser("diff", help="what another release changes")
    show = commands.add_parser("show", help="a name as an entry")
    for command in (diff, show):
        command.add_argument("engine", choices=ENGINES)
    diff.add_argument("path", nargs="?", type=Path)
    show.add_argument("path", type=lambda text: None if text == "-" else Path(text))
    show.add_argument("at", help="module:Name; PATH - means the installed package")
    return parser


def _shown(reader: Reader, at: str) -> str:
    lines = ["[[name]]", f"at = {json.dumps(at)}"]
    lines += _list("values", dict(reader.values(at) or {}))
    lines += _list("fields", reader.fields(at) or {}) or _list(
        "parameters", reader.parameters(at) or {}
    )
    calls = [
        f"{name}({', '.join(_lines(parameters))})"
        for name, parameters in (reader.methods(at) or {}).items()
        if not name.startswith("_")
    ]
    if calls:
        lines += ["methods = [", *(f"  {json.dumps(call)}," for call in calls), "]"]
    return "\n".join(lines)


def _list(key: str, members: Mapping[str, str | None]) -> list[str]:
    if not members:
        return []
    return [f"{key} = [", *(f"  {json.dumps(line)}," for line in _lines(members)), "]"]


def _lines(members: Mapping[str, str | None]) -> list[str]:
    return [name if text is None else f"{name} = {text}" for name, text in members.items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
