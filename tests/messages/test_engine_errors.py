"""Errors survive the trip across the engine port."""

from __future__ import annotations

import inspect

import pytest

from pdserve import errors
from pdserve.messages.engine import CoreFailed, Rejected
from pdserve.messages.engine_errors import error_of, failed_event, rejected_event

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_arrives_as_what_it_was(kind: type[errors.PdserveError]):
    error = kind("what happened", param="field", retry_after=2.0)
    back = error_of(rejected_event(7, error))
    assert type(back) is kind
    assert (back.message, back.param, back.retry_after) == ("what happened", "field", 2.0)
    assert type(error_of(failed_event(error))) is kind


def test_foreign_errors_become_engine_errors_with_their_name():
    record = failed_event(KeyError("x"))
    assert type(error_of(record)) is errors.EngineError
    assert record.message == "KeyError: 'x'"
    assert failed_event(MemoryError()).message == "MemoryError"


@pytest.mark.parametrize("kind", ["NoSuchError", "ClassVar", "annotations"])
def test_an_unknown_kind_is_still_an_error(kind: str):
    error = error_of(Rejected(handle=1, kind=kind, message="m"))
    assert type(error) is errors.EngineError
    assert error.message == f"{kind}: m"
    assert type(error_of(CoreFailed(kind=kind, message="m"))) is errors.EngineError
