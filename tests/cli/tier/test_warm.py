"""Prompts of files, and what a server says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.cli.tier.warm import WarmPrompt, read_prompts, warm
from pdserve.client.errors import ClientError
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.protocols.completion_responses import PromptTokensDetails, Served, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.client.client import Client


class Answer:
    def __init__(self, usage: Usage | None) -> None:
        self.usage = usage


class Server:
    """A client of a server, played."""

    def __init__(self, usage: Usage | None = None) -> None:
        self.asked: list[tuple[str, Any, dict[str, Any], dict[str, str]]] = []
        self.usage = usage

    async def complete(self, prompt: str, *, headers: dict[str, str], **fields: Any) -> Answer:
        self.asked.append(("completion", prompt, fields, headers))
        return self._answer(headers)

    async def chat(self, messages: Any, *, headers: dict[str, str], **fields: Any) -> Answer:
        self.asked.append(("chat", messages, fields, headers))
        return self._answer(headers)

    def _answer(self, headers: dict[str, str]) -> Answer:
        if headers.get("x-pdserve-worker") == "gone":
            raise ClientError("no such worker\x1b[2J")
        return Answer(self.usage)


def test_files_are_texts_bodies_or_lines_of_bodies(tmp_path: Path) -> None:
    text, one, many = tmp_path / "a.txt", tmp_path / "b.json", tmp_path / "c.jsonl"
    text.write_text("Be kind.")
    one.write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    many.write_text('{"prompt": "x"}\n\n{"prompt": "y", "model": "m"}\n')
    assert read_prompts([str(text), str(one), str(many)]) == [
        WarmPrompt(str(text), {"prompt": "Be kind."}),
        WarmPrompt(str(one), {"messages": [{"role": "user", "content": "hi"}]}),
        WarmPrompt(f"{many}:1", {"prompt": "x"}),
        WarmPrompt(f"{many}:3", {"prompt": "y", "model": "m"}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"{", "a.json: Expecting property name"),
        ("a.json", b"[]", 'a.json is no request: an object with "messages" or "prompt"'),
        ("a.jsonl", b'{"prompt": "x"}\n{}', "a.jsonl:2 is no request"),
        ("a.json", b'{"prompt": "x", "messages": []}', "is no request"),
        ("a.txt", b" \n", "a.txt is empty"),
        ("a.txt", b"\xff", "a.txt is not text in UTF-8"),
        ("a.jsonl", b"", "there is no prompt to send"),
    ],
)
def test_files_that_are_no_prompts_are_named(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts([str(tmp_path / name)])
    assert says in caught.value.message


def test_no_file_and_absent_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name files with --prompt"):
        read_prompts([])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prompts([str(tmp_path / "absent")])


async def test_each_prompt_is_sent_for_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(worker="w1", router="r", policy="p", attempts=1)
    details = PromptTokensDetails(cached_tokens=96)
    server = Server(
        Usage(prompt_tokens=100, total_tokens=101, prompt_tokens_details=details, pdserve=served)
    )
    prompts = [
        WarmPrompt("a.txt", {"prompt": "x", "max_tokens": 50, "stream": True}),
        WarmPrompt("b.json", {"messages": [1], "max_completion_tokens": 9, "tools": []}),
    ]
    assert await warm(cast("Client", server), prompts, [], 60.0) == exit_codes.OK
    first, second = server.asked
    assert first[:2] == ("completion", "x")
    assert first[2] == {"cache_ttl": 60.0, "max_tokens": 1, "stream": False}
    assert second[:2] == ("chat", [1])
    assert second[2] == {"tools": [], "cache_ttl": 60.0, "max_tokens": 1, "stream": False}
    assert first[3] == second[3] == {}
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "a.txt: 100 tokens, 96 cached, on w1",
        "b.json: 100 tokens, 96 cached, on w1",
    ]


async def test_several_workers_are_warmed_and_failures_do_not_stop_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Server(Usage(prompt_tokens=4, total_tokens=5))
    prompt = WarmPrompt("a.txt", {"prompt": "x"})
    done = await warm(cast("Client", server), [prompt], ["gone", "w2"], 0.0)
    assert done == exit_codes.FAILED
    assert [one[3] for one in server.asked] == [
        {"x-pdserve-worker": "gone"},
        {"x-pdserve-worker": "w2"},
    ]
    assert "cache_ttl" not in server.asked[0][2]
    out = capsys.readouterr().out
    assert "a.txt: no such worker" in out
    assert "a.txt: 4 tokens, 0 cached" in out
    assert "\x1b" not in out
