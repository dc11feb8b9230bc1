"""Run the test-suite: first what may run beside other tests, on several cores, then what must not.

    python .ci/pytest.py [pytest's arguments]
    python .ci/pytest.py vllm [pytest's arguments]
    python .ci/pytest.py all [pytest's arguments]

Tests marked `alone` measure time, or fill the machine by themselves. Both parts run whatever comes
of the first, unless that was told to stop (-x). With `vllm` it runs the tests of the real vLLM, in
two processes at the same time: an engine that is loaded once serves all tests of a process. `all`
runs these two one after the other beside the first part: they leave half of two cores idle. Their
output follows that of the first part. Tests that the arguments name are run by the part that has
them, and -m holds beside the parts' own marks.

A few tests that failed run once more, one after the other, on what is then an idle machine. If all
of them pass, the run is green and its last lines name them as flaky: a shared machine that stands
still for ten seconds fails one test in twelve thousand. More than `MOST_AGAIN` failures, and errors
that are no test's, are never tried again. The exit status is that of the first part that failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST = 4
"""Processes at a time, besides one with vLLM: more gain little, and each takes the memory of a
whole suite. Two for each core, since what starts servers mostly waits for them."""
MOST_AGAIN = 3
"""Failures that may be a machine's."""
FAILED, BROKEN, NONE_CHOSEN = 1, 3, 5
"""pytest's exit statuses: tests failed, something else did, the arguments leave no test over."""
STOP = {"-x", "--exitfirst", "--maxfail=1"}
VALUED = {"-k", "-m", "-n", "-p", "-o", "-W", "-c", "--dist", "--maxfail", "--timeout"}
"""Options whose value may be the next argument."""
CLUSTERS = ("tests/e2e/vllm",)
ENGINES = (
    "tests/engines/vllm",
    "tests/contracts",
    "tests/observe/test_vllm_names.py",
)
"""Where the tests with vLLM are: of nodes, and of engines in the tests' own process. Each half
keeps its engines until its end, and by itself leaves much of two cores idle."""
VLLM_PYTHON = ".venv-vllm/bin/python"
MAKE_VLLM = ("bash", ".ci/vllm.sh")
"""Makes the environment of that interpreter."""


def cores() -> int:
    """Number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def part(name: str, *arguments: str) -> int:
    """Run one part without vLLM; `tests/support/parts.py` leaves out the other's tests."""
    environ = os.environ | {"PDSERVE_TEST_PART": name}
    environ.pop("PDSERVE_REQUIRE_VLLM", None)
    command = [sys.executable, "-m", "pytest", *marked("not vllm", arguments)]
    return subprocess.run(command, env=environ).returncode


def start_vllm(*arguments: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """Start pytest on tests with vLLM."""
    environ = os.environ | {"PDSERVE_TEST_PART": "vllm", "PDSERVE_REQUIRE_VLLM": "1"}
    command = [VLLM_PYTHON, "-m", "pytest", *marked("vllm", arguments)]
    errors = None if output is None else subprocess.STDOUT
    return subprocess.Popen(command, env=environ, stdout=output, stderr=errors)


def marked(own: str, arguments: Iterable[str]) -> list[str]:
    """The arguments with `own` as one more condition of -m: pytest heeds only the last one."""
    rest, wanted, given = [], own, iter(arguments)
    for each in given:
        if each == "-m":
            wanted = f"({own}) and ({next(given, '')})"
        else:
            rest.append(each)
    return ["-m", wanted, *rest]


def named(arguments: Iterable[str]) -> Iterator[str]:
    """The arguments that are files, folders or tests in them."""
    before = ""
    for each in arguments:
        if before not in VALUED and file_of(each).exists():
            yield each
        before = each


def file_of(test: str) -> Path:
    """The file, or folder, of a test's id."""
    return Path(test.partition("::")[0]).resolve()


def failed_tests(cache: Path) -> list[str]:
    """What pytest's caches below this folder say: ids of tests that failed."""
    files = cache.rglob("v/cache/lastfailed")
    return sorted(each for file in files for each in json.loads(file.read_text()))


def run_again(cache: Path, arguments: list[str]) -> int:
    """Run what failed once more, alone; prints what came of it, and returns pytest's status."""
    failed = failed_tests(cache)
    print(f"==> once more, alone: {', '.join(failed)}", flush=True)
    options = ["-q", *(one for one in arguments if one.startswith("--hypothesis-seed"))]
    statuses = []
    if here := failed_tests(cache / "here"):
        statuses.append(part("", *options, *here))
    if vllm := failed_tests(cache / "vllm"):
        statuses.append(start_vllm(*options, *vllm).wait())
    status = next(filter(None, statuses), 0)  # a process that was killed has a negative one
    verdict = "flaky: failed beside others, passed alone" if status == 0 else "failed twice"
    print(f"==> {verdict}: {', '.join(failed)}", flush=True)
    return status


def files_alone(arguments: list[str]) -> list[str]:
    """Files with tests marked `alone`, so that not all others are collected once more; none if the
    arguments name files."""
    if any(named(arguments)):
        return []
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(each) for each in files if "pytest.mark.alone" in each.read_text()]


def run_together(arguments: list[str], cache: Path) -> int:
    """The status of the part whose tests run beside each other."""
    processes = ("-n", str(min(2 * cores(), MOST)), "--dist", "loadfile", "--no-loadscope-reorder")
    return part("together", *processes, *arguments, "-o", f"cache_dir={cache}/here")


def run_alone(before: list[int], arguments: list[str], cache: Path) -> list[int]:
    """The statuses before, and that of the part `alone`; not if a failure was to end the run."""
    if is_end(before, arguments):
        return before
    cached = ("-o", f"cache_dir={cache}/here")
    return [*before, part("alone", *arguments, *cached, *files_alone(arguments))]


def run_parts(arguments: list[str], cache: Path) -> list[int]:
    """The statuses of both parts."""
    return run_alone([run_together(arguments, cache)], arguments, cache)


def is_end(statuses: list[int], arguments: list[str]) -> bool:
    """True if a failure was to end the run, and there is one."""
    return bool(STOP & set(arguments)) and verdict_of(statuses) not in ([], [NONE_CHOSEN])


def halves(arguments: list[str], cache: Path) -> list[list[str]]:
    """pytest's arguments for each half of the tests with vLLM; none for a half without a test that
    the arguments name, if they name any."""
    names = [*named(arguments)]
    options = [each for each in arguments if each not in names]
    paths = {"clusters": CLUSTERS, "engines": ENGINES}
    return [
        [*options, "-o", f"cache_dir={cache}/vllm/{name}", *chosen]
        for name, half in paths.items()
        if (chosen := [*of_half(half, names)] if names else half)
    ]


def of_half(half: tuple[str, ...], names: list[str]) -> Iterator[str]:
    """The named tests that are in this half, and what of the half is in a named folder."""
    folders = [Path(each).resolve() for each in half]
    yield from (one for one in names if any(file_of(one).is_relative_to(f) for f in folders))
    for each, folder in zip(half, folders, strict=True):
        if any(file_of(one) in folder.parents for one in names):
            yield each


def run_halves(arguments: list[str], cache: Path) -> list[int]:
    """The statuses of both halves with vLLM. What the second says comes after the first's end."""
    commands = halves(arguments, cache)
    if not commands:
        return [NONE_CHOSEN]
    with tempfile.TemporaryFile("w+") as said:
        others = [start_vllm(*each, output=said) for each in commands[1:]]
        statuses = [start_vllm(*commands[0]).wait(), *(each.wait() for each in others)]
        show(said)
    return statuses


class QuietHalves:
    """The halves with vLLM, one after the other, once there is an environment."""

    def __init__(self, arguments: list[str], cache: Path, said: IO[str]) -> None:
        """`said`: file for all that is printed."""
        self._arguments = arguments
        self._cache = cache
        self._said = said
        self._running: tuple[subprocess.Popen[bytes], signal.Signals] | None = None
        """What runs now, and what ends it."""
        self._ended = False

    def run(self) -> list[int]:
        """The statuses of those that began."""
        commands = halves(self._arguments, self._cache)
        if commands and self._make():
            return [BROKEN]
        statuses: list[int] = []
        for half in commands:
            if self._ended or is_end(statuses, self._arguments):
                break
            process = start_vllm(*half, output=self._said)
            statuses.append(self._status(process, signal.SIGINT))
        return statuses

    def _make(self) -> int:
        process = subprocess.Popen(MAKE_VLLM, stdout=self._said, stderr=subprocess.STDOUT)
        return self._status(process, signal.SIGTERM)

    def _status(self, process: subprocess.Popen[bytes], ends: signal.Signals) -> int:
        self._running = process, ends
        if self._ended:
            process.send_signal(ends)
        return process.wait()

    def end(self) -> None:
        """Begin no half any more."""
        self._ended = True

    def end_now(self) -> None:
        """Begin no half any more, and end the one that runs."""
        self.end()
        if self._running is not None:
            process, ends = self._running
            process.send_signal(ends)


def run_all(arguments: list[str], cache: Path) -> list[int]:
    """The statuses of all: tests with vLLM run beside the first part, and end before the second."""
    with tempfile.TemporaryFile("w+") as said:
        quiet = QuietHalves(arguments, cache, said)
        with ThreadPoolExecutor(1) as beside:
            vllm = beside.submit(quiet.run)
            try:
                statuses = [run_together(arguments, cache)]
            except BaseException:
                quiet.end()  # an interrupt: the terminal has told the one that runs, too
                raise
            if is_end(statuses, arguments):
                quiet.end_now()
            print("==> tests with vLLM", flush=True)
        show(said)
    return run_alone([*statuses, *vllm.result()], arguments, cache)


def show(said: IO[str]) -> None:
    """Print what was written into a file."""
    said.seek(0)
    print(said.read(), end="", flush=True)


def verdict_of(statuses: list[int]) -> list[int]:
    """The statuses that failed, in their order; [NONE_CHOSEN] if nothing ran."""
    if set(statuses) == {NONE_CHOSEN}:
        return [NONE_CHOSEN]
    return [status for status in statuses if status not in (0, NONE_CHOSEN)]


RUNNERS = {"vllm": run_halves, "all": run_all}


def main(arguments: list[str]) -> int:
    """The exit status."""
    runner = RUNNERS.get(arguments[0] if arguments else "", run_parts)
    if runner is not run_parts:
        arguments = arguments[1:]
    with tempfile.TemporaryDirectory(prefix="pdserve-pytest-") as folder:
        cache = Path(folder)
        statuses = verdict_of(runner(arguments, cache))
        again = set(statuses) == {FAILED} and not STOP & set(arguments)
        if again and 0 < len(failed_tests(cache)) <= MOST_AGAIN:
            return run_again(cache, arguments)
    return statuses[0] if statuses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
