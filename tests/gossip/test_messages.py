"""Every message: there and back, with the plain msgpack package too, and never out of bounds."""

from __future__ import annotations

import typing

import msgpack
import msgspec
import pytest

from pdserve.errors import ProtocolError
from pdserve.gossip import messages as m
from pdserve.ids import NodeId
from pdserve.wire.codec import encode

A = NodeId("a")
RECORD = m.MemberRecord(A, 7, 2, m.MemberState.SUSPECT, 3, "host:1", "worker")
RUMOUR = m.Rumour(RECORD, by=NodeId("b"), refused=True)
PART = m.CardPart("tokenizer", bytes(16), 5)
EXAMPLES = [
    m.News((RUMOUR,)),
    m.Ping(1, (RUMOUR,)),
    m.Ack(1),
    m.IndirectPing(1, A, 7),
    m.IndirectPingResult(1, True),
    m.TableHash(bytes(8)),
    m.BucketHashes(bytes(8 * m.BUCKETS)),
    m.RecordHashes(b"\x01", {A: bytes(8)}),
    m.Records((RECORD,), (A,)),
    m.CardRequest(A, 7, 1),
    m.CardReply(A, 7, 1, m.Card(b"body", (PART,))),
    m.PartRequest(bytes(16), 0),
    m.PartReply(bytes(16), 0, b"data"),
]


def test_the_examples_are_all_messages():
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(m.Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message):
    assert m.decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_plain_msgpack_reads_a_message_as_an_array(message):
    tag, *fields = msgpack.unpackb(encode(message))
    assert tag == message.__struct_config__.tag
    assert len(fields) == len(message.__struct_fields__)
    assert m.decode(msgpack.packb([tag, *fields])) == message


def test_a_later_version_may_append_fields():
    assert m.decode(msgpack.packb([3, 9, [], "new"])) == m.Ack(9)


@pytest.mark.parametrize(
    "message",
    [
        m.News((RUMOUR,) * 65),
        m.TableHash(bytes(7)),
        m.BucketHashes(b""),
        m.Records((RECORD,) * 513),
        m.Ping(-1),
        m.IndirectPing(1, NodeId(""), 7),
        m.IndirectPing(1, NodeId("x" * 129), 7),
        m.CardReply(A, 7, 1, m.Card(bytes(8193))),
        m.PartReply(bytes(16), 0, bytes(256 * 1024 + 1)),
        m.PartRequest(bytes(16), -1),
    ],
)
def test_what_is_out_of_bounds_is_not_read(message):
    with pytest.raises(ProtocolError):
        m.decode(encode(message))


@pytest.mark.parametrize("data", [b"", b"\x00", msgpack.packb([99]), msgpack.packb({"a": 1})])
def test_what_is_no_message_is_not_read(data):
    with pytest.raises(ProtocolError):
        m.decode(data)


def test_a_record_is_small():
    assert len(encode(msgspec.structs.replace(RECORD, node=NodeId("n" * 16)))) < 64
