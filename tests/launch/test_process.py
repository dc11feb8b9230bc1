import asyncio
import importlib
import resource

import pytest

from pdserve.errors import ConfigError, EngineDied
from pdserve.launch import exit_codes, process
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
