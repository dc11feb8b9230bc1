"""API keys: the file's format (docs/api-keys.md), and which key a request carries.

Pure: text in, records out. It does not enforce limits (`admission.py`) and never keeps a key in the
clear: only SHA-256 digests stay in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from pdserve.errors import ConfigError, Forbidden, Unauthorized
from pdserve.messages.routing import WEIGHT_BOUNDS
from pdserve.toml import TomlPlaces, read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.messages.card import ModelCard


KeyRefusalReason = Literal["missing", "malformed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may use; None: no limit of its own."""

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens together, cached ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One entry of the file. Keys of one tenant share its cache salt; each has its own limits."""

    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    tenant: str
    weight: float = 1.0
    """The tenant's weight when requests wait in turns; > 0."""
    limits: KeyLimits = KeyLimits()
    models: frozenset[str] | None = None
    """Names of models that the key may use; None: all."""
    max_priority: int | None = None
    """The highest priority of its requests; None: the server's limit for keys without one."""
    cache_isolation: bool = True
    """If true, prefix blocks and tokenized texts are shared within the tenant only."""
    trace_content: bool = False
    """If true, traces may have the text of its requests, where the server has that switched on."""

    def cache_salt(self, requested: str | None) -> str:
        """The salt of a request with this key; a tenant cannot use another tenant's salt."""
        if self.cache_isolation:
            return f"tenant:{self.tenant}\0{requested or ''}"
        return shared_cache_salt(requested)

    def may_use(self, card: ModelCard, name: str) -> bool:
        """True if the key may use `name` of this card: the model by its name or any alias, an
        adapter only if it is listed itself."""
        if self.models is None:
            return True
        if card.lora(name) is not None:
            return name in self.models
        return not self.models.isdisjoint((card.name, *card.aliases))


PRIORITIES: Final = (-(2**31), 2**31 - 1)


def check_priority(priority: int, key: ApiKey | None, most: int | None) -> None:
    """Checks a request's priority.

    Args: `most` limits keys without a limit of their own and requests without a key. None: any
    priority without a key, at most 0 with one.

    Errors: `Forbidden`.
    """
    if key is not None:
        most = key.max_priority if key.max_priority is not None else most or 0
    if most is not None and priority > most:
        whose = "requests without an API key" if key is None else "this API key"
        raise Forbidden(
            f"'priority' {priority} is above {most}, the highest for {whose}", param="priority"
        )


def shared_cache_salt(requested: str | None) -> str:
    """The salt of a request outside any isolated tenant; it can never equal an isolated tenant's
    salt. Empty `requested`: the shared salt."""
    return f"salt:{requested}" if requested else ""


def cache_salt_of(key: ApiKey | None, requested: str | None) -> str:
    """The salt of a request with this key, or without one."""
    return shared_cache_salt(requested) if key is None else key.cache_salt(requested)


class KeyRefused(Unauthorized):
    """A request came without a valid key."""

    def __init__(self, message: str, reason: KeyRefusalReason) -> None:
        super().__init__(message)
        self.reason = reason


class KeyRing:
    """The keys of one file."""

    def __init__(
        self, keys: Iterable[ApiKey], *, in_clear: bool = False, short: Sequence[int] = ()
    ) -> None:
        """`in_clear`: the file contains keys as text instead of digests. `short`: numbers, from 1,
        of entries whose key is short enough to guess."""
        self._by_digest = {key.digest: key for key in keys}
        self.in_clear = in_clear
        self.short = tuple(short)

    def __len__(self) -> int:
        return len(self._by_digest)

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> ApiKey:
        """Returns the key named by the Authorization header or, without that, by the header
        x-api-key.

        The digest is looked up and compared in constant time. The time of the look-up reveals
        something about the digest of what the client sent, but nothing about any key.

        Errors: `KeyRefused`.
        """
        if authorization is None and x_api_key is not None:
            authorization = f"Bearer {x_api_key}"
        if authorization is None:
            raise KeyRefused(
                "this server wants an API key: send 'Authorization: Bearer <key>'", "missing"
            )
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise KeyRefused("the Authorization header must be 'Bearer <key>'", "malformed")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        key = self._by_digest.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise KeyRefused("the API key is not known", "unknown")
        return key


# ---------------------------------------------------------------- the file

_ENTRY = (
    *("key", "key_sha256", "tenant", "weight", "models", "max_priority", "cache_isolation"),
    *("trace_content", "limits"),
)
_LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
MIN_KEY_LENGTH: Final = 16
"""Length in characters from which a random key cannot be guessed."""


def parse_keys(data: bytes, source: str) -> KeyRing:
    """Reads the file's content; `source` names it in errors.

    Errors: `ConfigError` with the line, the field and the nearest known name.
    """
    document = read_toml(data, source)
    text = data.decode("utf-8-sig")
    where = TomlPlaces(text, source, "key")
    where.check_names(document, ("key",), None)
    entries = document.get("key", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise where.error(None, "key", "write each key under its own [[key]] header")
    if not entries:
        raise ConfigError(f"{source}: no [[key]] entry: every request would be refused")
    keys: dict[bytes, ApiKey] = {}
    for number, entry in enumerate(entries):
        key = _entry(entry, number, where)
        if key.digest in keys:
            raise where.error(number, "key", "the same key appears twice")
        keys[key.digest] = key
    clear = [entry.get("key") for entry in entries]
    return KeyRing(
        keys.values(),
        in_clear=any(clear),
        short=[n for n, key in enumerate(clear, 1) if key and len(key) < MIN_KEY_LENGTH],
    )


def _entry(entry: dict[str, Any], number: int, where: TomlPlaces) -> ApiKey:
    where.check_names(entry, _ENTRY, number)
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or not tenant or not tenant.isprintable():
        raise where.error(number, "tenant", "must be a name, as a non-empty printable string")
    return ApiKey(
        digest=_digest(entry, number, where),
        tenant=tenant,
        weight=_weight(entry, number, where),
        limits=_limits(entry.get("limits", {}), number, where),
        models=_models(entry, number, where),
        max_priority=_max_priority(entry, number, where),
        cache_isolation=_flag(entry, "cache_isolation", True, number, where),
        trace_content=_flag(entry, "trace_content", False, number, where),
    )


def _digest(entry: dict[str, Any], number: int, where: TomlPlaces) -> bytes:
    clear, hashed = entry.get("key"), entry.get("key_sha256")
    if (clear is None) == (hashed is None):
        raise where.error(number, "key", "give exactly one of 'key' and 'key_sha256'")
    if clear is not None:
        if not isinstance(clear, str) or not re.fullmatch(r"[!-~]{8,512}", clear):
            raise where.error(number, "key", "must be 8 to 512 printable ASCII characters")
        return hashlib.sha256(clear.encode()).digest()
    if not isinstance(hashed, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", hashed):
        raise where.error(number, "key_sha256", "must be 64 hexadecimal digits")
    return bytes.fromhex(hashed)


def _weight(entry: dict[str, Any], number: int, where: TomlPlaces) -> float:
    weight = entry.get("weight", 1.0)
    low, high = WEIGHT_BOUNDS
    if type(weight) not in (int, float) or not low <= weight <= high:
        raise where.error(number, "weight", f"must be a number from {low} to {high}")
    return float(weight)


def _models(entry: dict[str, Any], number: int, where: TomlPlaces) -> frozenset[str] | None:
    models = entry.get("models")
    if models is None:
        return None
    if not isinstance(models, list) or not models or not all(type(m) is str for m in models):
        raise where.error(number, "models", "must be a non-empty list of model names")
    return frozenset(models)


def _max_priority(entry: dict[str, Any], number: int, where: TomlPlaces) -> int | None:
    value = entry.get("max_priority")
    low, high = PRIORITIES
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise where.error(
            number, "max_priority", f"must be a whole number from {low} to {high}; higher is sooner"
        )
    return value


def _flag(entry: dict[str, Any], name: str, usual: bool, number: int, where: TomlPlaces) -> bool:
    value = entry.get(name, usual)
    if not isinstance(value, bool):
        raise where.error(number, name, "must be true or false")
    return value


def _limits(table: Any, number: int, where: TomlPlaces) -> KeyLimits:
    if not isinstance(table, dict):
        raise where.error(number, "limits", "must be a table: [key.limits]")
    where.check_names(table, _LIMITS, number)
    for name, value in table.items():
        if type(value) is not int or value < 1:
            raise where.error(number, name, "must be a whole number of at least 1")
    return KeyLimits(**table)
