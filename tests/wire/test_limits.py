"""Limits bound every kind of frame, and what a stranger may send is bounded by constants."""

from __future__ import annotations

import pytest

from pdserve.wire.header import FrameKind
from pdserve.wire.limits import HANDSHAKE_BYTES, HANDSHAKE_TABLE, LARGE, UNKNOWN, Limits

GREETINGS = {
    FrameKind.HELLO,
    FrameKind.CHALLENGE,
    FrameKind.AUTH,
    FrameKind.READY,
    FrameKind.REFUSE,
}


def test_before_authentication_only_the_handshake_is_allowed() -> None:
    assert {kind for kind in range(256) if HANDSHAKE_TABLE[kind] != UNKNOWN} == GREETINGS
    assert HANDSHAKE_BYTES <= 4096


def test_afterwards_everything_but_the_handshake_is() -> None:
    table = Limits().table()
    assert {kind for kind in range(256) if table[kind] != UNKNOWN} == set(FrameKind) - GREETINGS
    assert max(table) == Limits().body


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="together"):
        Limits(pending=40_000, streams=40_000)
    with pytest.raises(ValueError, match="must not be under"):
        Limits(body=LARGE - 1)
    with pytest.raises(ValueError, match="must not be under"):
        Limits(unsent=0)
