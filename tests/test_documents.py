"""Documents that describe the tree are compared with it: glossary, architecture, index."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENGINES = ROOT / "engines/pdserve_engines"

MAX_WORDS = 66
TASKS = {
    "add a sampling parameter": "pdserve/messages/request.py",
    "add a transfer back end": "pdserve/transfer/base.py",
    "add a metric": "pdserve/observe/metrics.py",
    "add a routing policy": "pdserve/router/policies/base.py",
    "add a KV tier": "pdserve/kv/tiers/lower_tiers.py",
    "add a message between roles": "pdserve/messages",
    "add a CLI command": "pdserve/cli/main.py",
    "add a model family": "engines/pdserve_engines/torch/model_loader/config.py",
    "add an API field": "pdserve/protocols/completion_requests.py",
    "add a simulated fault": "tests/worlds/faults.py",
}


def section(document: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return document.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def folders(room: Path) -> set[str]:
    return {path.name for path in room.iterdir() if path.is_dir() and path.name[0] not in "_."}


def listed() -> dict[str, set[str]]:
    """Folders of ARCHITECTURE's list, each with the folders inside of it that have a line."""
    found: dict[str, set[str]] = {}
    for indent, name in re.findall(
        r"^    (  )?([a-z_]+) +\S", section(ARCHITECTURE, "Folders, highest layer first"), re.M
    ):
        if indent:
            found[list(found)[-1]].add(name)
        else:
            found[name] = set()
    return found


def test_the_glossary_stays_short_and_complete() -> None:
    table = rows(GLOSSARY)
    words = [row[0] for row in table]
    assert len(words) <= MAX_WORDS
    assert words == sorted(set(words), key=str.casefold)
    assert all(len(row) == 5 and all(row) for row in table)
    assert all(row[1].endswith(".") for row in table)


def test_words_of_the_glossary_occur_in_the_tree() -> None:
    files = [
        *(ROOT / "pdserve").rglob("*.py"),
        *(path for path in ROOT.glob("docs/*.md") if path.name != "glossary.md"),
    ]
    tree = "\n".join(path.read_text(encoding="utf-8") for path in files)
    tree = " ".join(re.sub(r"[_-]", " ", tree).split()).casefold()
    missing = [
        row[0]
        for row in rows(GLOSSARY)
        if not re.search(rf"\b{re.escape(row[0].casefold())}(s|es)?\b", tree)
    ]
    assert missing == []


def test_documents_link_the_glossary() -> None:
    assert "(docs/glossary.md)" in README
    assert "(docs/glossary.md)" in ARCHITECTURE


def degradations() -> set[str]:
    """Reasons of degradation in the code, as far as they are written out."""
    found: set[object] = set()
    for path in (ROOT / "pdserve").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "egradations.add(" not in text:
            continue
        tree = ast.parse(text)
        constants = {
            node.target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("degradations.add"):
                reason = call.args[0]
                found.add(constants.get(ast.unparse(reason)) or getattr(reason, "value", None))
    return {reason for reason in found if isinstance(reason, str)}


def test_every_degradation_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    explained = {row[0].strip("`") for row in rows(section(text, "Health"))}
    found = degradations()
    assert len(found) >= 14
    assert found <= explained


def test_the_folder_list_is_the_tree() -> None:
    there = {name: folders(ROOT / "pdserve" / name) for name in folders(ROOT / "pdserve")}
    assert listed() == {**there, "engines": folders(ENGINES)}


def test_the_picture_has_every_folder() -> None:
    picture = section(ARCHITECTURE, "One picture").split("\nPlain ", 1)[0]
    assert set(re.findall(r"\b([a-z_]+)/", picture)) == set(listed())


def test_what_is_planned_is_not_there_yet() -> None:
    planned = re.findall(r"\| `(\S+)`: not built yet \|", ARCHITECTURE)
    assert planned
    assert [path for path in planned if (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_modules_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8").replace("pdserve/observe/tracing.py", "")
    places = [ROOT, ROOT / "pdserve", ENGINES, *(ROOT / "pdserve").rglob("*/")]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    lost = [name for name in named if not any((place / name).exists() for place in places)]
    assert lost == []


def test_the_index_leads_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", section(README, "Where does X happen?"))
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(("task", "file"), TASKS.items())
def test_each_common_task_has_its_row(task: str, file: str) -> None:
    index = {row[0]: row[1] for row in rows(section(README, "Where does X happen?"))}
    assert f"]({file})" in index[task]
