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
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.console.head import as_numbers, head_lines
from pdserve.cli.console.overview import overview
from pdserve.cli.console.pages import MetricsPage, overview_of_pages
from pdserve.cli.console.reach import OPTIONS, add_reach, reach_of
from pdserve.cli.parser import Parser
from pdserve.cli.status_tables import age, as_json, render
from pdserve.errors import ConfigError, Unavailable
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from pdserve.cli.console.overview import Overview
    from pdserve.cli.console.reach import Reach
    from pdserve.ids import Seconds
    from pdserve.messages.status import ClusterStatus

__all__ = ["OPTIONS", "fetch", "health_of", "metrics_of", "run"]

_HTTP_TIMEOUT: Final[Seconds] = 5.0
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


def health_of(url: str) -> dict[str, Any]:
    """The server's `/health`. Errors: `ConfigError` for an invalid URL, `Unavailable`."""
    try:
        health = json.loads(fetch(url, "/health"))
        return {"status": health["status"], **health}
    except (ValueError, KeyError, TypeError):
        raise Unavailable(f"what answers at {url} is no pdserve") from None


def fetch(url: str, path: str) -> bytes:
    """The body of `path`, whatever its status. Errors: as `health_of`."""
    whole = url if "://" in url else f"http://{url}"
    if not whole.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} is no address such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(whole.rstrip("/") + path, timeout=_HTTP_TIMEOUT) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            # A 503 has a body of the same form.
            return error.read()
    except http.client.HTTPException:
        raise Unavailable(f"what answers at {whole} does not speak HTTP") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(
            f"no server answers at {whole}: {reason}; start one with `pdserve`, or name another "
            "with --url"
        ) from None


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
    from pdserve.launch.drain import requests_in_words

    reason = f": {health['reason']}" if health.get("reason") else ""
    uptime, memory = health.get("uptime_seconds", 0), health.get("memory_bytes", 0) >> 20
    lines = [
        f"{url} is {health['status']}{reason}",
        f"pdserve {health.get('version', '?')}, up {age(uptime)}, {memory} MiB",
        f"{requests_in_words(health.get('active_requests', 0))} in progress",
    ]
    if seen is not None:
        lines += ["", *head_lines(seen, 100)[1:]]
    lines += [f"degraded: {name}: {why}" for name, why in health.get("degraded", {}).items()]
    return "\n".join(map(printable, lines))
