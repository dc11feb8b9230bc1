"""examples/slurm on a real Slurm of one node: a cluster per job, healed, ended, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import pdserve
from tests.support.slurm import PATIENCE, Slurm, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUNDLED = Path(pdserve.__file__).parent / "bundled"
SCRIPT = Path(__file__).parents[3] / "examples/slurm/pdserve.sbatch"
CHAT = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}'

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


class Job:
    """One cluster as a job."""

    def __init__(self, slurm: Slurm, program: Path, folder: Path, model: Path, **more: str) -> None:
        """`more`: variables of the script's and of pdserve's."""
        self.slurm, self.folder = slurm, folder
        self.output = folder / "job.log"
        self.dir = folder / "own"
        environ = {"PDSERVE": str(program), "JOB_DIR": str(self.dir), "PDSERVE_CONFIG": "none"}
        environ |= {"HTTP_HOST": "127.0.0.1", "HTTP_PORT": "0", "HOME": str(folder)}
        environ |= {"PDSERVE_ENGINE": "instant"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            environ["CLUSTER_PORT"] = str(free.getsockname()[1])
        environ |= more
        flags = (
            f"--nodes={len(slurm.nodes)}",
            "--cpus-per-task=1",
            f"--output={self.output}",
            "--parsable",
        )
        command = ("sbatch", *flags, str(SCRIPT), "--model", str(model))
        done = slurm.run(*command, **environ)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def log(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := holds()):
            assert time.monotonic() < deadline, f"never {what}:\n{self.log()}"
            time.sleep(0.1)
        return found

    def ready(self, times: int = 1) -> None:
        self.until(lambda: self.log().count("; try: curl") >= times, "ready")

    def ask(self, headers: dict[str, str] | None = None) -> int:
        return self.answer(headers)[0]

    def answer(self, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status, and where the prompt was prefilled."""
        (port,) = re.findall(r"listening on \S+, port (\d+)", self.log())[-1:]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(url, CHAT, headers or {})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.headers.get("x-pdserve-prefill", "")

    def all_processes(self) -> Iterator[psutil.Process]:
        """Of this job of this Slurm."""
        conf = self.slurm.environ["SLURM_CONF"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if (environ.get("SLURM_CONF"), environ.get("SLURM_JOB_ID")) == (conf, self.id):
                    yield process

    def processes(self) -> dict[str, psutil.Process]:
        """Its pdserve processes, by role."""
        found: dict[str, psutil.Process] = {}
        for process in self.all_processes():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                roles = [word for word in command if word.startswith("--role=")]
                if "pdserve" in command:
                    found |= {role.removeprefix("--role="): process for role in roles}
        return found

    def state(self) -> str:
        shown = self.slurm.run("scontrol", "show", "job", self.id).stdout
        (state,) = re.findall(r"JobState=(\w+)", shown)
        return state

    def over(self) -> str:
        """Wait for the end; returns the state."""
        self.until(lambda: self.state() not in ("RUNNING", "PENDING", "COMPLETING"), "over")
        self.until(lambda: not self.left(), f"gone: {self.left()}")
        return self.state()

    def left(self) -> list[str]:
        return [str(process) for process in self.all_processes()]

    def members(self, program: Path) -> str:
        command = f". {self.dir}/env && {program} status"
        return self.slurm.run("bash", "-c", command, PDSERVE_CONFIG="none").stdout


@pytest.fixture
def job(slurm, program, tmp_path, tiny_model) -> Iterator[Job]:
    job = Job(slurm, program, tmp_path, tiny_model)
    try:
        job.ready()
        yield job
    finally:
        slurm.run("scancel", job.id)
        job.over()


def test_a_job_is_a_cluster_with_a_key_of_its_own_and_leaves_nothing(job, program, slurm):
    assert job.ask() == 200
    key = job.dir / "cluster.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(job.dir.stat().st_mode) == 0o700
    shown = job.members(program)
    assert "3 members, 1 model" in shown
    for role in ("router", "frontend", "worker"):
        assert re.search(rf"^\S+ +{role} +alive", shown, re.MULTILINE), shown
    worker = job.processes()["worker"]
    assert worker.environ()["SLURM_CPUS_PER_TASK"] == "1"
    slurm.run("scancel", job.id)
    assert job.over() == "CANCELLED"
    assert job.log().count("launch.process: closed") == 3
    assert "Traceback" not in job.log()
    assert not job.dir.exists()


@pytest.mark.long(one_in=3)
def test_beyond_loopback_the_api_asks_for_the_jobs_own_key(slurm, program, tmp_path, tiny_model):
    job = Job(slurm, program, tmp_path, tiny_model, HTTP_HOST="0.0.0.0")
    try:
        job.ready()
        with pytest.raises(urllib.error.HTTPError) as refused:
            job.ask()
        refused.value.close()
        assert refused.value.code == 401
        environ = (job.dir / "env").read_text()
        (key,) = re.findall(r"PDSERVE_API_KEY=(\S+)", environ)
        assert job.ask({"Authorization": f"Bearer {key}"}) == 200
        for name in ("env", "api-keys.toml"):
            assert stat.S_IMODE((job.dir / name).stat().st_mode) == 0o600
    finally:
        slurm.run("scancel", job.id)
        job.over()
    assert not job.dir.exists()


@pytest.mark.long(one_in=3)
def test_each_role_heals(job, program):
    before = job.processes()
    for role in ("worker", "router", "frontend"):
        os.kill(before[role].pid, signal.SIGKILL)

    def all_new() -> bool:
        now = job.processes()
        return set(now) == set(before) and all(now[r].pid != before[r].pid for r in now)

    job.until(all_new, "started again")
    job.ready(times=2)
    assert job.ask() == 200
    assert job.log().count("starting it again") == 3


@pytest.mark.long(one_in=3)
def test_a_warning_before_the_time_is_over_ends_in_order(job):
    job.slurm.run("scancel", "--batch", "--signal=TERM", job.id)
    assert job.over() == "COMPLETED"
    assert job.log().count("launch.process: closed") == 3
    assert not job.dir.exists()


@pytest.mark.long(one_in=3)
def test_a_wrong_setting_ends_the_job_with_its_reason(slurm, program, tmp_path, tiny_model):
    job = Job(slurm, program, tmp_path, tiny_model / "nowhere")
    assert job.over() == "FAILED"
    assert "nowhere" in job.log()


@pytest.mark.long(one_in=3)
def test_threads_are_those_that_slurm_gives(slurm, program):
    done = slurm.run("srun", "--cpus-per-task=1", "--ntasks=1", str(program), "doctor")
    assert re.search(r"threads.* 1\b", done.stdout), done.stdout + done.stderr


# ---------------------------------------------------------------------- two nodes


@pytest.fixture(scope="module")
def interface() -> Iterator[str]:
    """A second network of this host's: nobody else is on it."""
    name, address = f"pd{os.getpid()}", "10.231.7.1/24"
    made = [
        ["ip", "link", "add", name, "type", "bridge"],
        ["ip", "address", "add", address, "dev", name],
        ["ip", "link", "set", name, "up"],
    ]
    for command in made:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no second network here: {done.stderr}")
    yield name
    subprocess.run(["ip", "link", "delete", name], check=True)


@pytest.mark.long(one_in=3)
def test_nodes_with_several_networks_use_the_one_that_is_named(
    program, tmp_path, tiny_model, interface
):
    """Two nodes of Slurm's on this one host; `FABRIC` names the network between them."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Slurm(folder, nodes=2) as slurm:
        job = Job(slurm, program, tmp_path, tiny_model, FABRIC=interface)
        try:
            job.ready()
            job.until(lambda: "4 members, 1 model" in job.members(program), "complete")
            shown = job.members(program)
            rows = [line.split() for line in shown.splitlines() if " alive " in line]
            names = {row[0]: row[7].rpartition(":")[0] for row in rows}
            assert set(names) == {"router", "frontend", "worker-n1", "worker-n2"}
            assert set(names.values()) == {"10.231.7.1"}, shown
            assert job.ask() == 200
        finally:
            slurm.run("scancel", job.id)
            assert job.over() == "CANCELLED"
        assert job.log().count("launch.process: closed") == 4


@pytest.mark.long(one_in=3)
def test_the_last_nodes_compute_prompts_for_the_others(program, tmp_path, tiny_model, interface):
    folder = tmp_path / "slurm"
    folder.mkdir()
    apart = {"PREFILL": "1", "PDSERVE_ENGINE": "sim", "PDSERVE_ENGINE_OPTION": "content=on"}
    apart |= {"PDSERVE_DISAGG": "always", "PDSERVE_TRANSFER": "tcp", "FABRIC": interface}
    with Slurm(folder, nodes=2) as slurm:
        job = Job(slurm, program, tmp_path, tiny_model, **apart)
        try:
            job.ready()
            remote = (200, "remote; node=prefill-n2; reason=always")
            # Until the prefill worker is ready too, prompts are computed where they are decoded.
            job.until(lambda: job.answer() == remote, "prefilled on the other node")
            shown = job.members(program)
            assert re.search(r"^decode-n1 +decode +always", shown, re.MULTILINE), shown
            assert re.search(r"^prefill-n2 +prefill", shown, re.MULTILINE), shown
            assert re.search(r"^decode-n1 +prefill-n2 +tcp", shown, re.MULTILINE), shown
        finally:
            slurm.run("scancel", job.id)
            assert job.over() == "CANCELLED"
        assert "Traceback" not in job.log()


@pytest.mark.long  # six processes compute with torch
def test_prefill_and_decode_workers_have_ranks_of_their_own(program, tmp_path, interface):
    """Four ranks prefill on the one node, two decode on the other; all end with the job."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    ranks = {"PREFILL": "1", "PREFILL_FLAGS": "--tp=4", "PDSERVE_TP": "2"}
    ranks |= {"PDSERVE_ENGINE": "torch", "PDSERVE_THREADS": "1", "PDSERVE_KV_MEMORY": "16MiB"}
    ranks |= {"PDSERVE_DISAGG": "always", "PDSERVE_TRANSFER": "tcp", "FABRIC": interface}
    with Slurm(folder, nodes=2) as slurm:
        job = Job(slurm, program, tmp_path, BUNDLED, **ranks)
        try:
            job.ready()
            remote = (200, "remote; node=prefill-n2; reason=always")
            job.until(lambda: job.answer() == remote, "prefilled on the other node")
            shown = job.members(program)
            for worker, count in (("decode-n1", 2), ("prefill-n2", 4)):
                rows = re.findall(rf"^{worker} +\d+ +\d+ +cpu +running", shown, re.MULTILINE)
                assert len(rows) == count, shown
            assert re.search(r"^decode-n1 +prefill-n2 +tcp", shown, re.MULTILINE), shown
            children = [one for one in job.all_processes() if "rank" in " ".join(one.cmdline())]
            assert len(children) == 4, children
        finally:
            slurm.run("scancel", job.id)
            assert job.over() == "CANCELLED"  # it waits until no process of the job is left
        assert job.log().count("launch.process: closed") == 4
        assert "Traceback" not in job.log()


@pytest.mark.parametrize("wrong", ["1", "-1", "two"])
def test_some_node_must_decode(slurm, program, tmp_path, tiny_model, wrong):
    job = Job(slurm, program, tmp_path, tiny_model, PREFILL=wrong)
    assert job.over() == "FAILED"
    assert f"PREFILL={wrong}: give a number below that of the job's nodes, 1" in job.log()
    assert not job.dir.exists()


def test_a_port_for_metrics_is_a_number(slurm, program, tmp_path, tiny_model):
    job = Job(slurm, program, tmp_path, tiny_model, METRICS_PORT="nine")
    assert job.over() == "FAILED"
    assert "METRICS_PORT=nine: give a port" in job.log()


def test_a_network_that_is_not_there_is_named(slurm, program, tmp_path, tiny_model):
    job = Job(slurm, program, tmp_path, tiny_model, FABRIC="lo")
    assert job.over() == "FAILED"
    assert "interface lo has no address" in job.log()


@pytest.mark.long(one_in=3)
def test_workers_of_a_node_share_its_gpus(slurm, program, tmp_path, tiny_model):
    """Slurm here has no GPUs; the script reads them from the variable that Slurm would set."""
    several = {"WORKERS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,4,5"}
    several["METRICS_PORT"] = str(four_free_ports())
    job = Job(slurm, program, tmp_path, tiny_model, **several)
    try:
        job.ready()
        name = slurm.nodes[0]
        shown = job.until(
            lambda: (text := job.members(program)).count("worker-") >= 2 and text, "two workers"
        )
        for number in (0, 1):
            assert re.search(rf"^worker-{name}-{number} +worker +alive", shown, re.MULTILINE), shown
        shares = {
            process.environ()["CUDA_VISIBLE_DEVICES"]
            for process in job.all_processes()
            if "--role=worker" in process.cmdline() and "pdserve" in process.cmdline()
        }
        assert shares == {"0,1", "4,5"}
        assert roles_of_targets(job) == ["router", "frontend", "worker", "worker"]
    finally:
        slurm.run("scancel", job.id)
        job.over()
    assert not job.dir.exists()


def roles_of_targets(job: Job) -> list[str]:
    """What answers at the addresses that the job wrote for Prometheus."""
    (group,) = json.loads((job.dir / "targets.json").read_text())
    assert group["labels"] == {"cluster": f"slurm-{job.id}"}
    roles = []
    for target in group["targets"]:
        port = target.rpartition(":")[2]  # the nodes' names are no names of this host
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
            roles += re.findall(r'^pdserve_build_info{.*role="(\w+)"', answer.read().decode(), re.M)
    return roles


def four_free_ports() -> int:
    """The first of four ports in a row."""
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + 4):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)


def test_gpus_that_cannot_be_shared_evenly_end_the_job(slurm, program, tmp_path, tiny_model):
    uneven = {"WORKERS_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    job = Job(slurm, program, tmp_path, tiny_model, **uneven)
    assert job.over() == "FAILED"
    assert "3 GPUs of this node cannot be shared evenly by 2 workers" in job.log()


LATE_SRUN = """#!/bin/bash
case "$*" in *--role=frontend*)
  for _ in {1..600}; do [ ! -e "$JOB_DIR/ending" ] || break; sleep 0.1; done
  sleep 1;;
esac
exec %s "$@"
"""
"""An `srun` that launches the frontend's step once the others have been told to drain."""


@pytest.mark.long(one_in=3)
def test_a_step_that_is_launched_while_the_job_ends_ends_too(slurm, program, tmp_path, tiny_model):
    real = shutil.which("srun")
    own = tmp_path / "bin" / "srun"
    own.parent.mkdir()
    own.write_text(LATE_SRUN % real)
    own.chmod(0o755)
    path = f"{own.parent}:{os.environ['PATH']}"
    job = Job(slurm, program, tmp_path, tiny_model / "nowhere", PATH=path)
    assert job.over() == "FAILED"
    assert "nowhere" in job.log()
