import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from pdserve.frontend.config import FrontendConfig
from pdserve.launch.ready_message import curl, ready_line, served_line
from pdserve.messages.card import ModelCard
from pdserve.messages.engine import EngineCapabilities


def card(**changes):
    fields: dict[str, Any] = {
        "name": "it's-a-model",
        "max_model_len": 2048,
        "vocab_size": 10,
        "block_size": 32,
        "tokenizer_json": b"{}",
        "chat_template": "x",
    }
    return ModelCard(**fields | changes)


def capabilities(**changes):
    fields: dict[str, Any] = {
        "engine": "torch",
        "model_type": "llama",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 2048,
        "vocab_size": 10,
        "block_size": 32,
        "num_blocks": 1024,
        "block_bytes": 4096,
        "max_batch_tokens": 1,
        "max_sequences": 1,
    }
    return EngineCapabilities(**fields | changes)


def test_the_ready_line_ends_with_a_command_to_paste():
    line = ready_line(FrontendConfig(), 8123, card(), capabilities())
    assert line.startswith("ready: it's-a-model on torch (cpu, float32), 2048 tokens per sequence")
    assert "32768 tokens of KV (4.0 MiB)" in line
    assert "\n" not in line
    words = shlex.split(line.partition("try: ")[2])
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8123/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's-a-model", True)


def test_an_engine_without_kv_or_device_says_nothing_of_them():
    line = ready_line(
        FrontendConfig(), 1, card(), capabilities(device="none", dtype="none", num_blocks=0)
    )
    assert line.startswith("ready: it's-a-model on torch, 2048 tokens per sequence; try: ")


def test_a_key_is_asked_for_where_keys_are_set():
    assert "YOUR_API_KEY" in curl(FrontendConfig(api_keys_file=Path("keys")), 1, card())
    assert "YOUR_API_KEY" not in curl(FrontendConfig(), 1, card())


def test_a_model_without_a_chat_template_is_shown_with_a_completion():
    assert "/v1/completions" in curl(FrontendConfig(), 1, card(chat_template=None))


@pytest.mark.parametrize(
    ("host", "reachable"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::", "[::1]"),
        ("fd00::1", "[fd00::1]"),
        ("gpu7", "gpu7"),
    ],
)
def test_the_address_can_be_dialled(host, reachable):
    assert f"http://{reachable}:80/" in curl(FrontendConfig(host=host), 80, card())


def test_a_frontend_says_what_it_serves_without_an_engine():
    line = served_line(FrontendConfig(), 80, card(engine="torch", dtype="float32"))
    assert line.startswith("ready: it's-a-model on torch, float32, 2048 tokens per sequence; try:")
    assert line.endswith(curl(FrontendConfig(), 80, card()))
    line = served_line(FrontendConfig(), 80, card(engine="instant", dtype="none"))
    assert line.startswith("ready: it's-a-model on instant, 2048 tokens")
