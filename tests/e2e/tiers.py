"""Sim workers with few blocks and KV tiers, and what their answers say of where KV came from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.chaos.cluster import eventually
from tests.e2e.server import PATIENCE, Server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chaos.cluster import Cluster, Node

BLOCK = 256
"""Long, so that computing a prompt is predicted to take longer than a busy machine's reads."""
BLOCKS = 10
"""Blocks of a prompt: all but the last one can be reused, since its last token is computed."""
REUSED = (BLOCKS - 1) * BLOCK
DEVICE = 40
"""Blocks of a worker's device: four prompts. A quarter of them may be held for other workers."""
CONTEXT = 16 * BLOCK
OUTPUT = 8
"""Tokens of an answer."""
FRAME = BLOCK * 16
"""Bytes of a block of the sim engine with content."""

ENGINE = (
    *("--engine", "sim", "--block-size", str(BLOCK), "--max-model-len", str(CONTEXT)),
    *("--engine-option", "content=on", "--engine-option", "slowdown=0"),
    *("--engine-option", f"blocks={DEVICE}", "--engine-option", f"max_len={CONTEXT}"),
    *("--max-batch-tokens", str(CONTEXT), "--max-sequences", "8", "--kv-fetch", "always"),
)
"""The tokens depend on every byte of the KV. Fetches have long deadlines: the machine is busy."""


class Answer(NamedTuple):
    """What a completion said."""

    text: str
    worker: str
    cached: dict[str, int]
    """Reused prompt tokens by source; `prefill-host` and so on: of the worker that prefilled."""
    node: str
    """The worker that `peer` is."""
    tokens: list[int]
    """The ids of the answer, if the request has asked for them: `return_token_ids`."""


def prompt(seed: object, blocks: int = BLOCKS) -> list[int]:
    """Tokens of whole blocks; another seed, another prompt."""
    return random.Random(f"tiers {seed}").choices(range(10, 1000), k=blocks * BLOCK)


def ask(
    front: Server, tokens: list[int], worker: str = "", *, key: str = "", **fields: Any
) -> Answer:
    """Complete a prompt, at the worker of this name if one is given."""
    body = {"prompt": tokens, "max_tokens": OUTPUT, "temperature": 0, "seed": 1, "ignore_eos": True}
    headers = {"x-pdserve-worker": worker} if worker else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(
        front.url + "/v1/completions", json.dumps(body | fields).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        answer = json.loads(response.read())
        told = {name.lower(): value for name, value in response.headers.items()}
    cached, node = _cached(told)
    (choice,) = answer["choices"]
    tokens = choice.get("token_ids") or []
    return Answer(choice["text"], told["x-pdserve-worker"], cached, node, tokens)


def _cached(headers: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Tokens by source, and the peer; all are the device's if nothing else is said."""
    total = int(headers["x-pdserve-cached-tokens"])
    parts = dict(
        part.split("=") for part in headers.get("x-pdserve-cached", "").split("; ") if part
    )
    node = parts.pop("node", "")
    parts.pop("prefill-node", "")
    found = {source: int(count) for source, count in parts.items()}
    if not found and total:
        found = {"device": total}
    own = sum(count for source, count in found.items() if not source.startswith("prefill-"))
    assert own == total, headers
    return found, node


def tier_count(node: Node, tier: str, what: str) -> int:
    """A metric of one tier of a worker."""
    return int(node.count(f'pdserve_kv_tier_{what}{{tier="{tier}"}}'))


def wait_tier(node: Node, tier: str, what: str, least: int) -> None:
    """Until a metric of a tier has reached a value."""

    def reached() -> bool:
        with contextlib.suppress(LookupError):
            return tier_count(node, tier, what) >= least
        return False

    eventually(reached, lambda: (node.name, tier, what, tier_count(node, tier, what), node.lines))


def wait_served(front: Server, *workers: str) -> None:
    """Until the router finds these workers ready for a request."""

    def ready() -> bool:
        with contextlib.suppress(OSError):
            explained = front.post("/route", {"prompt": prompt("hello", 1)})
            standing = {one["worker"]: one["standing"] for one in explained["candidates"]}
            return all(standing.get(worker) == "sound" for worker in workers)
        return False

    eventually(ready, f"{workers} are not ready")


def restart(cluster: Cluster, node: Node) -> Node:
    """Start a worker that was killed anew, with its name and its flags."""
    own = {"HOME": str(cluster.home), "XDG_CONFIG_HOME": str(cluster.home / "config")}
    return cluster.add(cluster.make(node.role, node.name, *node.flags, **own))


def command(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of pdserve's that asks this cluster."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    own = {"HOME": str(cluster.home), "XDG_CONFIG_HOME": str(cluster.home / "config")}
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments],
        env=clean | own | {"PDSERVE_CONFIG": "none", "PDSERVE_JOIN": cluster.address},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
