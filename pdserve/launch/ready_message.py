"""Formats the message that the server is ready, with a curl command to paste."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pdserve.launch.config.units import approximate_size

if TYPE_CHECKING:
    from pdserve.frontend.config import FrontendConfig
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineCapabilities


def ready_line(
    config: FrontendConfig, port: int, card: ModelCard, capabilities: EngineCapabilities
) -> str:
    """One line: the model, the address, the limits, and a command to try it."""
    return f"{loaded_line(card, capabilities)}; try: {curl(config, port, card)}"


def loaded_line(card: ModelCard, capabilities: EngineCapabilities) -> str:
    """The ready line of a worker: it has no command, since a worker answers no clients."""
    place = ", ".join(x for x in (capabilities.device, capabilities.dtype) if x != "none")
    engine = f"{capabilities.engine} ({place})" if place else capabilities.engine
    limits = f"{card.max_model_len} tokens per sequence"
    # An engine without KV has no blocks.
    if capabilities.num_blocks:
        memory = approximate_size(capabilities.num_blocks * capabilities.block_bytes)
        limits += f", {capabilities.num_blocks * card.block_size} tokens of KV ({memory})"
    return f"ready: {card.name} on {engine}, {limits}"


def served_line(config: FrontendConfig, port: int, card: ModelCard) -> str:
    """The ready line of a frontend, which knows a worker's engine only from its card."""
    engine = ", ".join(x for x in (card.engine, card.dtype) if x not in ("", "none"))
    limits = f"{card.max_model_len} tokens per sequence"
    return f"ready: {card.name} on {engine}, {limits}; try: {curl(config, port, card)}"


def curl(config: FrontendConfig, port: int, card: ModelCard) -> str:
    """A curl command that works as it is, except for the API key."""
    url = f"http://{_reachable(config.host)}:{port}"
    key = "" if config.api_keys_file is None else " -H 'Authorization: Bearer YOUR_API_KEY'"
    body: dict[str, object] = {"model": card.name, "stream": True}
    if card.chat_template is None:
        path = "/v1/completions"
        body |= {"prompt": "Once upon a time", "max_tokens": 32}
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl -N {url}{path} -H 'Content-Type: application/json'{key} -d '{data}'"


def _reachable(host: str) -> str:
    """`host` as it can be dialled from this machine: a wildcard is not an address."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
