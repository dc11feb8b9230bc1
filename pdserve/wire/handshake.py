"""Authenticates both sides of a connection: a mutual proof of the cluster key.

    dialler                                        acceptor
    HELLO  versions, features, nonce_d   ------->
                                         <-------  CHALLENGE  version, features, nonce_a
    AUTH   proof_d, identity             ------->  checks proof_d, decides
                                         <-------  READY      proof_a, identity
    checks proof_a

A proof is an HMAC-SHA256 under the cluster key. It covers the name of this protocol, the prover's
role, the bodies of HELLO and CHALLENGE as they were sent, the prover's identity, and the acceptor's
TLS certificate if there is one. What each part prevents:

    fresh nonces of both sides   replay
    the role                     reflection
    the versions in HELLO        downgrade
    the certificate              a man in the middle of two TLS sessions

The dialler proves first, so a scanner gets no proof that it could try keys against.

Two keys may be accepted while one is replaced: a dialler proves with its first key, an acceptor
takes either and answers with the dialler's. An unauthenticated peer gets a fixed text as refusal.

Without TLS the proof covers only the start of a connection: see `docs/protocol.md`.

Plain functions and two small state machines; nonces come in as arguments. Owned by `Connection`.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

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
from pdserve.wire.codec import PACKED_IDS, decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Epoch, NodeId
    from pdserve.wire.parser import Buffer

T = TypeVar("T")

__all__ = [
    "KEY_BYTES",
    "NONCE_BYTES",
    "PROTOCOL",
    "AcceptorHandshake",
    "ConnectionRole",
    "DialerHandshake",
    "HandshakeRefusal",
    "HandshakeRefusalReason",
    "Identity",
    "IdentityClaim",
    "Negotiated",
    "Versions",
    "refusal_error",
]

PROTOCOL: Final = 1
"""The highest protocol version that this code speaks."""
KEY_BYTES: Final = 32
"""Smallest length of a cluster key: an attacker can test guessed keys against a proof offline."""
NONCE_BYTES: Final = 32
_MAGIC: Final = "pdserve"

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
_Address = Annotated[str, Meta(max_length=200, pattern=r"^[\x21-\x7e]*$")]
_Version = Annotated[int, Meta(ge=1, le=0xFFFF)]
_Bits = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class ConnectionRole(IntEnum):
    """What a connection carries."""

    CONTROL = 0
    BULK = 1


class Hello(msgspec.Struct, frozen=True, array_like=True):
    magic: Annotated[str, Meta(max_length=16)]
    version_min: _Version
    version_max: _Version
    features: _Bits
    nonce: _Nonce


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    version: _Version
    features: _Bits
    nonce: _Nonce


class Auth(msgspec.Struct, frozen=True, array_like=True):
    """Body of AUTH and READY."""

    proof: _Proof
    claim: Annotated[bytes, Meta(max_length=800)]
    """An `IdentityClaim`, kept encoded: the proof covers fields of later versions too."""


class IdentityClaim(msgspec.Struct, frozen=True, array_like=True):
    """A node's claimed identity, and what the connection is for."""

    cluster: _Name
    node: _Name
    epoch: _Bits
    address: _Address = ""
    """Address at which it can be dialled; empty: it cannot."""
    channel: Annotated[int, Meta(ge=0, le=255)] = ConnectionRole.CONTROL
    session: Annotated[bytes, Meta(max_length=32)] = b""
    """In READY: the id of the control connection. In AUTH of a bulk connection: the id of the
    control connection that it belongs to.
    """


class Refuse(msgspec.Struct, frozen=True, array_like=True):
    code: Annotated[int, Meta(ge=0, le=0xFFFF)]
    message: Annotated[str, Meta(max_length=400)] = ""


_decode_hello = decoder(Hello)
_decode_challenge = decoder(Challenge)
_decode_auth = decoder(Auth)
_decode_claim = decoder(IdentityClaim)
_decode_refuse = decoder(Refuse)


@dataclass(frozen=True, slots=True)
class Versions:
    """Protocol versions that a node speaks, and the optional features it understands (bits)."""

    least: int = max(1, PROTOCOL - 1)
    most: int = PROTOCOL
    features: int = PACKED_IDS


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The version and features that both sides agreed on."""

    version: int
    features: int


@dataclass(frozen=True, slots=True)
class Identity:
    """This node's identity, the same for all its connections."""

    cluster: str
    node: NodeId
    epoch: Epoch
    address: str = ""

    def claim(
        self, channel: ConnectionRole = ConnectionRole.CONTROL, session: bytes = b""
    ) -> IdentityClaim:
        """The identity as it is sent."""
        return IdentityClaim(self.cluster, self.node, self.epoch, self.address, channel, session)


# ---------------------------------------------------------------------- refusals


class HandshakeRefusalReason(IntEnum):
    """Codes of REFUSE. An unauthenticated peer can cause only the first four."""

    MALFORMED = 1
    VERSION = 2
    KEY = 3
    BUSY = 4

    CLUSTER = 16
    SELF = 17
    STALE = 18
    SESSION = 19
    CLOSING = 20
    ITSELF = 21


_TEXT: Final[dict[int, tuple[type[HandshakeRefused], str]]] = {
    HandshakeRefusalReason.MALFORMED: (
        HandshakeRefused,
        "the peer did not understand the handshake",
    ),
    HandshakeRefusalReason.VERSION: (
        NoCommonVersion,
        "the peer speaks no version of the protocol that this does",
    ),
    HandshakeRefusalReason.KEY: (
        WrongClusterKey,
        "the peer does not accept this node's cluster key",
    ),
    HandshakeRefusalReason.BUSY: (HandshakeRefused, "the peer has too many unfinished handshakes"),
    HandshakeRefusalReason.CLUSTER: (WrongCluster, "the peer belongs to another cluster"),
    HandshakeRefusalReason.SELF: (WrongPeer, "the address leads back to a node of the same id"),
    HandshakeRefusalReason.STALE: (NameTaken, "the peer knows a later life of this node"),
    HandshakeRefusalReason.ITSELF: (OwnAddress, "the address leads back to this node itself"),
    HandshakeRefusalReason.SESSION: (
        HandshakeRefused,
        "the peer knows no such session for a bulk connection",
    ),
    HandshakeRefusalReason.CLOSING: (HandshakeRefused, "the peer is shutting down"),
}


class HandshakeRefusal(Exception):
    """This side's refusal: `why` is sent, `error` is for this side's log."""

    def __init__(
        self, why: HandshakeRefusalReason, error: HandshakeRefused | ProtocolError
    ) -> None:
        super().__init__(error.message)
        self.why = why
        self.error = error

    def body(self) -> bytes:
        """Body of the REFUSE frame: the code and its fixed text, nothing about this side."""
        return encode(Refuse(self.why, _TEXT[self.why][1]))


def refusal_error(body: Buffer) -> HandshakeRefused:
    """The error for the peer's REFUSE. Raises `ProtocolError` for an unknown code."""
    refuse = _decode_refuse(body)
    kind, text = _TEXT.get(refuse.code, (HandshakeRefused, f"the peer refuses ({refuse.code})"))
    return kind(text)


# ---------------------------------------------------------------------- proofs

_DIALLER: Final = b"dialler"
_ACCEPTOR: Final = b"acceptor"


def proof(
    key: bytes, role: bytes, hello: bytes, challenge: bytes, claim: bytes, binding: bytes
) -> bytes:
    """Computes the HMAC. The length precedes each part, so that different inputs cannot have the
    same bytes."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"pdserve handshake 1", role, hello, challenge, claim, binding):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()


def _check_keys(keys: tuple[bytes, ...]) -> None:
    if not 1 <= len(keys) <= 2 or min(map(len, keys)) < KEY_BYTES:
        raise ValueError(f"one or two keys of at least {KEY_BYTES} bytes are needed")


class DialerHandshake:
    """The dialling side, one step per received frame. Steps raise `HandshakeRefusal`."""

    def __init__(
        self,
        claim: IdentityClaim,
        keys: tuple[bytes, ...],
        nonce: bytes,
        *,
        versions: Versions,
        binding: bytes = b"",
    ) -> None:
        """Args: `binding` is the SHA-256 of the acceptor's certificate under TLS, else empty."""
        _check_keys(keys)
        self.key = keys[0]
        """The key that it proves itself with."""
        self._claim = encode(claim)
        self._cluster = claim.cluster
        self._versions = versions
        self._binding = binding
        hello = Hello(_MAGIC, versions.least, versions.most, versions.features, nonce)
        self.hello = encode(hello)
        self._challenge = b""
        self.spoken = Negotiated(0, 0)

    def on_challenge(self, body: Buffer) -> bytes:
        """Handles CHALLENGE; returns AUTH's body."""
        challenge = _well_formed(_decode_challenge, body)
        if not self._versions.least <= challenge.version <= self._versions.most:
            raise HandshakeRefusal(
                HandshakeRefusalReason.VERSION,
                NoCommonVersion("the peer chose a version not offered"),
            )
        if challenge.features & ~self._versions.features:
            raise HandshakeRefusal(
                HandshakeRefusalReason.MALFORMED,
                ProtocolError("the peer chose a feature not offered"),
            )
        self.spoken = Negotiated(challenge.version, challenge.features)
        self._challenge = bytes(body)
        return encode(Auth(self._proof(_DIALLER, self._claim), self._claim))

    def on_ready(self, body: Buffer) -> IdentityClaim:
        """Handles READY; returns the authenticated peer."""
        ready = _well_formed(_decode_auth, body)
        if not hmac.compare_digest(self._proof(_ACCEPTOR, ready.claim), ready.proof):
            text = "the peer could not prove that it has the cluster key"
            raise HandshakeRefusal(HandshakeRefusalReason.KEY, WrongClusterKey(text))
        claim = _well_formed(_decode_claim, ready.claim)
        _check_cluster(self._cluster, claim)
        return claim

    def _proof(self, role: bytes, claim: bytes) -> bytes:
        return proof(self.key, role, self.hello, self._challenge, claim, self._binding)


class AcceptorHandshake:
    """The accepting side, one step per received frame. Steps raise `HandshakeRefusal`."""

    def __init__(
        self,
        identity: Identity,
        keys: tuple[bytes, ...],
        nonce: bytes,
        *,
        versions: Versions,
        binding: bytes = b"",
    ) -> None:
        _check_keys(keys)
        self._identity = identity
        self._keys = keys
        self._nonce = nonce
        self._versions = versions
        self._binding = binding
        self._hello = self._challenge = b""
        self.key = b""
        """The key that the peer proved itself with; empty until then."""
        self.spoken = Negotiated(0, 0)

    def on_hello(self, body: Buffer) -> bytes:
        """Handles HELLO; returns CHALLENGE's body."""
        hello = _well_formed(_decode_hello, body)
        if hello.magic != _MAGIC:
            raise HandshakeRefusal(
                HandshakeRefusalReason.MALFORMED,
                ProtocolError("the peer does not speak this protocol"),
            )
        version = min(hello.version_max, self._versions.most)
        if version < max(hello.version_min, self._versions.least):
            offered = f"{hello.version_min} to {hello.version_max}"
            raise HandshakeRefusal(
                HandshakeRefusalReason.VERSION,
                NoCommonVersion(f"the peer speaks versions {offered} only"),
            )
        self.spoken = Negotiated(version, hello.features & self._versions.features)
        self._hello = bytes(body)
        self._challenge = encode(Challenge(version, self.spoken.features, self._nonce))
        return self._challenge

    def on_auth(self, body: Buffer) -> IdentityClaim:
        """Handles AUTH; returns the authenticated peer."""
        auth = _well_formed(_decode_auth, body)
        shown = b""
        # All keys are tried, even after a match, so that the time taken does not reveal which fits.
        for key in self._keys:
            expected = proof(key, _DIALLER, self._hello, self._challenge, auth.claim, self._binding)
            if hmac.compare_digest(expected, auth.proof):
                shown = key
        if not shown:
            raise HandshakeRefusal(
                HandshakeRefusalReason.KEY,
                WrongClusterKey("a peer does not have this cluster's key"),
            )
        self.key = shown
        claim = _well_formed(_decode_claim, auth.claim)
        _check_cluster(self._identity.cluster, claim)
        if (claim.node, claim.epoch) == (self._identity.node, self._identity.epoch):
            raise HandshakeRefusal(
                HandshakeRefusalReason.ITSELF, OwnAddress("this node has dialled itself")
            )
        if claim.node == self._identity.node:
            raise HandshakeRefusal(
                HandshakeRefusalReason.SELF, WrongPeer("a peer has this node's own id")
            )
        return claim

    def ready(self, session: bytes, channel: ConnectionRole = ConnectionRole.CONTROL) -> bytes:
        """READY's body, once the peer is to be admitted."""
        claim = encode(self._identity.claim(channel, session))
        shown = proof(self.key, _ACCEPTOR, self._hello, self._challenge, claim, self._binding)
        return encode(Auth(shown, claim))


def _well_formed(decode: Callable[[Buffer], T], body: Buffer) -> T:
    try:
        return decode(body)
    except ProtocolError as error:
        raise HandshakeRefusal(HandshakeRefusalReason.MALFORMED, error) from None


def _check_cluster(ours: str, claim: IdentityClaim) -> None:
    if claim.cluster != ours:
        raise HandshakeRefusal(
            HandshakeRefusalReason.CLUSTER,
            WrongCluster(f"{claim.node} is of cluster {claim.cluster!r}"),
        )
