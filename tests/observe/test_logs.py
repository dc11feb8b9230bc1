import contextlib
import io
import json
import logging
from typing import NamedTuple

import pytest

from pdserve.observe import logs


class Named(NamedTuple):
    """A request."""

    request_id: str
    trace_id: bytes = b""


@pytest.fixture
def stream(monkeypatch):
    """A configured log's stream; the loggers' own settings come back afterwards."""
    loggers = [logging.getLogger(name) for name in (None, "pdserve", "pdserve_engines")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield io.StringIO()
    logging.captureWarnings(False)
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@contextlib.contextmanager
def request(name):
    """Inside, lines belong to the request `name`."""
    token = logs.request_id.set(name)
    yield
    logs.request_id.reset(token)


def test_text_lines_carry_the_request_id_and_extras(stream):
    logs.configure("text", "info", stream)
    with request("req-7"):
        logging.getLogger("pdserve.frontend").info("done", extra={"tokens": 3})
    logging.getLogger("pdserve.frontend").info("idle")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("INFO frontend: done tokens=3 [req-7]")
    assert second.endswith("INFO frontend: idle")


def test_json_lines_parse_and_carry_everything(stream):
    logs.configure("json", "info", stream)
    with request("req-7"):
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("pdserve.x").exception("failed", extra={"status": 500})
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["request_id"] == "req-7"
    assert record["level"] == "error"
    assert record["message"] == "failed"
    assert record["status"] == 500
    assert "ValueError: broken" in record["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_message_cannot_forge_a_second_line(stream, form):
    logs.configure(form, "info", stream)
    hostile = "a\nERROR forged\r\x1b[2J\u2028b\u202e\u2066"
    logging.getLogger("pdserve").info("field %s", hostile, extra={"name_": "x\ny"})
    assert len(stream.getvalue().splitlines()) == 1
    assert not {"\x1b", "\u202e", "\u2066"} & set(stream.getvalue())


def test_text_tracebacks_follow_their_line(stream):
    logs.configure("text", "info", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("pdserve").exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("failed")
    assert lines[-1] == "    ValueError: broken"


def test_the_level_holds_for_pdserve_and_others_stay_quiet(stream):
    logs.configure("text", "info", stream)
    logging.getLogger("pdserve.a").debug("no")
    logging.getLogger("pdserve.a").info("yes")
    logging.getLogger("aiohttp").info("no")
    logging.getLogger("aiohttp").warning("also")
    assert [line.rsplit(": ", 1)[1] for line in stream.getvalue().splitlines()] == ["yes", "also"]


def test_configuring_again_replaces_the_first_handler(stream):
    logs.configure("text", "info", stream)
    logs.configure("text", "info", stream)
    logging.getLogger("pdserve").info("once")
    assert len(stream.getvalue().splitlines()) == 1


def test_json_lines_say_which_process_wrote_them(stream):
    said: dict[str, object] = {"role": "worker", "pid": 7}
    logs.configure("json", "info", stream, said)
    logging.getLogger("pdserve.x").info("early")
    said["node"] = "w1"  # known once there is a node
    logging.getLogger("pdserve.x").info("late")
    early, late = map(json.loads, stream.getvalue().splitlines())
    assert (early["role"], early["pid"], early.get("node")) == ("worker", 7, None)
    assert late["node"] == "w1"


def test_an_exception_cannot_forge_a_line(stream):
    """Its text may be a client's."""
    logs.configure("text", "info", stream)
    try:
        raise ValueError("x\n00:00:00.000 INFO frontend: all is well\r\x1b[2J")
    except ValueError:
        logging.getLogger("pdserve.frontend").exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert "it failed" in first
    assert "ValueError: x" in stream.getvalue()
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in stream.getvalue()


def test_a_line_about_a_request_carries_its_ids(stream):
    logs.configure("json", "info", stream)
    told = logs.about(Named("req-9", b"\x0a" * 16), handle=7)
    logging.getLogger("pdserve.worker").info("lost", extra=told)
    record = json.loads(stream.getvalue())
    assert (record["request_id"], record["trace_id"], record["handle"]) == ("req-9", "0a" * 16, 7)
    assert "span_id" not in record


def test_a_task_with_a_trace_says_so_only_of_its_own_request(stream):
    logs.configure("json", "info", stream)
    token = logs.trace_ids.set(("ab" * 16, "cd" * 8))
    with request("req-7"):
        logging.getLogger("pdserve").info("own")
        logging.getLogger("pdserve").info("own, by name", extra=logs.about(Named("req-7")))
        logging.getLogger("pdserve").info("other", extra=logs.about(Named("req-8")))
    logs.trace_ids.reset(token)
    own, named, other = map(json.loads, stream.getvalue().splitlines())
    for record in (own, named):
        assert record["request_id"] == "req-7"
        assert (record["trace_id"], record["span_id"]) == ("ab" * 16, "cd" * 8)
    assert other["request_id"] == "req-8"
    assert "trace_id" not in other
    assert "span_id" not in other


def test_text_lines_name_the_request_at_their_end_once(stream):
    logs.configure("text", "info", stream)
    told = logs.about(Named("req-9", b"\x0a" * 16), handle=7)
    with request("req-9"):
        logging.getLogger("pdserve").info("lost", extra=told)
    assert stream.getvalue().rstrip().endswith("lost handle=7 [req-9]")
