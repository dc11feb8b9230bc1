"""All types that nodes decode hold typed data only."""

from __future__ import annotations

import importlib
import pkgutil

import msgspec
import pytest

import pdserve
from pdserve.messages.routing import RouteRequest, WorkerLoad
from pdserve.wire.codec import Method, decoded_kinds, decoder
from pdserve.wire.handshake import Hello
from pdserve.wire.type_check import check_type

DECODING = tuple(
    f"pdserve.{name}."
    for name in ("frontend.dispatch", "gossip", "net", "router", "runtime", "wire", "worker")
)
"""Packages that decode what other nodes send."""


class Typed(msgspec.Struct, array_like=True, frozen=True):
    name: str
    numbers: tuple[int, ...] = ()


class Named(msgspec.Struct):
    name: str


class Untyped(msgspec.Struct, array_like=True):
    anything: object


def test_nothing_that_holds_untyped_data_can_be_decoded() -> None:
    for kind in (object, Untyped, list[object], dict[str, object]):
        with pytest.raises(TypeError, match="untyped"):
            check_type(kind)
    with pytest.raises(TypeError, match="not array_like"):
        check_type(Named)
    check_type(msgspec.Raw)


def test_what_the_process_decodes_is_known_and_typed() -> None:
    """Start-up does not check the types, since that takes long."""
    for module in pkgutil.walk_packages(pdserve.__path__, "pdserve."):
        if module.name.startswith(DECODING):
            importlib.import_module(module.name)
    known = len(decoded_kinds)
    _ = Method(1, "other", Typed, str), decoder(Typed)
    assert decoded_kinds[known:] == [Typed, str, Typed]
    del decoded_kinds[known:]
    for kind in decoded_kinds:
        check_type(kind)
    assert {Hello, RouteRequest, WorkerLoad} <= {k for k in decoded_kinds if isinstance(k, type)}
