"""Runs `pdserve status`: prints members, models, load and degradations, asked of any one node.

It joins nothing. `status_tables` formats the output, `launch.cluster.admin_client` reaches the
node.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec

from pdserve.cli.console.head import as_numbers, head_lines
from pdserve.cli.console.overview import overview
from pdserve.cli.console.pages import MetricsPage, overview_of_pages
from pdserve.cli.console.reach import OPTIONS, add_reach, reach_of
from pdserve.cli.parser import Parser
from pdserve.cli.status_tables import age, as_json, render
from pdserve.errors import ConfigError, Unavailable
from pdserve.launch import exit_codes
from pdserve.net.address import is_loopback

if TYPE_CHECKING:
    from pdserve.cli.console.overview import Overview
    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.status import ClusterStatus

__all__ = ["OPTIONS", "fetch", "health_of", "metrics_of", "run"]

_HTTP_TIMEOUT: Final[Seconds] = 5.0
_MOST_BODY: Final[Bytes] = 64 << 20
"""Largest answer: a page of metrics of hundreds of models is smaller."""
_BETWEEN: Final[Seconds] = 1.0
"""Time between the two scrapes that rates need."""
_WIDEST: Final = 120


def run(arguments: list[str]) -> int:
    """Prints the status; the exit status is 0 if there was one."""
    parser = Parser(
        "pdserve status",
        "Show a server, or a cluster as one of its nodes sees it: members, models, load, what is\n"
        "degraded. If nothing says which, it takes the only one that runs on this machine: a\n"
        "server of this user, or the cluster whose router is at 127.0.0.1:7700.",
    )
    parser.own.add_argument("--json", action="store_true", help="As a JSON object.")
    url = "Ask a server over HTTP instead, such as one of another user or in a container."
    parser.own.add_argument("--url", metavar="URL", default="", help=url)
    add_reach(parser)
    parsed = parser.parse(arguments)
    if parsed.url:
        print(_over_http(parsed.url, as_object=parsed.json))
        return exit_codes.OK
    status = asyncio.run(_ask(reach_of(parsed)))
    if parsed.json:
        shown = as_json(status) | {"overview": as_numbers(overview(status, minute=True))}
        print(json.dumps(shown, indent=2))
    else:
        print(render(status, min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)))
    return exit_codes.OK


async def _ask(reach: Reach) -> ClusterStatus:
    visitor = reach.client()
    try:
        return await visitor.status()
    finally:
        await visitor.close()


# ---------------------------------------------------------------------- over HTTP


class _Health(msgspec.Struct):
    """What is read of `/health`. Anything may listen at an address, so its types are checked. A
    port for probes tells less than the API's."""

    status: str
    reason: str | None = None
    version: str = "?"
    uptime_seconds: float | msgspec.UnsetType = msgspec.UNSET
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET
    active_requests: int | msgspec.UnsetType = msgspec.UNSET
    degraded: dict[str, str] = {}


def health_of(url: str) -> dict[str, Any]:
    """The server's `/health`. Errors: `ConfigError` for an invalid URL, `Unavailable`."""
    body = fetch(url, "/health")
    try:
        known = msgspec.structs.asdict(msgspec.json.decode(body, type=_Health))
        known = {name: value for name, value in known.items() if value is not msgspec.UNSET}
        known |= msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Unavailable(f"what answers at {url} is no pdserve") from None
    return known


def fetch(url: str, path: str) -> bytes:
    """The body of `path`, whatever its status. Errors: as `health_of`."""
    whole = url if "://" in url else f"http://{url}"
    if not whole.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} is no address such as http://127.0.0.1:8000")
    until = time.monotonic() + _HTTP_TIMEOUT
    try:
        with _opened(whole.rstrip("/") + path) as reply:
            return _body(reply, whole, until)
    except http.client.HTTPException:
        raise Unavailable(f"what answers at {whole} does not speak HTTP") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(
            f"no server answers at {whole}: {reason}; start one with `pdserve`, or name another "
            "with --url"
        ) from None


class _Readable(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def _opened(url: str) -> Any:
    # A proxy does not reach this machine as we do.
    direct = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
    try:
        return urllib.request.build_opener(*direct).open(url, timeout=_HTTP_TIMEOUT)
    except urllib.error.HTTPError as error:
        # A 503 has a body of the same form.
        return error


def _body(reply: _Readable, url: str, until: Seconds) -> bytes:
    """All of an answer, which has to end by a time and within `_MOST_BODY`. Errors:
    `Unavailable`."""
    body = bytearray()
    while part := reply.read1(1 << 16):
        body += part
        if len(body) > _MOST_BODY or time.monotonic() > until:
            raise Unavailable(
                f"what answers at {url} is no pdserve, or too slow: its answer does not end within "
                f"{_HTTP_TIMEOUT:g} s and {_MOST_BODY >> 20} MiB"
            )
    return bytes(body)


def metrics_of(url: str) -> MetricsPage:
    """A scrape. Errors: as `fetch`; `Unavailable` if it is no page of metrics."""
    try:
        return MetricsPage.read(fetch(url, "/metrics").decode(), time.monotonic())
    except ValueError:
        raise Unavailable(f"{url}/metrics is no page of metrics") from None


def _over_http(url: str, *, as_object: bool) -> str:
    """The health of a server, and its overview if its metrics can be read."""
    health = health_of(url)
    try:
        pages = [metrics_of(url)]
        time.sleep(_BETWEEN)
        pages.append(metrics_of(url))
    except Unavailable:
        # A server that starts, or one of another release.
        seen = None
    else:
        seen = overview_of_pages(pages, health, url)
    if as_object:
        numbers = {} if seen is None else {"overview": as_numbers(seen)}
        return json.dumps(health | numbers, indent=2)
    return _health_text(url, health, seen)


def _health_text(url: str, health: dict[str, Any], seen: Overview | None) -> str:
    from pdserve.cli.outputs import printable
    from pdserve.runtime.orders.drain import requests_in_words

    reason = f": {health['reason']}" if health["reason"] else ""
    about = [f"pdserve {health['version']}"]
    if "uptime_seconds" in health:
        about.append(f"up {age(health['uptime_seconds'])}")
    if "memory_bytes" in health:
        about.append(f"{health['memory_bytes'] >> 20} MiB")
    lines = [f"{url} is {health['status']}{reason}", ", ".join(about)]
    if "active_requests" in health:
        lines.append(f"{requests_in_words(health['active_requests'])} in progress")
    if seen is not None:
        lines += ["", f"rates of the last {_BETWEEN:g} s", *head_lines(seen, 100)[1:]]
    lines += [f"degraded: {name}: {why}" for name, why in health["degraded"].items()]
    return "\n".join(map(printable, lines))
