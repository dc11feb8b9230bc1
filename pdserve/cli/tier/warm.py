"""Sends prompts to a server, so that their KV is cached before clients come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.outputs import printable
from pdserve.client.errors import ClientError
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.client.client import Client
    from pdserve.ids import Seconds

__all__ = ["WarmPrompt", "read_prompts", "warm"]


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """One prompt of a file."""

    source: str
    """For messages: the file, and the line in it."""
    body: dict[str, Any]
    """Fields of a request: `prompt`, or `messages`."""


def read_prompts(files: Iterable[str]) -> list[WarmPrompt]:
    """The prompts of the files: one that ends in .jsonl has a request's body in each line, .json
    one body, any other file is the text of a prompt. Errors: `ConfigError`."""
    found = [prompt for file in files for prompt in _prompts_of(Path(file))]
    if not found:
        raise ConfigError("there is no prompt to send: name files with --prompt")
    return found


def _prompts_of(file: Path) -> list[WarmPrompt]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompt: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt: {file} is not text in UTF-8") from None
    if file.suffix == ".json":
        return [_body(text, str(file))]
    if file.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        return [_body(line, f"{file}:{number}") for number, line in lines if line.strip()]
    if not text.strip():
        raise ConfigError(f"--prompt: {file} is empty")
    return [WarmPrompt(str(file), {"prompt": text})]


def _body(text: str, source: str) -> WarmPrompt:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--prompt: {source}: {error}") from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ConfigError(
            f'--prompt: {source} is no request: an object with "messages" or "prompt" is needed'
        )
    return WarmPrompt(source, body)


async def warm(
    client: Client, prompts: Sequence[WarmPrompt], workers: Sequence[str], ttl: Seconds
) -> int:
    """Sends each prompt for one token, to each of the workers, or to the one that the router
    chooses; prints what was computed. The exit status is 0 if all were answered."""
    failed = False
    for prompt in prompts:
        for worker in workers or ("",):
            try:
                print(printable(f"{prompt.source}: {await _send(client, prompt, worker, ttl)}"))
            except ClientError as error:
                failed = True
                print(printable(f"{prompt.source}: {error}"))
    return exit_codes.FAILED if failed else exit_codes.OK


async def _send(client: Client, prompt: WarmPrompt, worker: str, ttl: Seconds) -> str:
    """Sends one prompt; returns what became of it."""
    wish = {"cache_ttl": ttl} if ttl else {}
    fields: dict[str, Any] = {**prompt.body, **wish, "max_tokens": 1, "stream": False}
    headers = {"x-pdserve-worker": worker} if worker else {}
    if "messages" in fields:
        messages = fields.pop("messages")
        fields.pop("max_completion_tokens", None)
        usage = (await client.chat(messages, headers=headers, **fields)).usage
    else:
        text = fields.pop("prompt")
        usage = (await client.complete(text, headers=headers, **fields)).usage
    if usage is None:
        return "answered"
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    served = getattr(usage.pdserve, "worker", "")
    return f"{usage.prompt_tokens} tokens, {cached} cached" + (f", on {served}" if served else "")
