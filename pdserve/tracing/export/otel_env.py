"""Reads OpenTelemetry's environment variables for the export of traces.

Pure: the environment is an argument. A wrong value never keeps the server from starting: it is
ignored with a warning, as OpenTelemetry's specification asks. The names and rules are those of
"OpenTelemetry Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds

__all__ = [
    *("NO_OTEL", "TRACES_PATH", "OtelSettings"),
    *("looks_like_grpc", "read_otel_environment", "traces_url", "without_password"),
]

T = TypeVar("T")

TRACES_PATH: Final = "/v1/traces"
_BASE: Final = "OTEL_EXPORTER_OTLP"
_TIMEOUT: Final[Seconds] = 10.0
_LONGEST: Final[Seconds] = 30.0
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""A header's name."""
_NOT_IN_HEADERS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OWN_HEADERS: Final = frozenset(("content-type", "content-encoding", "content-length", "host"))
_CREDENTIALS: Final = re.compile(r"(?<=//).*@|^[^/]*@", re.DOTALL)
"""A name and a password before a host, also in what is no URL."""
_GRPC_PORT: Final = 4317

ParentRule = Literal["limit", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtelSettings:
    """What the variables say."""

    disabled: bool = False
    """OTEL_SDK_DISABLED, or OTEL_TRACES_EXPORTER without `otlp`: nothing is exported."""
    endpoint: str = ""
    """URL that traces are posted to; empty: none is given."""
    endpoint_variable: str = ""
    """Where it is from."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to each request; they may hold keys."""
    timeout: Seconds = _TIMEOUT
    """For one request."""
    compression: bool = True
    """gzip, unless a variable says none."""
    certificate: Path | None = None
    """Authorities (PEM) to trust in place of the system's."""
    client_certificate: Path | None = None
    client_key: Path | None = None
    service_name: str = ""
    """OTEL_SERVICE_NAME; empty: none."""
    resource: Mapping[str, str] = field(default_factory=dict)
    """OTEL_RESOURCE_ATTRIBUTES."""
    sample: float | None = None
    """Ratio of requests to trace, from OTEL_TRACES_SAMPLER; None: the variable says nothing."""
    parent: ParentRule | None = None
    """What to do with a client's own decision, from the same variable."""
    warnings: tuple[str, ...] = ()
    """One line for each value that is ignored."""


NO_OTEL: Final = OtelSettings()
"""No variable is set."""


def traces_url(base: str) -> str:
    """The URL for traces of an OTLP endpoint: its own, or below it.

    Errors: `ValueError` says what is wrong with it.
    """
    url = _checked_url(base)
    parts = urlsplit(url)
    if parts.path.rstrip("/").endswith(TRACES_PATH):
        return url
    path = parts.path.rstrip("/") + TRACES_PATH
    return parts._replace(path=path).geturl()


def _checked_url(text: str) -> str:
    url = text.strip()
    shown = repr(_CREDENTIALS.sub("***@", url))
    example = "write http://HOST:4318"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Not its message: that may quote a part of a password.
        raise ValueError(f"{shown} is no URL: {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{shown} is no http or https URL: {example}")
    if port == 0 or any(ord(one) <= 32 or ord(one) == 127 for one in url) or _is_no_utf8(url):
        raise ValueError(f"{shown} is no URL: {example}")
    if parts.query or parts.fragment:
        raise ValueError(f"{shown} has a query or a fragment, which an endpoint has not: {example}")
    return url


def read_otel_environment(environ: Mapping[str, str]) -> OtelSettings:
    """The settings of these variables; empty ones count as absent."""
    return _Reader(environ).read()


class _Reader:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._warnings: list[str] = []

    def read(self) -> OtelSettings:
        self._check_protocol()
        endpoint, variable = self._endpoint()
        sample, parent = self._sampler()
        return OtelSettings(
            disabled=self._disabled(),
            endpoint=endpoint,
            endpoint_variable=variable,
            headers=self._for_traces("HEADERS", self._headers) or {},
            timeout=self._for_traces("TIMEOUT", _timeout) or _TIMEOUT,
            compression=self._for_traces("COMPRESSION", _compression) is not False,
            certificate=self._for_traces("CERTIFICATE", _file),
            client_certificate=self._for_traces("CLIENT_CERTIFICATE", _file),
            client_key=self._for_traces("CLIENT_KEY", _file),
            service_name=self._parsed("OTEL_SERVICE_NAME", str) or "",
            resource=self._parsed("OTEL_RESOURCE_ATTRIBUTES", _pairs) or {},
            sample=sample,
            parent=parent,
            warnings=tuple(self._warnings),
        )

    # ------------------------------------------------------------------ one variable

    def _text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def _parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """The variable's value; None if it is absent or wrong."""
        text = self._text(name)
        if not text:
            return None
        if not text.isascii() and _is_no_utf8(text):
            self._warnings.append(f"{name} is ignored: it is no UTF-8")
            return None
        try:
            return parse(text)
        except ValueError as error:
            self._warnings.append(f"{name} is ignored: {error}")
            return None

    def _for_traces(self, what: str, parse: Callable[[str], T]) -> T | None:
        """The variable for traces, else that for all signals. A wrong one for traces does not hide
        the other."""
        found = self._parsed(f"{_BASE}_TRACES_{what}", parse)
        return self._parsed(f"{_BASE}_{what}", parse) if found is None else found

    # ------------------------------------------------------------------ the variables

    def _endpoint(self) -> tuple[str, str]:
        name = f"{_BASE}_TRACES_ENDPOINT"
        exact = self._parsed(name, _exact_url)
        if exact is None:
            name = f"{_BASE}_ENDPOINT"
            exact = self._parsed(name, _url_below)
        return ("", "") if exact is None else (exact, name)

    def _check_protocol(self) -> None:
        self._for_traces("PROTOCOL", _protocol)

    def _disabled(self) -> bool:
        off = self._parsed("OTEL_SDK_DISABLED", _boolean) is True
        exporters = self._parsed("OTEL_TRACES_EXPORTER", _exporters)
        return off or exporters is False

    def _headers(self, text: str) -> dict[str, str]:
        headers = _pairs(text)
        for name, value in headers.items():
            if not _TOKEN.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a header: write NAME=VALUE,NAME=VALUE")
            if name.lower() in _OWN_HEADERS:
                raise ValueError(f"{name!r} is set by the exporter itself")
            if _NOT_IN_HEADERS.search(value):
                raise ValueError(f"the value of {name!r} has control characters")
        return headers

    def _sampler(self) -> tuple[float | None, ParentRule | None]:
        name = self._parsed("OTEL_TRACES_SAMPLER", _sampler_name)
        if name is None:
            return None, None
        parent: ParentRule = "limit" if name.startswith("parentbased_") else "ignore"
        kind = name.removeprefix("parentbased_")
        if kind == "traceidratio":
            ratio = self._parsed("OTEL_TRACES_SAMPLER_ARG", _ratio)
            return (1.0 if ratio is None else ratio), parent
        return (1.0 if kind == "always_on" else 0.0), parent


# ---------------------------------------------------------------------- values


def _exact_url(text: str) -> str:
    """The URL for traces alone is used as it is; without a path that is the root."""
    parts = urlsplit(_checked_url(text))
    return parts._replace(path=parts.path or "/").geturl()


def _url_below(text: str) -> str:
    parts = urlsplit(_checked_url(text))
    return parts._replace(path=parts.path.rstrip("/") + TRACES_PATH).geturl()


def _pairs(text: str) -> dict[str, str]:
    """`NAME=VALUE,NAME=VALUE`, percent-encoded. One wrong pair makes the whole text wrong."""
    found: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"it is not NAME=VALUE,NAME=VALUE in part {len(found) + 1}")
        found[unquote(name.strip())] = unquote(value.strip())
    return found


def _is_no_utf8(text: str) -> bool:
    """Whether a variable has bytes that are no UTF-8; Python keeps them as lone surrogates."""
    return any("\ud800" <= one <= "\udfff" for one in text)


def _timeout(text: str) -> Seconds:
    """Milliseconds. 0 means no limit, and is our longest."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is no number of milliseconds")
    return min(float(text) / 1000 or _LONGEST, _LONGEST)


def _compression(text: str) -> bool:
    if text.lower() not in ("gzip", "none"):
        raise ValueError(f"{text!r} is unknown: use gzip or none")
    return text.lower() == "gzip"


def _protocol(text: str) -> str:
    if text.lower() != "http/json":
        raise ValueError(
            f"pdserve exports http/json, not {text!r}: give the endpoint of the collector's HTTP "
            "receiver, usually port 4318"
        )
    return text


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _exporters(text: str) -> bool:
    """Whether OTLP is among the exporters."""
    names = {part.strip().lower() for part in text.split(",")}
    if not names & {"otlp", "none"}:
        raise ValueError(f"pdserve has otlp and none, not {text!r}")
    return "otlp" in names


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"there is no file {text!r}")
    return path


def _sampler_name(text: str) -> str:
    kinds = ("always_on", "always_off", "traceidratio")
    known = [*kinds, *(f"parentbased_{kind}" for kind in kinds)]
    if text.lower() not in known:
        raise ValueError(f"{text!r} is unknown here: use one of {', '.join(known)}")
    return text.lower()


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise ValueError(f"{text!r} is no ratio from 0 to 1")
    return ratio


def without_password(url: str) -> str:
    """The URL as it may be shown. A name without a password may be a key."""
    parts = urlsplit(url)
    who, at, host = parts.netloc.rpartition("@")
    if not at:
        return url
    name, colon, _ = who.partition(":")
    return parts._replace(netloc=f"{name}:***@{host}" if colon else f"***@{host}").geturl()


def looks_like_grpc(url: str) -> bool:
    """Whether the URL names the port on which collectors take gRPC."""
    return urlsplit(url).port == _GRPC_PORT
