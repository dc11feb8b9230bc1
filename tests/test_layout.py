"""The rules of the tree that no other tool checks: who may import what, and what files say.

The layers themselves are import-linter's contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pdserve

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("pdserve", "engines/pdserve_engines")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

ASYNCIO = {
    "pdserve/cli/bench/command.py": "a run on a loop of its own",
    "pdserve/cli/bench/runner.py": "sends requests by a schedule, and takes times",
    "pdserve/cli/chat.py": "one HTTP conversation, on a loop of its own",
    "pdserve/cli/disagg.py": "a question and some answers, on a loop of its own",
    "pdserve/cli/drain.py": "asks again until nodes have gone",
    "pdserve/cli/status.py": "one question to the cluster, on a loop of its own",
    "pdserve/cli/top.py": "the same once a second, and keys in between",
    "pdserve/client/stream.py": "waits for the end of a connection, under a deadline",
    "pdserve/client/transport.py": "deadlines around every wait, pauses between attempts",
    "pdserve/engine/carrier.py": "starts and watches the core's process",
    "pdserve/engine/client.py": "the engine port is asynchronous; one task keeps the core alive",
    "pdserve/engine/connection.py": "the node's end of the core's socket",
    "pdserve/engine/life.py": "deadlines of a core's start and stop",
    "pdserve/engine/shared.py": "starts and watches one process for several cores",
    "pdserve/engine/movers/loop.py": "joins a core and asynchronous transports",
    "pdserve/engine/movers/questions.py": "waits for peers' answers",
    "pdserve/engine/movers/roads.py": "sets paths up under a deadline",
    "pdserve/engine/movers/thread.py": "the transports' own loop",
    "pdserve/frontend/answer.py": "writes to a client as tokens come",
    "pdserve/frontend/api.py": "aiohttp handlers",
    "pdserve/frontend/bodies.py": "reads bodies under a deadline",
    "pdserve/frontend/channel.py": "waits until a worker has taken a request",
    "pdserve/frontend/cluster.py": "waits for routers and for channels to workers",
    "pdserve/frontend/embeddings.py": "inputs wait until those before them are done",
    "pdserve/frontend/explain.py": "ends an explanation at its deadline",
    "pdserve/frontend/generation.py": "one request's life, cancelled with its connection",
    "pdserve/frontend/group.py": "asks siblings under one deadline",
    "pdserve/frontend/models.py": "loads tokenizers off the loop, once per card",
    "pdserve/frontend/small.py": "ends text work at its deadline",
    "pdserve/frontend/service.py": "owns the frontend's tasks and sockets",
    "pdserve/frontend/trials.py": "requests that wait for their turn",
    "pdserve/frontend/warming.py": "waits until a worker has computed something",
    "pdserve/gossip/service.py": "the timer, dials and messages of membership",
    "pdserve/launch/drain.py": "drains the parts of a process in turn",
    "pdserve/launch/parts/frontend.py": "waits until a model is in the frontend's hands",
    "pdserve/launch/process.py": "runs the roles of one process and ends them in order",
    "pdserve/launch/siblings.py": "starts, watches and ends processes",
    "pdserve/net/endpoint.py": "listens, dials and keeps one link per peer",
    "pdserve/net/link.py": "requests and streams that wait for a peer",
    "pdserve/net/memory.py": "a network whose only time is the loop's",
    "pdserve/net/memory_pipe.py": "two transports and the pipes between them",
    "pdserve/net/shell.py": "bytes between a transport and the sans-I/O connection",
    "pdserve/net/streams.py": "waits for a stream's credit",
    "pdserve/net/tcp.py": "sockets",
    "pdserve/observe/loop_lag.py": "measures the loop itself",
    "pdserve/observe/probes.py": "a small listener for /live, /health and /metrics",
    "pdserve/runtime/actor.py": "one task per actor",
    "pdserve/runtime/actors.py": "asks that wait for an answer",
    "pdserve/runtime/context.py": "an actor's timers",
    "pdserve/runtime/node.py": "joins, leaves and rejoins; waits for links and parts",
    "pdserve/runtime/remote.py": "watches that wait for a peer",
    "pdserve/runtime/shutdown.py": "phases under deadlines",
    "pdserve/runtime/status.py": "asks all members under one deadline",
    "pdserve/runtime/streams.py": "waits for a stream's credit and items",
    "pdserve/runtime/supervisor.py": "restarts after a pause",
    "pdserve/runtime/tasks.py": "owns background tasks",
    "pdserve/sim/callers.py": "clients that wait for their requests",
    "pdserve/sim/engine.py": "an engine's steps on a loop's virtual clock",
    "pdserve/sim/faults.py": "faults that last for a while",
    "pdserve/sim/loop.py": "a loop of many processes, in an order drawn by a seed",
    "pdserve/sim/replay/callers.py": "callers that wait for their requests, on virtual time",
    "pdserve/sim/replay/cluster.py": "starts and ends the nodes of a replay",
    "pdserve/sim/replay/run.py": "runs a replay on its loop, and samples load",
    "pdserve/sim/replay/wire.py": "a network of virtual time",
    "pdserve/sim/run.py": "a run's phases, and waiting for rest",
    "pdserve/sim/world.py": "starts and ends virtual processes",
    "pdserve/testing/engine_conformance.py": "a suite over the asynchronous engine port",
    "pdserve/testing/fake_backend.py": "stands in for the asynchronous backend",
    "pdserve/testing/net_conformance.py": "a suite over asynchronous networks",
    "pdserve/testing/net_support.py": "nodes that answer, for tests of the network",
    "pdserve/testing/sinks.py": "lets a test wait for a sequence's end",
    "pdserve/testing/virtual_time.py": "a loop whose clock jumps",
    "pdserve/testing/transfer_conformance.py": "a suite over asynchronous transfers",
    "pdserve/testing/transfer_support.py": "two nodes that transfer, for tests",
    "pdserve/text/pool.py": "hands long text work to threads and processes",
    "pdserve/transfer/cuda_ipc.py": "an ending path waits for its peer, under a deadline",
    "pdserve/transfer/fake.py": "a fake device's only time is the loop's",
    "pdserve/transfer/greeting.py": "the first bytes of a connection, before a thread has it",
    "pdserve/transfer/host.py": "sets paths up under a deadline",
    "pdserve/transfer/path.py": "waits for fences",
    "pdserve/transfer/pull.py": "a Unix socket, and a thread that copies",
    "pdserve/transfer/rdma/rail.py": "hears of completions by a descriptor",
    "pdserve/transfer/rdma/transport.py": "opens adapters off the loop",
    "pdserve/transfer/tcp.py": "connections, and threads that report to the loop",
    "pdserve/worker/channel.py": "sends what a turn of the loop brought at its end",
    "pdserve/worker/handoff/prefill.py": "waits for what is in hand when it drains",
    "pdserve/worker/handoff/prefilling.py": "waits for answers of decode workers",
    "pdserve/worker/model.py": "waits for downloads off the loop",
    "pdserve/worker/service.py": "owns the worker's tasks",
}
"""Every file that imports asyncio, and why it must. Everything else can be tested without a loop;
before adding a line here, try to split the decision from the waiting."""

ENGINES_SEE = {
    "accel",
    "blocks",
    "clock",
    "engine",
    "errors",
    "ids",
    "kv",
    "messages",
    "observe",
    "transfer",
}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """Modules imported anywhere under `node`, except for the type checker only."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for branch in node.orelse:
            yield from imported(branch)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


def importers_of(name: str) -> set[str]:
    return {
        file
        for file, path in SOURCES.items()
        if any(f"{module}.".startswith(f"{name}.") for module in imported(tree_of(path)))
    }


def test_only_named_files_import_asyncio() -> None:
    found = importers_of("asyncio")
    assert found - set(ASYNCIO) == set(), "not in the list: can the decision do without a loop?"
    assert set(ASYNCIO) - found == set(), "no longer imports asyncio: take it off the list"


def test_only_accel_imports_the_extension() -> None:
    assert importers_of("pdserve._native") == set()  # accel loads it by name, to say why it fails
    named = {file for file, path in SOURCES.items() if "pdserve._native" in path.read_text("utf-8")}
    assert named == {"pdserve/accel.py"}


@pytest.mark.parametrize("file", SOURCES)
def test_every_module_says_what_it_is(file: str) -> None:
    assert ast.get_docstring(tree_of(SOURCES[file])), f"{file} has no module docstring"


def test_all_is_honest() -> None:
    assert pdserve.__all__ == sorted(pdserve.__all__)
    public = {name for name in vars(pdserve) if not name.startswith("_")}
    modules = {Path(file).parts[1].removesuffix(".py") for file in SOURCES}
    assert public - modules <= set(pdserve.__all__)
    assert all(hasattr(pdserve, name) for name in pdserve.__all__)


def test_importing_pdserve_is_cheap() -> None:
    assert set(imported(tree_of(ROOT / "pdserve/__init__.py"))) == set()


def test_engines_see_only_what_they_may() -> None:
    parts = {
        Path(file).parts[1].removesuffix(".py") for file in SOURCES if file.startswith("pdserve/")
    }
    forbidden = {f"pdserve.{part}" for part in parts - ENGINES_SEE if not part.startswith("__")}
    (contract,) = (
        c for c in PYPROJECT["tool"]["importlinter"]["contracts"] if c["id"] == "engines-see"
    )
    assert set(contract["forbidden_modules"]) == forbidden


def test_version_is_said_once_and_the_same() -> None:
    assert PYPROJECT["project"]["version"] == pdserve.__version__
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_base_install_has_no_torch() -> None:
    project = PYPROJECT["project"]
    assert not any("torch" in requirement for requirement in project["dependencies"])
    assert importers_of("torch") <= {f for f in SOURCES if f.startswith("engines/")}


@pytest.mark.parametrize("engine", PYPROJECT["project"]["entry-points"]["pdserve.engines"])
def test_entry_points_lead_somewhere(engine: str) -> None:
    target = PYPROJECT["project"]["entry-points"]["pdserve.engines"][engine]
    module, _, attribute = target.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    names = {
        name
        for node in ast.walk(tree_of(Path(spec.origin)))
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert attribute in names
