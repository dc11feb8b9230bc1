import asyncio
import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
from typing import Any

import pytest

from pdserve.errors import ConfigError, EngineDied
from pdserve.launch import exit_codes, process
from pdserve.launch.cluster.node_factory import NodeFactory
from pdserve.launch.config.resolve import resolve
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such model"), exit_codes.USAGE),
        (ConfigError("taken", param="port"), exit_codes.CANNOT_LISTEN),
        (ConfigError("taken", param="metrics_port"), exit_codes.CANNOT_LISTEN),
        (ConfigError("taken", param="listen"), exit_codes.CANNOT_LISTEN),
        (EngineDied("crashed"), exit_codes.ENGINE_FAILED),
    ],
)
def test_a_failed_start_has_an_exit_status_of_its_own(error, status):
    assert process._status_of(error) == status


def test_without_uvloop_plain_asyncio_serves_and_says_so(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    degradations = Degradations(Metrics())
    assert process._loop_factory(degradations) is asyncio.new_event_loop
    assert "No module named 'uvloop'" in degradations.reasons()["no_uvloop"]


def test_after_the_start_the_collector_leaves_alone_what_the_start_made():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    kept = [["made by the start"]]
    try:
        process._settle_collector()
        assert gc.get_freeze_count() > frozen
        assert not any(each is kept for each in gc.get_objects())
        assert gc.get_threshold() > before
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        if frozen:
            gc.freeze()  # as `conftest` did: each full collection would look at a million objects


@pytest.fixture
def limits(monkeypatch):
    """The process's limit on open files, without changing it for the tests' own process."""
    values = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: values["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: values.update(now=pair))
    return values


def test_the_limit_on_open_files_is_raised_as_far_as_connections_need(limits):
    process._raise_file_limit(1000)
    assert limits["now"] == (1256, 4096)


def test_a_hard_limit_that_is_too_low_is_said(limits, caplog):
    process._raise_file_limit(100_000)
    assert limits["now"] == (4096, 4096)
    assert "4096 files may be open" in caplog.text


def test_a_limit_that_suffices_is_left_alone(limits):
    process._raise_file_limit(100)
    assert limits["now"] == (1024, 4096)


def test_exit_statuses_are_all_different():
    values = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert len(set(values)) == len(values)


# ------------------------------------------------------------------ what was given and is of no use


@pytest.mark.parametrize("flags", [{"tls-cert": "c"}, {"tls-key": "k"}, {"tls-ca": "a"}])
@pytest.mark.parametrize("frontends", ["1", "2"])
def test_certificates_that_would_encrypt_nothing_are_refused(flags, frontends, tmp_path):
    """Whoever knows --ssl-certfile would believe to serve HTTPS."""
    config = made(tmp_path, frontends=frontends, **flags)
    with pytest.raises(ConfigError, match=r"not the API.* put a proxy that ends TLS"):
        process._refuse_idle_tls(config)
    process._refuse_idle_tls(made(tmp_path, listen="127.0.0.1:0", **flags))
    process._refuse_idle_tls(made(tmp_path, role="worker", **flags))
    process._refuse_idle_tls(made(tmp_path))


def made(folder, **flags):
    named = {name.replace("_", "-"): text for name, text in flags.items()}
    return resolve(named, {"PDSERVE_CONFIG": "none"}, folder)


@pytest.mark.parametrize("role", ["router", "worker", "frontend", "all-in-one"])
def test_certificates_are_read_before_anything_starts(role, tmp_path):
    config = made(tmp_path, role=role, listen="127.0.0.1:0", tls_cert="nofile", tls_key="nofile")
    with pytest.raises(ConfigError, match="--tls-cert nofile cannot be read"):
        NodeFactory(config.cluster, private=False)


def test_a_crash_in_native_code_is_no_silent_end():
    program = (
        "import os, resource, signal; from pdserve.launch import process;"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        "process._report_crashes(); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONFAULTHANDLER"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=clean, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in ended.stderr


@pytest.mark.parametrize("reverse", [False, True])
def test_the_cause_of_a_failed_start_counts_not_its_consequence(reverse):
    cause = ConfigError("engine 'torch' needs 'torch', which is not installed")
    errors = [EngineDied("the engine process exited with code 1"), cause][:: -1 if reverse else 1]
    assert process._first_cause(errors) is cause
    assert process._first_cause(errors[:1]) is errors[0]


async def test_all_engines_are_heard_before_a_start_fails():
    """In whatever order the ends of one process's cores arrive."""
    loads = {"prefill": EngineDied("exited with code 1"), "decode": ConfigError("no such device")}
    ended = []

    class Worker:
        def __init__(self, name):
            self.name = name

        async def load(self):
            if self.name == "decode":
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            ended.append(self.name)
            raise loads[self.name]

    workers: Any = [Worker("prefill"), Worker("decode")]
    with pytest.raises(ConfigError, match="no such device"):
        await process._load_all(workers)
    assert ended == ["prefill", "decode"]


STUCK = """
import asyncio, contextlib, os, signal, sys
from pdserve.cli.main import main
from pdserve.launch.process import ServerProcess
from pdserve.runtime import tasks

tasks._DEADLINE, tasks._PATIENCE = 0.4, 0.2
start = ServerProcess._start

async def stay():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

async def stuck(self):
    await start(self)
    for owner in (self._tasks, self._parts[0].node.tasks):
        owner.spawn(stay(), "stays")
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)

ServerProcess._start = stuck
sys.exit(main(["--role=router", "--listen=127.0.0.1:0", "--node-name=r", "--config=none"]))
"""


def test_tasks_that_never_end_do_not_keep_the_process():
    command = [sys.executable, "-c", STUCK]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == exit_codes.OK, ended.stderr
    for owner in ("process", "node r"):
        assert f"{owner}: stays still run" in ended.stderr
    assert "degraded (stuck_tasks): process: stays" in ended.stderr
    assert "the process ends although tasks still run: stays, stays" in ended.stderr
