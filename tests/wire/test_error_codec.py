"""Errors cross the wire with their class, their text and nothing else."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from pdserve import errors
from pdserve.errors import (
    DialFailed,
    LinkError,
    LinkLost,
    NoWorker,
    Overloaded,
    PdserveError,
    Unavailable,
    WrongClusterKey,
)
from pdserve.wire.error_codec import Failure, decode_failure, encode_failure, error_of, failure_of
from pdserve.wire.limits import Limits

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PdserveError) and not issubclass(kind, LinkError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_crosses_unchanged(kind) -> None:
    error = kind("the reason", param="field", retry_after=1.25)
    crossed = error_of(decode_failure(encode_failure(failure_of(error))))
    assert type(crossed) is kind
    assert (crossed.message, crossed.param, crossed.retry_after) == ("the reason", "field", 1.25)


@pytest.mark.parametrize(
    "error", [LinkLost("x", sent=False), DialFailed("x"), WrongClusterKey("x")]
)
def test_a_link_that_failed_elsewhere_is_no_failure_of_this_link(error) -> None:
    assert type(error_of(failure_of(error))) is Unavailable
    assert type(error_of(Failure("LinkLost", "x"))) is Unavailable


def test_a_foreign_exception_keeps_its_text_at_home() -> None:
    error = error_of(failure_of(KeyError("sk-secret")))
    assert type(error) is PdserveError
    assert error.message == "the node failed inside; its log says how"


@pytest.mark.parametrize("name", ["Invented", "Exception", "ClassVar", "annotations", "__name__"])
def test_an_unknown_name_becomes_the_root_class(name) -> None:
    error = error_of(Failure(name, "x"))
    assert type(error) is PdserveError
    assert error.message == f"{name}: x"


def test_a_failure_always_fits_its_frame() -> None:
    error = Overloaded("ü" * 5000, param="p" * 5000)
    assert len(encode_failure(failure_of(error))) < Limits().table()[35]


def test_only_the_link_branch_says_whether_it_was_sent() -> None:
    assert LinkLost("x").sent, "unless it is known, the peer may have acted"
    assert not LinkLost("x", sent=False).sent
    assert not DialFailed("x").sent
    assert not hasattr(NoWorker("x"), "sent")
    assert msgspec.structs.fields(Failure)[0].name == "kind"
