"""The rules of the tree that no other tool checks: imports, docstrings, sizes of folders, mirrors.

The layers themselves are import-linter's contract in pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections import Counter
from functools import cache
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
    "engines/pdserve_engines/loop_thread.py": "a loop for engines whose interface is asynchronous",
    "engines/pdserve_engines/sglang/event_feed.py": "a deadline for a replay",
    "pdserve/cli/bench/command.py": "a run on a loop of its own",
    "pdserve/cli/bench/runner.py": "sends requests by a schedule, and takes times",
    "pdserve/cli/chat.py": "one HTTP conversation, on a loop of its own",
    "pdserve/launch/cluster/admin_door.py": "visitors, and the nodes that they are led to",
    "pdserve/launch/cluster/door_network.py": "a Unix socket, under a deadline",
    "pdserve/cli/disagg.py": "a question and some answers, on a loop of its own",
    "pdserve/cli/tier/command.py": "some questions to workers, on a loop of its own",
    "pdserve/cli/drain.py": "asks again until nodes have gone",
    "pdserve/cli/mode.py": "asks again until a worker has changed",
    "pdserve/cli/planner.py": "some questions to planners, on a loop of its own",
    "pdserve/cli/status.py": "one question to the cluster, on a loop of its own",
    "pdserve/cli/top.py": "the same once a second, and keys in between",
    "pdserve/cli/trace.py": "asks once, or once a second for a while",
    "pdserve/client/stream.py": "waits for the end of a connection, under a deadline",
    "pdserve/client/transport.py": "deadlines around every wait, pauses between attempts",
    "pdserve/observe/scrapes.py": "makes one page at a time",
    "pdserve/engine/client.py": "the engine port is asynchronous; one task keeps the core alive",
    "pdserve/engine/core_connection.py": "the node's end of the core's socket",
    "pdserve/engine/core_run.py": "deadlines of a core's start and stop",
    "pdserve/engine/process.py": "starts and watches a process of cores",
    "pdserve/engine/shared_process.py": "starts and watches one process for several cores",
    "pdserve/engine_core/kv_transfer/control_socket.py": "the transports' end of a socket",
    "pdserve/engine_core/kv_transfer/loop_connector.py": "joins a core and asynchronous transports",
    "pdserve/engine_core/kv_transfer/control_rpc.py": "waits for peers' answers",
    "pdserve/engine_core/kv_transfer/peer_paths.py": "sets paths up under a deadline",
    "pdserve/engine_core/kv_transfer/thread_connector.py": "the transports' own loop",
    "pdserve/frontend/output/response_builder.py": "writes to a client as tokens come",
    "pdserve/frontend/api/app.py": "aiohttp handlers",
    "pdserve/frontend/http/body_reader.py": "reads bodies under a deadline",
    "pdserve/frontend/dispatch/worker_stream.py": "waits until a worker has taken a request",
    "pdserve/frontend/dispatch/cluster_members.py": "waits for changes of the cluster",
    "pdserve/frontend/dispatch/router_client.py": "waits for routers",
    "pdserve/frontend/output/embedding_response.py": "inputs wait until those before them are done",
    "pdserve/frontend/active_requests.py": "one request's life, cancelled with its connection",
    "pdserve/frontend/generation.py": "waits for workers and for tokens",
    "pdserve/frontend/images/fetcher.py": "HTTP under a deadline",
    "pdserve/frontend/images/loader.py": "loads the images of a request at the same time",
    "pdserve/frontend/api/metrics_group.py": "asks siblings under one deadline",
    "pdserve/frontend/model_registry.py": "loads tokenizers off the loop, once per card",
    "pdserve/frontend/service.py": "owns the frontend's tasks and sockets",
    "pdserve/frontend/fair_semaphore.py": "tenants that wait for their turn",
    "pdserve/frontend/dispatch/poison_isolation.py": "requests that wait for their turn",
    "pdserve/frontend/dispatch/migration/kv_prewarm.py": "waits until KV is computed",
    "pdserve/gossip/service.py": "the timer, dials and messages of membership",
    "pdserve/launch/roles/frontend.py": "waits until a model is in the frontend's hands",
    "pdserve/launch/process.py": "runs the roles of one process and ends them in order",
    "pdserve/launch/frontend_processes.py": "starts, watches and ends processes",
    "pdserve/launch/cluster/advertise_check.py": "asks for a name again after a while",
    "pdserve/net/transport/bounded_acceptor.py": "connections until it is known whose they are",
    "pdserve/net/endpoint.py": "listens, dials and keeps one link per peer",
    "pdserve/net/link.py": "requests and streams that wait for a peer",
    "pdserve/net/transport/memory.py": "a network whose only time is the loop's",
    "pdserve/net/transport/memory_pipe.py": "two transports and the pipes between them",
    "pdserve/name_lookup.py": "waits for a thread that looks up a name",
    "pdserve/net/connection_driver.py": "bytes between a transport and the sans-I/O connection",
    "pdserve/net/transport/tcp.py": "sockets",
    "pdserve/observe/loop_lag.py": "measures the loop itself",
    "pdserve/observe/probes.py": "a small listener for /live, /health and /metrics",
    "pdserve/planner/service.py": "ticks, and decisions in a thread",
    "pdserve/planner/driver/actuator_watch.py": "asks an actuator again and again",
    "pdserve/runtime/orders/drain.py": "drains the parts of a process in turn",
    "pdserve/runtime/node.py": "joins, leaves and rejoins; waits for links and parts",
    "pdserve/runtime/peers/local_link.py": "requests that wait for a node of the same process",
    "pdserve/runtime/peers/peer_ref.py": "asks many nodes under one deadline",
    "pdserve/runtime/supervisor.py": "restarts after a pause",
    "pdserve/runtime/tasks.py": "owns background tasks",
    "pdserve/sim/engine.py": "an engine's steps on a loop's virtual clock",
    "pdserve/sim/replay/trace_clients.py": "callers that wait for their requests, on virtual time",
    "pdserve/sim/replay/cluster.py": "starts and ends the nodes of a replay",
    "pdserve/sim/replay/run.py": "runs a replay on its loop, and samples load",
    "pdserve/sim/replay/kv_network.py": "a network of virtual time",
    "pdserve/sim/replay/planner_scaler.py": "begins and ends with its loop",
    "pdserve/sim/replay/virtual_actuator.py": "starts and stops that take virtual time",
    "pdserve/sim/replay/worker_orders.py": "a drain whose clock is the loop's",
    "pdserve/testing/actuators/fake.py": "calls that take time, or are never answered",
    "pdserve/testing/actuators/suite.py": "a suite over the asynchronous actuator port",
    "pdserve/testing/engine_conformance.py": "a suite over the asynchronous engine port",
    "pdserve/testing/sinks.py": "lets a test wait for a sequence's end",
    "pdserve/testing/thread_launcher.py": "waits for the thread of a core",
    "pdserve/testing/virtual_time.py": "a loop whose clock jumps",
    "pdserve/testing/transfer_conformance.py": "a suite over asynchronous transfers",
    "pdserve/testing/transfer_support.py": "two nodes that transfer, for tests",
    "pdserve/text/fair_thread_pool.py": "waits for the threads that text work is handed to",
    "pdserve/text/text_pool.py": "hands long text work to threads and processes",
    "pdserve/tracing/export/exporter.py": "batches, pauses and slices of a background export",
    "pdserve/transfer/same_host/cuda_ipc.py": "an ending path waits for its peer, under a deadline",
    "pdserve/testing/fake_rdma.py": "a fake device's only time is the loop's",
    "pdserve/transfer/tcp/handshake.py": "the first bytes of a connection, before a thread has it",
    "pdserve/transfer/transport_base.py": "sets paths up under a deadline",
    "pdserve/transfer/path_base.py": "waits for fences",
    "pdserve/transfer/same_host/pull_transport.py": "a Unix socket, and a thread that copies",
    "pdserve/transfer/rdma/rail.py": "hears of completions by a descriptor",
    "pdserve/transfer/rdma/transport.py": "opens adapters off the loop",
    "pdserve/transfer/tcp/transport.py": "connections, and threads that report to the loop",
    "pdserve/agent/service.py": "looks at workers every half second",
    "pdserve/planner/actuators/base.py": "a deadline for every call",
    "pdserve/planner/actuators/commands.py": "other programs' commands, under a deadline",
    "pdserve/planner/actuators/kubernetes/api.py": "HTTP, and files that are read off the loop",
    "pdserve/planner/actuators/kubernetes/deployments.py": "one change of a deployment at a time",
    "pdserve/planner/actuators/systemd.py": "one start or stop at a time",
    "pdserve/planner/actuators/slurm/commands.py": "calls that wait for their turn",
    "pdserve/planner/actuators/slurm/steps.py": "reads and writes records off the loop",
    "pdserve/worker/request_streams.py": "sends what a turn of the loop brought at its end",
    "pdserve/worker/disagg/prefill_handler.py": "waits for what is in hand when it drains",
    "pdserve/worker/kv_fetch/push.py": "waits for pulls, and for those of heirs",
    "pdserve/worker/disagg/prefill_job.py": "waits for answers of decode workers",
    "pdserve/worker/model.py": "waits for downloads off the loop",
    "pdserve/worker/model_source.py": "reads checkpoints off the loop",
    "pdserve/worker/service.py": "owns the worker's tasks",
    "pdserve/worker/mode/switch.py": "waits until streams have moved, and for a token",
}
"""Every file that imports asyncio, and why it must. Everything else can be tested without a loop;
before adding a line here, try to split the decision from the waiting."""

ENGINES_SEE = {
    "accel",
    "backoff",
    "blocks",
    "clock",
    "engine_core",
    "errors",
    "ids",
    "kv",
    "limits",
    "messages",
    "observe",
    "perf_model",
    "token_ids",
    "transfer",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(node: ast.AST) -> Iterator[str]:
    """Modules imported anywhere under `node`, except for the type checker only."""
    if isinstance(node, ast.expr):
        return
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


def test_every_module_says_what_it_is() -> None:
    silent = [file for file, path in SOURCES.items() if not ast.get_docstring(tree_of(path))]
    assert not silent, "without a module docstring"


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


# ---------------------------------------------------------------- rooms

SCENARIO_FOLDERS = {
    "bench": "measurements as programs",
    "chaos": "faults under load",
    "compat": "what other releases see",
    "conformance": "suites over every implementation",
    "contracts": "interfaces of foreign engines",
    "e2e": "whole processes",
    "examples": "the examples",
    "fuzz": "fuzzers",
    "rdma": "needs adapters",
    "soak": "hours of work",
    "support": "tests of the tests' own helpers",
    "worlds": "clusters in virtual time",
}
"""Folders of tests that are sorted by kind of run and mirror no package."""

SCENARIOS = {
    "planner/test_plant.py": "a planner and its cluster for thousands of ticks",
    "worker/mode/test_planted_bugs.py": "bugs that scenarios of a mode change must find",
    "engine/test_handoff_between_engines.py": "two engines hand prompts over, transports included",
    "engine/test_stalled_cores.py": "the client, the watchdog and a core that hangs",
    "engine_core/kv_fetch/test_random_fetches.py": "random fetches between cores, and planted bugs",
    "engine_core/kv_fetch/test_real_transports.py": "fetches over shared memory and TCP",
    "engine_core/kv_fetch/test_requests_that_fetch.py": "scheduler, onboarder and puller together",
    "engine_core/kv_transfer/test_handoff.py": "two cores, sender and receiver together",
    "engine_core/kv_transfer/test_handoff_faults.py": "the same with lost and wrong parts",
    "engine_core/kv_transfer/test_planted_bugs.py": "bugs that courses of two cores must find",
    "engine_core/kv_transfer/test_random_handoffs.py": "random handoffs between cores",
    "engine_core/test_exactness.py": "tokens under every schedule",
    "engine_core/test_json_schemas.py": "structured output over many schemas",
    "engine_core/test_random_schedules.py": "random requests through scheduler and pool",
    "engine_core/test_random_tiers.py": "the same with tiers below, which fail",
    "engine_core/tiers/test_planted_bugs.py": "bugs that random lives with tiers must find",
    "engines/sim/test_handoff.py": "sim engines hand prompts over",
    "engines/sim/test_steps_at_once.py": "core and executor with several steps in one",
    "engines/sim/test_structured_output.py": "grammars through the whole engine",
    "engines/tensorrt_llm/test_behaviours.py": "the fake against its sources and the contract",
    "engines/tensorrt_llm/test_planted_bugs.py": "bugs that the tests must find",
    "engines/torch/cuda/test_compiled_kernels.py": "kernels, compiled for GPUs that are not here",
    "engines/torch/test_aborts.py": "a request is aborted before each of its steps",
    "engines/torch/test_layer_groups.py": "layers that come while a step computes",
    "engines/torch/test_engine_core.py": "the executor under a core",
    "engines/torch/test_handoff.py": "torch engines hand prompts over",
    "engines/torch/test_kv_tiers.py": "prefixes from every tier and from another engine",
    "engines/torch/test_loading.py": "memory and pauses of loading, in a process of its own",
    "engines/torch/test_migration.py": "a request moves between torch engines",
    "engines/torch/tensor_parallel/test_gpus.py": "ranks on GPUs, where there are some",
    "engines/torch/tensor_parallel/test_schedules.py": "ranks under the real scheduler",
    "engines/torch/tensor_parallel/test_transfers.py": "KV between engines of unequal sizes",
    "engines/torch/test_weight_sharing.py": "several executors of one checkpoint",
    "engines/vllm/test_planted_bugs.py": "bugs that the other tests must see",
    "engines/vllm/test_real_answers.py": "the real vLLM: answers equal to those without pdserve",
    "engines/vllm/test_real_disagg.py": "the real vLLM: prompts computed by one engine for another",
    "engines/vllm/test_real_engine.py": "the real vLLM: the suite of engines, and processes",
    "engines/vllm/test_real_grammars.py": "the real vLLM: grammars and reasoning",
    "engines/vllm/test_real_images.py": "the real vLLM: images",
    "engines/vllm/test_real_vision_families.py": "the real vLLM: images, other families",
    "engines/vllm/test_real_kv_events.py": "the real vLLM: events against its pool",
    "engines/vllm/test_real_fetches.py": "the real vLLM: a prefix that another engine has",
    "engines/vllm/test_real_disagg_tiers.py": "the real vLLM: tiers of prefill and decode workers",
    "engines/vllm/test_real_tiers.py": "the real vLLM: blocks from host memory and disk",
    "engines/vllm/test_real_loras.py": "the real vLLM: adapters",
    "engines/vllm/test_real_sampling.py": "the real vLLM: every sampling field",
    "engines/vllm/test_real_tensor_parallel.py": "the real vLLM with two ranks, and KV between",
    "engines/vllm/test_real_vectors.py": "the real vLLM: embeddings",
    "engines/vllm/test_soak.py": "many requests through one engine",
    "frontend/api/test_request_fields.py": "fields of every API",
    "frontend/api/test_routing_headers.py": "headers of every API",
    "frontend/api/test_translations.py": "translations and wording of the other APIs",
    "frontend/dispatch/test_exact_answers.py": "answers while workers die and requests move",
    "frontend/dispatch/test_recorded_phases.py": "what is recorded of requests that move",
    "frontend/http/test_slow_clients.py": "clients that do not read",
    "frontend/output/test_reasoning.py": "reasoning through all responses",
    "frontend/output/test_stream_equals_unary.py": "both kinds of responses beside each other",
    "frontend/output/test_tool_calls.py": "tool calls through all responses",
    "frontend/test_cycles.py": "what ended requests and connections leave to the garbage collector",
    "frontend/test_docs.py": "docs/api.md and docs/fields.md",
    "frontend/test_fuzz.py": "a bounded run of the fuzzers",
    "frontend/test_hostile.py": "hostile clients",
    "gossip/test_fuzz.py": "a bounded run of the fuzzers",
    "gossip/test_world.py": "many members in virtual time",
    "kv/tiers/test_oracles.py": "placement and eviction over whole traces",
    "kv/tiers/test_planted_bugs.py": "bugs that the other tests must see",
    "kv/tiers/disk/test_planted_bugs.py": "bugs that the other tests must see",
    "launch/roles/test_roles.py": "the roles of one process together",
    "launch/test_docs.py": "docs/configuration.md and docs/operations.md",
    "launch/test_fuzz.py": "a bounded run of the fuzzers",
    "messages/test_fuzz.py": "a bounded run of the fuzzers",
    "messages/test_records.py": "rules for all records",
    "net/test_abuse.py": "hostile peers",
    "net/test_chaos.py": "links that break",
    "protocols/test_api_records.py": "records of the other APIs",
    "protocols/test_fuzz.py": "a bounded run of the fuzzers",
    "router/prefix_index/test_cluster.py": "indexes of several routers over a network that fails",
    "router/test_bookings_work.py": "second file of bookings: work until the first token",
    "router/test_core_queueing.py": "second file of core: requests that wait",
    "router/test_core_tiers.py": "third file of core: prefixes below the device and elsewhere",
    "router/test_planted_bugs.py": "bugs that the tests of sources and tiers must find",
    "runtime/topics/test_fuzz.py": "a bounded run of the fuzzers",
    "runtime/topics/test_machines.py": "random runs of all topic machines",
    "sim/replay/test_tiers.py": "replays with tiers and fetches",
    "sim/test_engine_transfer.py": "engines in virtual time hand prompts over",
    "sim/workloads/test_published.py": "known facts of the public traces",
    "test_layout.py": "this file",
    "test_documents.py": "ARCHITECTURE.md, docs/glossary.md and the index of README.md",
    "test_reliability.py": "docs/reliability.md",
    "test_start_imports.py": "what each role imports until it has joined",
    "text/chat/test_public_templates.py": "templates of many families, beside transformers",
    "text/test_models_page.py": "docs/models.md",
    "text/tool_parsers/test_enforced_schemas.py": "every format enforces random schemas",
    "text/tool_parsers/test_formats.py": "every format through one suite",
    "transfer/test_host_kernels.py": "native/host_kernels.cpp",
    "transfer/test_hostile_peer.py": "hostile peers of every back end",
    "transfer/test_processes.py": "transfers between processes",
    "transfer/test_tcp_tls.py": "tcp with certificates",
    "wire/test_fuzz.py": "a bounded run of the fuzzers",
    "wire/test_golden.py": "bytes that must not change",
    "wire/test_random_sessions.py": "two connections, random work",
    "wire/test_streams.py": "two connections and their streams",
    "wire/test_version_skew.py": "peers of different releases",
    "worker/disagg/queue/test_item_life.py": "an item of the prefill queue at both ends",
    "worker/disagg/test_end_to_end.py": "decode and prefill worker together",
    "worker/disagg/test_every_cell.py": "each cell of the state table",
    "worker/disagg/test_migration.py": "a decoding request moves",
    "worker/disagg/test_prefill_available.py": "a decision of the decode handler",
    "worker/disagg/test_random_worlds.py": "random events at both tables",
}
"""Tests that mirror no module, and what they are about instead."""

LARGE_FOLDERS = {
    "pdserve/cli": "a file per sub-command",
    "pdserve/messages": "a file per conversation",
    "pdserve/observe": "a file per source of numbers",
    "pdserve/router/policies": "a file per policy",
}
FOLDER_SIZE = 15


def mirrored(test: Path) -> bool:
    """The module or package that a test is named after exists."""
    room = ROOT / ("engines/pdserve_engines" if test.parts[0] == "engines" else "pdserve")
    inside = test.parent.parts[1:] if test.parts[0] == "engines" else test.parent.parts
    source = room.joinpath(*inside, test.stem.removeprefix("test_"))
    return source.with_suffix(".py").exists() or (source / "__init__.py").exists()


def test_tests_mirror_the_source() -> None:
    tests = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    found = {
        test.as_posix()
        for test in tests
        if test.parts[0] not in SCENARIO_FOLDERS and not mirrored(test)
    }
    assert found - set(SCENARIOS) == set(), "named after no module, and no scenario of the list"
    assert set(SCENARIOS) - found == set(), "gone, or named after a module: take it off the list"


def test_folders_of_tests_are_packages_or_scenarios() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    packages = {path.parent.name for path in (ROOT / "pdserve").glob("*/__init__.py")}
    assert folders - packages - {"engines"} == set(SCENARIO_FOLDERS)


def test_folders_are_small() -> None:
    sizes = Counter(
        Path(file).parent.as_posix() for file in SOURCES if not file.endswith("/__init__.py")
    )
    large = {folder for folder, size in sizes.items() if size > FOLDER_SIZE}
    assert large - set(LARGE_FOLDERS) - {"pdserve"} == set(), "make a sub-folder of one idea"
    assert set(LARGE_FOLDERS) - large == set(), "no longer large: take it off the list"


def only_re_exports(tree: ast.Module) -> bool:
    """Nothing is defined at the top but names of other modules."""
    statements = [
        node
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    ]
    return not statements and any(isinstance(node, ast.ImportFrom) for node in tree.body)


def test_no_module_only_re_exports() -> None:
    """Packages may, in their `__init__`: it is their public face."""
    found = [
        file
        for file, path in SOURCES.items()
        if not file.endswith("/__init__.py") and only_re_exports(tree_of(path))
    ]
    assert found == [], "import from where the name is defined"


# ---------------------------------------------------------------- class names

_MIRROR = "the client's error for the status of the server's"
SHARED_CLASS_NAMES = {
    "DeadlineExceeded": _MIRROR,
    "Engine": "the engine port, and vLLM's engine behind it",
    "Forbidden": _MIRROR,
    "InvalidRequest": _MIRROR,
    "Overloaded": _MIRROR,
    "PlannerConfig": "the planner of the cluster, and the planner of KV tiers",
    "RateLimited": _MIRROR,
    "Unauthorized": _MIRROR,
    "Unavailable": _MIRROR,
}
"""Names that two public classes have, and why."""


def test_names_of_public_classes_are_unique() -> None:
    """So that a name in a traceback or a search leads to one place."""
    names = Counter(
        node.name
        for path in SOURCES.values()
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    shared = {name for name, count in names.items() if count > 1}
    assert shared - set(SHARED_CLASS_NAMES) == set(), "another class has this name"
    assert set(SHARED_CLASS_NAMES) - shared == set(), "unique by now: take it off the list"


# ---------------------------------------------------------------- docstrings

REFERENCE = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
"""A dotted name in backticks, perhaps with arguments."""
ONLY_SEE = re.compile(r"See (`[^`]*`|above|below)\.?")
FILE_ENDINGS = {"cu", "hpp", "json", "md", "py", "toml", "txt"}
NO_MODULES = {
    *PYPROJECT["project"]["entry-points"],
    "memory.high",  # a file of control groups
    "pdserve._native",  # the extension
    *("pdserve.tool_parsers", "pdserve.reasoning_parsers"),  # groups that other packages fill
}
MODULE_OF = {
    file: file.removeprefix("engines/")
    .removesuffix(".py")
    .removesuffix("/__init__")
    .replace("/", ".")
    for file in SOURCES
}
MODULES = {module: file for file, module in MODULE_OF.items()}


def docstrings(file: str) -> Iterator[tuple[int, str, str]]:
    """Line, owner and text of every docstring of a file, those of fields and aliases included."""

    def below(node: ast.AST, owner: str) -> Iterator[tuple[int, str, str]]:
        last = owner
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from below(child, f"{owner}.{child.name}" if owner else child.name)
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                target = child.target if isinstance(child, ast.AnnAssign) else child.targets[0]
                last = f"{owner}.{ast.unparse(target)}" if owner else ast.unparse(target)
            elif (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, last, child.value.value
            else:
                yield from below(child, owner)

    return below(tree_of(SOURCES[file]), "")


@cache
def names_in(module: str) -> frozenset[str]:
    """What a module defines or imports at its top, and, of a package, its modules."""
    found = {name.removeprefix(f"{module}.") for name in MODULES if name.startswith(f"{module}.")}
    waiting: list[ast.AST] = list(tree_of(SOURCES[MODULES[module]]).body)
    while waiting:
        match waiting.pop():
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
            ):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update((alias.asname or alias.name).partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case node:
                waiting.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def resolves(reference: str) -> bool:
    """It names a module, or begins with a module and the name of something in it."""
    parts = reference.split(".")
    known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in MODULES]
    if not known:
        return False
    module, rest = ".".join(parts[: known[-1]]), parts[known[-1] :]
    return not rest or rest[0] in names_in(module)


def roots_of(file: str, first: str) -> list[str]:
    """The packages below which a docstring of the file may mean a module of that name."""
    own = MODULE_OF[file].split(".")
    near = [".".join(own[:n]) for n in range(len(own), 0, -1)]
    return [root for root in dict.fromkeys([*near, "pdserve"]) if f"{root}.{first}" in MODULES]


def test_docstrings_say_what_things_do() -> None:
    found = [
        f"{file}:{line}"
        for file in SOURCES
        for line, owner, text in docstrings(file)
        if ONLY_SEE.fullmatch(text.strip())
        and not any(re.match(r"_(?!_)", name) for name in owner.split("."))
    ]
    assert found == [], "say what it does; a reference alone makes every reader look it up"


def test_references_in_docstrings_lead_somewhere() -> None:
    found = []
    for file in SOURCES:
        for line, _, text in docstrings(file):
            for reference in REFERENCE.findall(text):
                first, _, rest = reference.partition(".")
                if rest in FILE_ENDINGS or reference in NO_MODULES:
                    continue
                whole = [reference] if first in {"pdserve", "pdserve_engines"} else []
                names = whole or [f"{root}.{reference}" for root in roots_of(file, first)]
                if names and not any(resolves(name) for name in names):
                    found.append(f"{file}:{line}: {reference}")
    assert found == [], "no module, and nothing in one: it was renamed, or never there"
