"""Only a node with the cluster's key gets in, and what went wrong has a name."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import (
    HandshakeRefused,
    NameTaken,
    NoCommonVersion,
    OwnAddress,
    ProtocolError,
    WrongCluster,
    WrongClusterKey,
    WrongPeer,
)
from pdserve.wire import events as ev
from pdserve.wire import handshake as hs
from pdserve.wire.codec import PACKED_IDS, encode
from pdserve.wire.handshake import (
    AcceptorHandshake,
    DialerHandshake,
    HandshakeRefusal,
    HandshakeRefusalReason,
    Versions,
)
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.limits import HANDSHAKE_BODY, HANDSHAKE_BYTES
from pdserve.wire.protocol import ConnectionState
from tests.wire.support import (
    KEY,
    NONCES,
    OTHER_KEY,
    acceptor,
    dialler,
    identity,
    only,
    shake,
    taken,
)


def refused(d, a) -> tuple[Exception, Exception]:
    """Run a handshake that fails; what each side says about it."""
    at_d, at_a = shake(d, a)
    assert d.state is a.state is ConnectionState.ENDED
    return at_d[-1].error, at_a[-1].error


# ---------------------------------------------------------------------- the way it should go


def test_both_sides_prove_themselves_in_two_round_trips() -> None:
    d, a = dialler(), acceptor()
    at_d, at_a = shake(d, a)
    assert d.state is a.state is ConnectionState.OPEN
    authenticated, ready = only(at_a, ev.Authenticated), only(at_d, ev.ConnectionReady)
    assert (authenticated.claim.node, authenticated.claim.epoch) == ("d", 1000)
    assert (ready.claim.node, ready.claim.address) == ("a", "a:7000")
    assert ready.claim.session == b"s" * 16
    assert authenticated.spoken == ready.spoken == hs.Negotiated(1, PACKED_IDS)


def test_the_dialler_proves_first() -> None:
    """A scanner that never proves anything sees a nonce and no proof it could work on."""
    a = acceptor()
    hello = taken(dialler((OTHER_KEY,)))
    assert a.receive_data(hello) == []
    answer = taken(a)
    assert answer[4] == FrameKind.CHALLENGE
    assert msgpack.unpackb(answer[HEADER_BYTES:]) == [1, PACKED_IDS, NONCES[1]]


def test_features_are_what_both_understand() -> None:
    d = dialler(versions=Versions(features=0b0111))
    a = acceptor(versions=Versions(features=0b1110))
    at_d, at_a = shake(d, a)
    assert at_d[0].spoken.features == at_a[0].spoken.features == 0b0110


# ---------------------------------------------------------------------- keys


def test_a_wrong_key_says_so_by_name_on_both_sides() -> None:
    at_d, at_a = refused(dialler((OTHER_KEY,)), acceptor())
    assert isinstance(at_d, WrongClusterKey)
    assert isinstance(at_a, WrongClusterKey)
    assert "does not accept this node's cluster key" in str(at_d)
    assert "does not have this cluster's key" in str(at_a)


@pytest.mark.parametrize(
    ("ours", "theirs", "works"),
    [
        ((KEY,), (KEY,), True),
        ((KEY,), (KEY, OTHER_KEY), True),  # both have the new key, one uses it
        ((KEY, OTHER_KEY), (KEY,), True),
        ((OTHER_KEY, KEY), (KEY, OTHER_KEY), True),
        ((OTHER_KEY,), (KEY, OTHER_KEY), True),
        ((OTHER_KEY, KEY), (KEY,), False),  # the order of steps was not kept
        ((OTHER_KEY,), (KEY,), False),
    ],
)
def test_two_keys_are_accepted_and_the_first_is_shown(ours, theirs, works) -> None:
    d, a = dialler(ours), acceptor(theirs)
    shake(d, a)
    assert (d.state is ConnectionState.OPEN) is works
    assert (a.state is ConnectionState.OPEN) is works


@pytest.mark.parametrize("keys", [(), (b"short",), (KEY, b"short"), (KEY, KEY, KEY)])
def test_keys_that_are_too_short_or_too_many_cannot_be_used(keys) -> None:
    with pytest.raises(ValueError, match="one or two keys"):
        dialler(keys)
    with pytest.raises(ValueError, match="one or two keys"):
        acceptor(keys)


def test_an_acceptor_without_the_key_cannot_pretend() -> None:
    """It accepts any proof, but its own is worth nothing."""
    d = dialler()
    liar = AcceptorHandshake(identity("liar"), (OTHER_KEY,), NONCES[1], versions=Versions())
    d.receive_data(frame(FrameKind.CHALLENGE, liar.on_hello(taken(d)[HEADER_BYTES:])))
    taken(d)
    liar.key = OTHER_KEY  # as if it had been shown
    violated = only(d.receive_data(frame(FrameKind.READY, liar.ready(b""))), ev.ProtocolViolated)
    assert isinstance(violated.error, WrongClusterKey)
    assert taken(d) == b"", "a dialler has nothing to say to a peer it does not trust"


# ---------------------------------------------------------------------- attacks


def frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, 0, 0) + body


def test_a_replayed_handshake_is_worth_nothing() -> None:
    d, a = dialler(), acceptor()
    hello = taken(d)
    a.receive_data(hello)
    d.receive_data(taken(a))
    auth = taken(d)
    a.receive_data(auth)
    assert a.state is ConnectionState.JUDGING
    later = acceptor(nonce=b"x" * 32)
    later.receive_data(hello)
    violated = only(later.receive_data(auth), ev.ProtocolViolated)
    assert isinstance(violated.error, WrongClusterKey)


def test_a_reflected_proof_is_worth_nothing() -> None:
    """An acceptor's proof is no dialler's, even over the same nonces and the same claim."""
    parts = (b"hello", b"challenge", b"claim", b"")
    proofs = {hs.proof(KEY, role, *parts) for role in (b"dialler", b"acceptor")}
    assert len(proofs) == 2


def test_the_parts_of_a_proof_cannot_run_into_each_other() -> None:
    assert hs.proof(KEY, b"r", b"ab", b"c", b"", b"") != hs.proof(KEY, b"r", b"a", b"bc", b"", b"")


def test_a_downgrade_by_somebody_in_between_fails() -> None:
    """Both could speak 2; the one in between changes the offer to 1."""
    both = Versions(1, 2)
    d, a = dialler(versions=both), acceptor(versions=both)
    magic, least, _, features, nonce = msgpack.unpackb(taken(d)[HEADER_BYTES:])
    a.receive_data(frame(FrameKind.HELLO, msgpack.packb([magic, least, 1, features, nonce])))
    d.receive_data(taken(a))
    violated = only(a.receive_data(taken(d)), ev.ProtocolViolated)
    assert isinstance(violated.error, WrongClusterKey)


def test_a_certificate_in_between_fails() -> None:
    """Two TLS sessions show two certificates; each side's proof covers the one it knows."""
    _, at_a = refused(dialler(binding=b"1" * 32), acceptor(binding=b"2" * 32))
    assert isinstance(at_a, WrongClusterKey)
    d, a = dialler(binding=b"1" * 32), acceptor(binding=b"1" * 32)
    shake(d, a)
    assert a.state is ConnectionState.OPEN


def test_a_changed_claim_fails() -> None:
    d, a = dialler(), acceptor()
    a.receive_data(taken(d))
    d.receive_data(taken(a))
    shown, claim = msgpack.unpackb(taken(d)[HEADER_BYTES:])
    fields = msgpack.unpackb(claim)
    fields[1] = "somebody-else"
    forged = msgpack.packb([shown, msgpack.packb(fields)])
    violated = only(a.receive_data(frame(FrameKind.AUTH, forged)), ev.ProtocolViolated)
    assert isinstance(violated.error, WrongClusterKey)


def test_a_choice_that_was_not_offered_is_refused() -> None:
    for challenge in (hs.Challenge(2, 0, NONCES[1]), hs.Challenge(1, 2, NONCES[1])):
        d = dialler()
        taken(d)
        violated = only(
            d.receive_data(frame(FrameKind.CHALLENGE, encode(challenge))), ev.ProtocolViolated
        )
        assert isinstance(violated.error, HandshakeRefused)


# ---------------------------------------------------------------------- who it is


def test_another_cluster_is_named_only_after_the_proof() -> None:
    at_d, at_a = refused(dialler(cluster="one"), acceptor(cluster="two"))
    assert isinstance(at_d, WrongCluster)
    assert isinstance(at_a, WrongCluster)
    at_d, at_a = refused(dialler((OTHER_KEY,), cluster="one"), acceptor(cluster="two"))
    assert isinstance(at_d, WrongClusterKey), "a stranger learns nothing of clusters"


def test_a_node_of_the_same_id_is_refused() -> None:
    at_d, at_a = refused(dialler(name="same", epoch=999), acceptor(name="same"))
    assert isinstance(at_d, WrongPeer)
    assert isinstance(at_a, WrongPeer)


def test_a_node_that_reaches_itself_is_told_so() -> None:
    """It has found one more of its own addresses; nothing is wrong."""
    at_d, at_a = refused(dialler(name="same"), acceptor(name="same"))
    assert isinstance(at_d, OwnAddress)
    assert isinstance(at_a, OwnAddress)


@pytest.mark.parametrize("name", ["", "a b", "tab\t", "ü", "x" * 129, "nul\0"])
def test_names_are_short_and_printable(name) -> None:
    _, at_a = refused(dialler(name=name), acceptor())
    assert isinstance(at_a, HandshakeRefused)


# ---------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("ours", "theirs", "spoken"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 2), (1, 1), 1),
        ((2, 3), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((1, 1), (2, 3), None),
        ((3, 4), (1, 2), None),
    ],
)
def test_the_latest_common_version_is_spoken(ours, theirs, spoken) -> None:
    d = dialler(versions=Versions(*ours))
    a = acceptor(versions=Versions(*theirs))
    at_d, at_a = shake(d, a)
    if spoken is None:
        assert isinstance(at_a[-1].error, NoCommonVersion)
        assert isinstance(at_d[-1].error, NoCommonVersion)
    else:
        assert at_d[0].spoken.version == at_a[0].spoken.version == spoken


# ---------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        encode(["http", 1, 1, 0, NONCES[0]]),
        encode(["pdserve", 0, 1, 0, NONCES[0]]),
        encode(["pdserve", 1, 70_000, 0, NONCES[0]]),
        encode(["pdserve", 1, 1, -1, NONCES[0]]),
        encode(["pdserve", 1, 1, 0, NONCES[0][:-1]]),
        encode(["pdserve", 1, 1, 0]),
        encode({"magic": "pdserve"}),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * HANDSHAKE_BODY,
        encode(["pdserve", 1, 1, 0, NONCES[0]])[:-1] + b"\xc1" * 2,
    ],
)
def test_a_malformed_hello_is_refused(body) -> None:
    a = acceptor()
    violated = only(a.receive_data(frame(FrameKind.HELLO, body)), ev.ProtocolViolated)
    assert isinstance(violated.error, HandshakeRefused)
    assert a.state is ConnectionState.ENDED
    answer = taken(a)
    assert answer[4] == FrameKind.REFUSE
    assert len(answer) < 100


@pytest.mark.parametrize("kind", sorted(set(FrameKind) - {FrameKind.HELLO}))
def test_nothing_but_a_hello_comes_first(kind) -> None:
    a = acceptor()
    violated = only(a.receive_data(frame(kind, b"")), ev.ProtocolViolated)
    assert isinstance(violated.error, HandshakeRefused)
    d = dialler()
    if kind not in (FrameKind.CHALLENGE, FrameKind.REFUSE):
        only(d.receive_data(frame(kind, b"")), ev.ProtocolViolated)


def test_frames_that_may_be_ignored_may_not_be_sent_by_strangers() -> None:
    a = acceptor()
    ignorable = HEADER.pack(0, 99, FrameFlag.IGNORABLE, 0, 0, 0)
    only(a.receive_data(ignorable), ev.ProtocolViolated)


def test_a_stranger_who_goes_on_talking_is_cut_off() -> None:
    d, a = dialler(), acceptor()
    hello = taken(d)
    a.receive_data(hello)
    taken(a)
    only(a.receive_data(hello), ev.ProtocolViolated)
    assert a.receive_data(hello) == [], "what comes after the end is dropped"


def test_a_peer_that_speaks_before_it_is_admitted_is_not_admitted() -> None:
    for more in (b"\0", frame(FrameKind.HELLO, b""), frame(FrameKind.PING, b"")):
        d, a = dialler(), acceptor()
        a.receive_data(taken(d))
        d.receive_data(taken(a))
        events = a.receive_data(taken(d) + more)
        assert isinstance(events[-1], ev.ProtocolViolated)
        assert a.accept(b"") is False
        assert a.state is ConnectionState.ENDED


def test_frames_behind_ready_are_read() -> None:
    d, a = dialler(), acceptor()
    a.receive_data(taken(d))
    d.receive_data(taken(a))
    a.receive_data(taken(d))
    a.accept(b"")
    a.send_tell(7, b"at once")
    ready, told = d.receive_data(taken(a))
    assert isinstance(ready, ev.ConnectionReady)
    assert isinstance(told, ev.TellReceived)
    assert told.body == b"at once"


@given(st.binary(max_size=3 * HANDSHAKE_BODY))
def test_a_stranger_is_never_admitted_and_never_costs_memory(data) -> None:
    a = acceptor()
    for position in range(0, len(data), 700):
        a.receive_data(data[position : position + 700])
    assert a.state in (ConnectionState.GREETING, ConnectionState.PROVING, ConnectionState.ENDED)
    assert a._parser.pending <= HANDSHAKE_BYTES


# ---------------------------------------------------------------------- refusing


def test_another_protocol_is_called_so() -> None:
    for connection, data in (
        (dialler(), b"HTTP/1.1 400 Bad"),
        (acceptor(), b"GET / HTTP/1.1\r\n\r\n"),
    ):
        violated = only(connection.receive_data(data), ev.ProtocolViolated)
        assert isinstance(violated.error, HandshakeRefused)
        assert "not pdserve's cluster protocol" in violated.error.message


def test_an_acceptor_may_refuse_after_the_proof() -> None:
    d, a = dialler(), acceptor()
    a.receive_data(taken(d))
    d.receive_data(taken(a))
    only(a.receive_data(taken(d)), ev.Authenticated)
    a.refuse(HandshakeRefusalReason.STALE, WrongPeer("an earlier life"))
    violated = only(d.receive_data(taken(a)), ev.ProtocolViolated)
    assert isinstance(violated.error, NameTaken)
    assert "later life" in violated.error.message


def test_an_unknown_refusal_is_a_refusal() -> None:
    d = dialler()
    taken(d)
    violated = only(
        d.receive_data(frame(FrameKind.REFUSE, encode(hs.Refuse(999, "x")))), ev.ProtocolViolated
    )
    assert isinstance(violated.error, HandshakeRefused)
    assert "999" in violated.error.message


def test_every_refusal_has_its_text_and_nothing_of_ours() -> None:
    for why in HandshakeRefusalReason:
        refusal = HandshakeRefusal(why, ProtocolError("secret detail"))
        assert b"secret" not in refusal.body()
        assert isinstance(hs.refusal_error(refusal.body()), HandshakeRefused)


def test_eof_during_the_handshake_has_a_name() -> None:
    d = dialler()
    violated = only(d.receive_eof(), ev.ProtocolViolated)
    assert isinstance(violated.error, HandshakeRefused)
    assert d.receive_eof() == []


def test_the_verbs_of_the_wrong_side_are_mistakes() -> None:
    with pytest.raises(RuntimeError):
        acceptor().accept(b"")
    with pytest.raises(RuntimeError):
        dialler().accept(b"")
    with pytest.raises(RuntimeError):
        dialler().refuse(HandshakeRefusalReason.BUSY, HandshakeRefused("x"))


def test_a_dialler_needs_its_claim_to_fit() -> None:
    claim = identity("d").claim()
    assert DialerHandshake(claim, (KEY,), NONCES[0], versions=Versions()).hello
