"""Run the test-suite: first what may run beside other tests, on several cores, then what must not.

    python .ci/pytest.py [pytest's arguments]
    python .ci/pytest.py vllm [pytest's arguments]

Tests marked `alone` measure time, or fill the machine by themselves. Both parts run whatever comes
of the first, unless that was told to stop (-x). With `vllm` it runs the tests of the real vLLM, in
two processes at the same time: an engine that is loaded once serves all tests of a process.

A few tests that failed run once more, one after the other, on what is then an idle machine. If all
of them pass, the run is green and its last lines name them as flaky: a shared machine that stands
still for ten seconds fails one test in twelve thousand. More than `MOST_AGAIN` failures, and errors
that are no test's, are never tried again. The exit status is that of the first part that failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 4
"""Processes at a time: more gain little, and each takes the memory of a whole suite. Two for each
core, since what starts servers mostly waits for them."""
MOST_AGAIN = 3
"""Failures that may be a machine's."""
FAILED, NONE_CHOSEN = 1, 5
"""pytest's exit statuses when tests failed, and when the arguments leave no test over."""
STOP = {"-x", "--exitfirst", "--maxfail=1"}
CLUSTERS = ("tests/e2e/vllm",)
ENGINES = (
    "tests/engines/vllm",
    "tests/contracts",
    "tests/observe/test_vllm_names.py",
)
"""Where the tests with vLLM are: of nodes, and of engines in the tests' own process. Each half
keeps its engines until its end, and by itself leaves much of two cores idle."""


def cores() -> int:
    """Number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def command(*arguments: str) -> list[str]:
    """pytest in a process of its own."""
    return [sys.executable, "-m", "pytest", *arguments]


def part(name: str, *arguments: str) -> int:
    """Run one part; `tests/support/parts.py` leaves out the other's tests."""
    environ = os.environ | {"PDSERVE_TEST_PART": name}
    return subprocess.run(command(*arguments), env=environ).returncode


def failed_tests(cache: Path) -> list[str]:
    """What pytest's caches below this folder say: ids of tests that failed."""
    files = cache.rglob("v/cache/lastfailed")
    return sorted(each for file in files for each in json.loads(file.read_text()))


def run_again(failed: list[str], arguments: list[str]) -> int:
    """Run these once more, alone; prints what came of it, and returns pytest's status."""
    print(f"==> once more, alone: {', '.join(failed)}", flush=True)
    options = [one for one in arguments if one.startswith("--hypothesis-seed")]
    status = part("", "-q", *options, *failed)
    verdict = "flaky: failed beside others, passed alone" if status == 0 else "failed twice"
    print(f"==> {verdict}: {', '.join(failed)}", flush=True)
    return status


def files_alone(arguments: list[str]) -> list[str]:
    """Files with tests marked `alone`, so that not all others are collected once more; none if the
    arguments name files."""
    if any(Path(each.partition("::")[0]).exists() for each in arguments):
        return []
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(each) for each in files if "pytest.mark.alone" in each.read_text()]


def run_parts(arguments: list[str], cache: str) -> list[int]:
    """The statuses of both parts."""
    arguments = [*arguments, "-o", f"cache_dir={cache}"]
    together = ("-n", str(min(2 * cores(), MOST)), "--dist", "loadfile", "--no-loadscope-reorder")
    statuses = [part("together", *together, *arguments)]
    if statuses[0] in (0, NONE_CHOSEN) or not STOP & set(arguments):
        statuses.append(part("alone", *arguments, *files_alone(arguments)))
    return statuses


def run_halves(arguments: list[str], cache: str) -> list[int]:
    """The statuses of both halves with vLLM. What the second says comes after the first's end."""

    def half(number: int, paths: tuple[str, ...]) -> list[str]:
        return command(*arguments, "-o", f"cache_dir={cache}/{number}", *paths)

    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(half(2, ENGINES), stdout=said, stderr=subprocess.STDOUT) as second:
            first = subprocess.run(half(1, CLUSTERS)).returncode
        said.seek(0)
        print(said.read(), end="", flush=True)
    return [first, second.returncode]


def verdict_of(statuses: list[int]) -> list[int]:
    """The statuses that failed, in their order; [NONE_CHOSEN] if nothing ran."""
    if set(statuses) == {NONE_CHOSEN}:
        return [NONE_CHOSEN]
    return [status for status in statuses if status not in (0, NONE_CHOSEN)]


def main(arguments: list[str]) -> int:
    """The exit status."""
    runner = run_parts
    if arguments[:1] == ["vllm"]:
        runner, arguments = run_halves, arguments[1:]
    with tempfile.TemporaryDirectory(prefix="pdserve-pytest-") as cache:
        statuses = verdict_of(runner(arguments, cache))
        failed = failed_tests(Path(cache))
    if set(statuses) == {FAILED} and 0 < len(failed) <= MOST_AGAIN and not STOP & set(arguments):
        return run_again(failed, arguments)
    return statuses[0] if statuses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
