"""Whatever a request's template does, an answer comes in time and the next one is served."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from pdserve.errors import Draining, InvalidRequest, Unavailable
from pdserve.text.chat import template_process
from pdserve.text.chat.template_limits import TemplateLimits
from pdserve.text.chat.template_process import TemplateProcess

LIMITS = TemplateLimits(seconds=30.0)
"""More than anything here takes on the busiest machine."""
IMPATIENT = TemplateLimits(seconds=0.3)
MESSAGES = [{"role": "user", "content": "hé"}]
COPIES_OF_COPIES = (
    "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
    "{% set m = namespace(x=[1]) %}{% for i in range(64) %}{% set m.x = [m.x, m.x] %}{% endfor %}"
)
"""Cheap to make; takes for ever in the one operation that looks at all of it."""
HOSTILE = [
    COPIES_OF_COPIES + "{{ n.x == m.x }}",
    COPIES_OF_COPIES + "{{ n.x }}",
    COPIES_OF_COPIES + "{{ n.x|tojson }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
]


@pytest.fixture
def process():
    process = TemplateProcess(LIMITS)
    yield process
    process.close()


def render(process: TemplateProcess, source: str, **options: object) -> str:
    return process.render(source, {"bos_token": "<s>"}, MESSAGES, options)


def test_a_template_renders_as_it_would_here(process):
    source = "{{ bos_token }}{{ messages[0].content }}{{ tools }}{{ add_generation_prompt }}{{ x }}"
    options = {"tools": [{"name": "f"}], "template_kwargs": {"x": 2}}
    assert render(process, source, **options) == "<s>hé[{'name': 'f'}]True2"
    assert render(process, "{{ messages[0].content * 100_000 }}") == "hé" * 100_000
    assert process.killed == 0


def test_errors_are_those_of_a_template_rendered_here(process):
    with pytest.raises(InvalidRequest, match="does not compile") as caught:
        render(process, "{% for %}")
    assert caught.value.param == "chat_template"
    with pytest.raises(InvalidRequest, match="refused: no"):
        render(process, "{{ raise_exception('no') }}")
    with pytest.raises(InvalidRequest) as caught:
        render(process, "x", template_kwargs={"messages": 1})
    assert caught.value.param == "chat_template_kwargs.messages"
    assert process.killed == 0


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_ended_and_the_next_one_served(process, source):
    render(process, "started")
    process._limits = IMPATIENT
    with pytest.raises(InvalidRequest, match=r"takes over 0\.3 s|memory"):
        render(process, source)
    process._limits = LIMITS
    assert render(process, "next") == "next"


def test_memory_is_bounded(process):
    greedy = "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
    greedy += "{% set n.x = [n.x, range(99999)|list] %}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"MemoryError|memory"):
        render(process, greedy)
    assert render(process, "next") == "next"


def test_a_child_that_died_while_idle_is_replaced_unnoticed(process):
    render(process, "x")
    child = process._child
    assert child is not None
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    assert render(process, "y") == "y"
    assert process.killed == 0


def test_a_child_that_dies_at_work_refuses_its_template_only(process):
    render(process, "x")
    child = process._child
    assert child is not None
    killer = threading.Timer(0.1, child.end)
    killer.start()
    with pytest.raises(InvalidRequest, match="ended its process"):
        render(process, HOSTILE[0])
    killer.join()
    assert render(process, "y") == "y"


def test_the_child_sees_no_secrets_and_cannot_write(process, monkeypatch):
    monkeypatch.setenv("PDSERVE_CLUSTER_KEY", "secret")
    render(process, "x")
    child = process._child
    assert child is not None
    with open(f"/proc/{child._process.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    with open(f"/proc/{child._process.pid}/limits") as file:
        limits = {line[:25].strip(): line.split()[-3] for line in file.readlines()[1:]}
    assert limits["Max file size"] == "0"
    assert limits["Max address space"] == str(template_process.MEMORY)


def test_threads_take_turns(process):
    texts: list[str] = []
    sources = [f"text {index}" for index in range(8)]
    threads = [
        threading.Thread(target=lambda source=source: texts.append(render(process, source)))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sources


def test_closing_ends_a_rendering_in_progress():
    process = TemplateProcess(LIMITS)
    render(process, "x")
    failures: list[Exception] = []

    def work() -> None:
        try:
            render(process, HOSTILE[0])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while process._turn.acquire(blocking=False):
        process._turn.release()
    process.close()
    thread.join(timeout=20)
    assert [type(error) for error in failures] == [Draining]
    with pytest.raises(Draining):
        render(process, "x")
    process.close()


def test_nothing_is_left_when_no_child_can_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    process = TemplateProcess(LIMITS)
    with pytest.raises(Unavailable, match="no process"):
        render(process, "x")
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(Unavailable, match="no process"):
        render(process, "x")
    process.close()


def test_only_json_crosses(process):
    with pytest.raises(InvalidRequest, match="JSON"):
        render(process, "x", template_kwargs={"x": open})
    with pytest.raises(InvalidRequest, match="JSON"):
        render(process, "x", template_kwargs={"x": 2**70})


def test_closing_while_a_child_is_being_started_does_not_wait_for_it(monkeypatch):
    starting, go_on = threading.Event(), threading.Event()

    class Child(template_process._Child):
        def __init__(self, memory: int) -> None:
            starting.set()
            assert go_on.wait(10)
            super().__init__(memory)

        def wait_ready(self, seconds: float) -> None:
            raise AssertionError("nobody wants it any more")

    monkeypatch.setattr(template_process, "_Child", Child)
    process = TemplateProcess(LIMITS)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            render(process, "x")
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert starting.wait(10)
    closing = threading.Thread(target=process.close)
    closing.start()
    while not process._closed:
        pass
    go_on.set()
    asking.join(10)
    closing.join(10)
    assert [type(error) for error in errors] == [Draining]
    assert process._child is None
