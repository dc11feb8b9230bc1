"""Who is there: a mutual proof of the cluster key, before anything else is said.

    dialler                                        acceptor
    HELLO  versions, features, nonce_d   ------->
                                         <-------  CHALLENGE  version, features, nonce_a
    AUTH   proof_d, identity             ------->  checks proof_d, decides
                                         <-------  READY      proof_a, identity
    checks proof_a

A proof is HMAC-SHA256 under the cluster key of: this protocol, whose proof it is, the bodies of
HELLO and CHALLENGE as they travelled, the prover's identity, and the acceptor's TLS certificate if
there is one. Both nonces are fresh, so nothing can be replayed; the roles differ, so nothing can be
reflected; versions are covered, so nothing can be downgraded; the certificate is covered, so that
whoever sits between two TLS sessions fails. The dialler proves first: a scanner harvests no proof.

Two keys may be accepted while one is replaced: a dialler proves with its first, an acceptor takes
any and answers with the one it was shown. A peer that has proved nothing is told a fixed word only.

Without TLS the proof covers the start of a connection, not what follows: see `docs/protocol.md`.

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
from pdserve.wire.codec import decoder, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Epoch, NodeId
    from pdserve.wire.parser import Buffer

T = TypeVar("T")

__all__ = [
    "KEY_BYTES",
    "NONCE_BYTES",
    "PROTOCOL",
    "Acceptor",
    "Channel",
    "Claim",
    "Dialler",
    "Identity",
    "Refusal",
    "Spoken",
    "Versions",
    "Why",
    "refusal_error",
]

PROTOCOL: Final = 1
"""The version of the protocol that this code speaks at most."""
KEY_BYTES: Final = 32
"""A cluster key has at least this many bytes: a proof can be tried against guesses at leisure."""
NONCE_BYTES: Final = 32
_MAGIC: Final = "pdserve"

_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
_Address = Annotated[str, Meta(max_length=200, pattern=r"^[\x21-\x7e]*$")]
_Version = Annotated[int, Meta(ge=1, le=0xFFFF)]
_Bits = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Channel(IntEnum):
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
    """AUTH and READY."""

    proof: _Proof
    claim: Annotated[bytes, Meta(max_length=800)]
    """A `Claim` as it is hashed: later fields of it are covered by the proof, unknown or not."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Who a node says it is, and what the connection is for."""

    cluster: _Name
    node: _Name
    epoch: _Bits
    address: _Address = ""
    """Where others dial it; empty: nobody can."""
    channel: Annotated[int, Meta(ge=0, le=255)] = Channel.CONTROL
    session: Annotated[bytes, Meta(max_length=32)] = b""
    """READY: names the control connection; AUTH of a bulk connection: the one it belongs to."""


class Refuse(msgspec.Struct, frozen=True, array_like=True):
    code: Annotated[int, Meta(ge=0, le=0xFFFF)]
    message: Annotated[str, Meta(max_length=400)] = ""


_decode_hello = decoder(Hello)
_decode_challenge = decoder(Challenge)
_decode_auth = decoder(Auth)
_decode_claim = decoder(Claim)
_decode_refuse = decoder(Refuse)


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions a node speaks, and the optional features it understands (bits)."""

    least: int = max(1, PROTOCOL - 1)
    most: int = PROTOCOL
    features: int = 0


@dataclass(frozen=True, slots=True)
class Spoken:
    """What the two sides agreed on."""

    version: int
    features: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is; the same for all its connections."""

    cluster: str
    node: NodeId
    epoch: Epoch
    address: str = ""

    def claim(self, channel: Channel = Channel.CONTROL, session: bytes = b"") -> Claim:
        """The identity as it travels."""
        return Claim(self.cluster, self.node, self.epoch, self.address, channel, session)


# ---------------------------------------------------------------------- refusals


class Why(IntEnum):
    """Codes of REFUSE. The first four are all that an unauthenticated peer can provoke."""

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
    Why.MALFORMED: (HandshakeRefused, "the peer did not understand the handshake"),
    Why.VERSION: (NoCommonVersion, "the peer speaks no version of the protocol that this does"),
    Why.KEY: (WrongClusterKey, "the peer does not accept this node's cluster key"),
    Why.BUSY: (HandshakeRefused, "the peer has too many unfinished handshakes"),
    Why.CLUSTER: (WrongCluster, "the peer belongs to another cluster"),
    Why.SELF: (WrongPeer, "the address leads back to a node of the same id"),
    Why.STALE: (NameTaken, "the peer knows a later life of this node"),
    Why.ITSELF: (OwnAddress, "the address leads back to this node itself"),
    Why.SESSION: (HandshakeRefused, "the peer knows no such session for a bulk connection"),
    Why.CLOSING: (HandshakeRefused, "the peer is going away"),
}


class Refusal(Exception):
    """This side refuses: `why` goes over the wire, `error` is for this side's log."""

    def __init__(self, why: Why, error: HandshakeRefused | ProtocolError) -> None:
        super().__init__(error.message)
        self.why = why
        self.error = error

    def body(self) -> bytes:
        """Of the REFUSE frame: the code and its fixed text, nothing about this side."""
        return encode(Refuse(self.why, _TEXT[self.why][1]))


def refusal_error(body: Buffer) -> HandshakeRefused:
    """What the peer's REFUSE means here. Raises `ProtocolError` if it means nothing."""
    refuse = _decode_refuse(body)
    kind, text = _TEXT.get(refuse.code, (HandshakeRefused, f"the peer refuses ({refuse.code})"))
    return kind(text)


# ---------------------------------------------------------------------- proofs

_DIALLER: Final = b"dialler"
_ACCEPTOR: Final = b"acceptor"


def proof(
    key: bytes, role: bytes, hello: bytes, challenge: bytes, claim: bytes, binding: bytes
) -> bytes:
    """The HMAC; every part is preceded by its length, so that no two inputs look alike."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in (b"pdserve handshake 1", role, hello, challenge, claim, binding):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()


def _check_keys(keys: tuple[bytes, ...]) -> None:
    if not 1 <= len(keys) <= 2 or min(map(len, keys)) < KEY_BYTES:
        raise ValueError(f"one or two keys of at least {KEY_BYTES} bytes are needed")


class Dialler:
    """The dialling side, one step per frame received. Steps raise `Refusal`."""

    def __init__(
        self,
        claim: Claim,
        keys: tuple[bytes, ...],
        nonce: bytes,
        *,
        versions: Versions,
        binding: bytes = b"",
    ) -> None:
        """`binding` is the SHA-256 of the acceptor's certificate under TLS, else empty."""
        _check_keys(keys)
        self._key = keys[0]
        self._claim = encode(claim)
        self._cluster = claim.cluster
        self._versions = versions
        self._binding = binding
        hello = Hello(_MAGIC, versions.least, versions.most, versions.features, nonce)
        self.hello = encode(hello)
        self._challenge = b""
        self.spoken = Spoken(0, 0)

    def on_challenge(self, body: Buffer) -> bytes:
        """Returns AUTH's body."""
        challenge = _well_formed(_decode_challenge, body)
        if not self._versions.least <= challenge.version <= self._versions.most:
            raise Refusal(Why.VERSION, NoCommonVersion("the peer chose a version not offered"))
        if challenge.features & ~self._versions.features:
            raise Refusal(Why.MALFORMED, ProtocolError("the peer chose a feature not offered"))
        self.spoken = Spoken(challenge.version, challenge.features)
        self._challenge = bytes(body)
        return encode(Auth(self._proof(_DIALLER, self._claim), self._claim))

    def on_ready(self, body: Buffer) -> Claim:
        """Returns who the peer is, now proved."""
        ready = _well_formed(_decode_auth, body)
        if not hmac.compare_digest(self._proof(_ACCEPTOR, ready.claim), ready.proof):
            text = "the peer could not prove that it has the cluster key"
            raise Refusal(Why.KEY, WrongClusterKey(text))
        claim = _well_formed(_decode_claim, ready.claim)
        _check_cluster(self._cluster, claim)
        return claim

    def _proof(self, role: bytes, claim: bytes) -> bytes:
        return proof(self._key, role, self.hello, self._challenge, claim, self._binding)


class Acceptor:
    """The accepting side, one step per frame received. Steps raise `Refusal`."""

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
        self._key = b""
        self.spoken = Spoken(0, 0)

    def on_hello(self, body: Buffer) -> bytes:
        """Returns CHALLENGE's body."""
        hello = _well_formed(_decode_hello, body)
        if hello.magic != _MAGIC:
            raise Refusal(Why.MALFORMED, ProtocolError("the peer does not speak this protocol"))
        version = min(hello.version_max, self._versions.most)
        if version < max(hello.version_min, self._versions.least):
            offered = f"{hello.version_min} to {hello.version_max}"
            raise Refusal(Why.VERSION, NoCommonVersion(f"the peer speaks versions {offered} only"))
        self.spoken = Spoken(version, hello.features & self._versions.features)
        self._hello = bytes(body)
        self._challenge = encode(Challenge(version, self.spoken.features, self._nonce))
        return self._challenge

    def on_auth(self, body: Buffer) -> Claim:
        """Returns who the peer is, now proved."""
        auth = _well_formed(_decode_auth, body)
        shown = b""
        for key in self._keys:  # all of them, whichever fits: the time taken tells nothing
            expected = proof(key, _DIALLER, self._hello, self._challenge, auth.claim, self._binding)
            if hmac.compare_digest(expected, auth.proof):
                shown = key
        if not shown:
            raise Refusal(Why.KEY, WrongClusterKey("a peer does not have this cluster's key"))
        self._key = shown
        claim = _well_formed(_decode_claim, auth.claim)
        _check_cluster(self._identity.cluster, claim)
        if (claim.node, claim.epoch) == (self._identity.node, self._identity.epoch):
            raise Refusal(Why.ITSELF, OwnAddress("this node has dialled itself"))
        if claim.node == self._identity.node:
            raise Refusal(Why.SELF, WrongPeer("a peer has this node's own id"))
        return claim

    def ready(self, session: bytes, channel: Channel = Channel.CONTROL) -> bytes:
        """READY's body, once the peer is to be admitted."""
        claim = encode(self._identity.claim(channel, session))
        shown = proof(self._key, _ACCEPTOR, self._hello, self._challenge, claim, self._binding)
        return encode(Auth(shown, claim))


def _well_formed(decode: Callable[[Buffer], T], body: Buffer) -> T:
    try:
        return decode(body)
    except ProtocolError as error:
        raise Refusal(Why.MALFORMED, error) from None


def _check_cluster(ours: str, claim: Claim) -> None:
    if claim.cluster != ours:
        raise Refusal(Why.CLUSTER, WrongCluster(f"{claim.node} is of cluster {claim.cluster!r}"))
