"""Contracts hold typed data only; a watch calls back at most once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.ids import NodeId
from pdserve.runtime.ref import Address, Contract, Terminated, Watch
from pdserve.wire.codec import encode
from tests.runtime.actors import BOOK, Add, Crash, Sleep, Total

GONE = Terminated(Address(NodeId("n"), 1, "x", 3), failed=False, reason="stopped")


@pytest.mark.parametrize("message", [Add(1), Crash(), Sleep(0.5)])
def test_a_message_crosses_with_its_type(message) -> None:
    assert BOOK.decode_message(encode(message)) == message


def test_an_answer_may_be_nothing() -> None:
    assert BOOK.decode_answer(encode(None)) is None
    assert BOOK.decode_answer(encode(Total(3))) == Total(3)


def test_what_is_no_message_is_a_protocol_error() -> None:
    for body in (b"", b"\xc1", encode(["unknown", 1]), encode(Total(1)), encode(Add(1))[:-1]):
        with pytest.raises(ProtocolError):
            BOOK.decode_message(body)


def test_untyped_data_has_no_contract() -> None:
    class Loose(msgspec.Struct, array_like=True):
        anything: Any

    class Named(msgspec.Struct):
        name: str

    for kind in (Loose, Named):
        with pytest.raises(TypeError):
            Contract("loose", kind, None)


def test_an_address_travels_and_reads_well() -> None:
    address = Address(NodeId("worker-1"), 7, "router", 3)
    assert msgspec.msgpack.decode(encode(address), type=Address) == address
    assert str(address) == "router#3@worker-1"
    assert str(Address(NodeId("worker-1"), 7, "router")) == "router@worker-1"


def test_a_watch_calls_back_once_and_is_forgotten_once() -> None:
    heard: list[Terminated] = []
    forgotten: list[bool] = []
    watch = Watch(heard.append)
    watch.on_cancel = lambda: forgotten.append(True)
    watch.fire(GONE)
    watch.fire(GONE)
    watch.cancel()
    assert heard == [GONE]
    assert forgotten == [True]


def test_a_cancelled_watch_is_silent() -> None:
    heard: list[Terminated] = []
    watch = Watch(heard.append)
    watch.cancel()
    watch.fire(GONE)
    assert heard == []


def test_a_watch_may_be_cancelled_by_its_own_callback() -> None:
    heard: list[Terminated] = []

    def hear(terminated: Terminated) -> None:
        watch.cancel()
        heard.append(terminated)

    watch = Watch(hear)
    watch.fire(GONE)
    assert heard == [GONE]
