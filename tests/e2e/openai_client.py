"""OpenAI's own client, set up for tests."""

from __future__ import annotations

import openai


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """One that tries nothing twice. No connection outlives its request: each test is checked for
    sockets that it leaves open."""
    headers = {"Connection": "close"}
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, default_headers=headers)
