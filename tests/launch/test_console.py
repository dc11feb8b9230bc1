import io
import logging
import os

import pytest

from pdserve.clock import ManualClock
from pdserve.launch.console import Console, progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock():
    return ManualClock()


def seen(stream):
    """What a person sees: each carriage return with an erase starts the line anew."""
    return [line.rsplit("\x1b[K", 1)[-1] for line in stream.getvalue().split("\n")]


def test_a_terminal_has_one_line_that_is_redrawn(clock):
    stream = Terminal()
    screen = Console(stream, clock)
    for percent in range(0, 101, 10):
        screen.progress("loading weights", percent / 100)
        clock.advance(0.2)
    assert seen(stream) == [progress_line("loading weights", 1.0)]
    screen.finish()
    assert seen(stream) == [""]


def test_log_lines_pass_above_the_line_of_progress(clock):
    stream = Terminal()
    screen = Console(stream, clock)
    screen.progress("loading", None)
    screen.write("a warning\n")
    assert seen(stream) == ["a warning", progress_line("loading", None)]
    screen.finish()
    screen.write("ready\n")
    assert seen(stream) == ["a warning", "ready", ""]


def test_a_terminal_is_not_redrawn_too_often(clock):
    stream = Terminal()
    screen = Console(stream, clock)
    for step in range(1000):
        screen.progress("loading", step / 1000)
    assert stream.getvalue().count("\r") == 1


def test_elsewhere_a_stage_is_a_log_line_repeated_now_and_then(clock, caplog):
    screen = Console(io.StringIO(), clock)
    with caplog.at_level(logging.INFO, logger="pdserve"):
        for step in range(300):
            screen.progress("reading", step / 300)
            clock.advance(0.125)
        screen.progress("warming up", None)
    assert [record.getMessage() for record in caplog.records] == [
        "reading (0%)",
        "reading (27%)",
        "reading (53%)",
        "reading (80%)",
        "warming up",
    ]


def test_elsewhere_finishing_writes_nothing(clock):
    stream = io.StringIO()
    screen = Console(stream, clock)
    screen.progress("x", 0.5)
    screen.finish()
    assert stream.getvalue() == ""


def test_a_reader_that_stops_reading_delays_nobody(clock):
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as pipe, open(writer, "w") as stream:
        screen = Console(stream, clock)
        for number in range(3000):  # far more than a pipe holds
            screen.write_line(f"line {number} {'.' * 100}")
        seen = pipe.read(1 << 20)
        assert seen.startswith(b"line 0 ")
        screen.write_line("after")
        rest = pipe.read(1 << 20).decode().splitlines()
    dropped = 3000 - seen.count(b"\n")
    assert dropped > 1000
    assert rest[-2:] == [
        f"({dropped} pieces of log were dropped: the output was not read)",
        "after",
    ]


def test_a_reader_that_is_gone_disturbs_nobody(clock):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        screen = Console(stream, clock)
        screen.write_line("unheard")
        screen.progress("loading", 0.5)
        screen.finish()


@pytest.mark.parametrize("fraction", [None, 0.0, 0.5, 1.0])
def test_a_line_of_progress_fits_eighty_columns(fraction):
    assert (
        len(progress_line("a stage with a very long name, longer than any terminal is", fraction))
        < 80
    )
