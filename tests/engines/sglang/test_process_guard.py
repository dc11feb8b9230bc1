"""What belongs to the process survives SGLang. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.test_engines import write_model

ROOT = Path(__file__).parents[3]

PROGRAM = """
import logging, os, signal, subprocess, sys
from contextlib import nullcontext
from pdserve.messages.engine import EngineSpec
from pdserve_engines.sglang import engine, process_guard
from tests.engines.sglang import fake_sglang

case, model = sys.argv[1:]

def on_term(number, frame):
    raise SystemExit(0)

signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell may have started us with it ignored
handler = logging.StreamHandler(sys.stderr)
logging.getLogger().handlers = [handler]
logging.getLogger().setLevel(logging.INFO)
if case == "planted handler":
    engine.kept_handlers = nullcontext
if case == "planted killer":
    engine.SglangEngine.close = lambda self: self._engine.shutdown()

fake_sglang.FakeEngine.kills = staticmethod(fake_sglang.kill_children)
fake_sglang.FakeEngine.spawns = 2
core = fake_sglang.create()
core._children = process_guard.child_processes
core.load(EngineSpec(engine="sglang", model=model, block_size=4), lambda progress: None)

assert signal.getsignal(signal.SIGTERM) is on_term, "SIGTERM"
assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL, "SIGQUIT"
assert logging.getLogger().handlers == [handler], "log handlers"
assert logging.getLogger().level == logging.INFO, "log level"

(made,) = fake_sglang.ENGINES
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
stranger = None if case == "alone" else subprocess.Popen(["cat"], **pipes)
assert core.close() == 0
for child in made.children:
    assert child.wait(10) == -signal.SIGKILL
if stranger is not None:
    # A process that was killed does not answer.
    assert stranger.communicate(b"hello") == (b"hello", None), "a child was killed"
assert process_guard.child_processes() == frozenset()
print("survived")
"""


def run(case: str, tmp_path: Path) -> tuple[int, str]:
    write_model(tmp_path)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "engines")))
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM, case, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=50,
    )
    return made.returncode, made.stdout + made.stderr


@pytest.mark.parametrize("case", ["alone", "with a child of another part"])
def test_handlers_and_other_children_survive(case: str, tmp_path: Path):
    status, output = run(case, tmp_path)
    assert (status, "survived" in output) == (0, True), output


@pytest.mark.parametrize(
    ("case", "noticed"),
    [("planted handler", "SIGQUIT"), ("planted killer", "a child was killed")],
)
def test_planted_bugs_are_noticed(case: str, noticed: str, tmp_path: Path):
    status, output = run(case, tmp_path)
    assert status != 0
    assert noticed in output
