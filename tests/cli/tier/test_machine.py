"""Which tiers can win here, from measurements that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pdserve
from pdserve.cli.main import main
from pdserve.cli.tier import machine
from pdserve.cli.tier.machine import TierOutlook, TokenCost, bytes_of_config, token_cost
from pdserve.errors import ConfigError
from pdserve.kv.tiers.measuring.probe import DiskProbe, HostProbe, IoRates
from pdserve.launch import exit_codes

BUNDLED = Path(pdserve.__file__).parent / "bundled"
HOST = HostProbe(copy=10e9, pinned=None)
FAST = DiskProbe("/fast", cached=(IoRates(1 << 20, 1, write=1e9, read=6e9),))
SLOW = DiskProbe("/slow", cached=(IoRates(1 << 20, 1, write=1e9, read=2e9),))
LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}


def test_the_verdict_compares_each_tier_with_computing() -> None:
    cost = TokenCost(320 << 10, 1 / 10_000)
    found = TierOutlook(HOST, [FAST, SLOW], cost)
    assert found.verdicts() == [
        "a token has 320.0 KiB of KV, and 10,000 are computed per second: a tier has to bring "
        "3.28 GB/s",
        "host memory: wins for prefixes of 15 tokens and more",
        "disk /fast: wins for prefixes of 111 tokens and more",
        "disk /slow: never wins, computing is sooner",
    ]
    assert found.as_json()["break_even"] == pytest.approx(3.2768e9)
    assert found.lines()[0].startswith("host memory: one thread copies 10.00 GB/s")


@pytest.mark.parametrize("cost", [TokenCost(), TokenCost(bytes=1.0), TokenCost(seconds=1.0)])
def test_without_a_model_only_the_machine_is_told(cost: TokenCost) -> None:
    found = TierOutlook(HOST, [], cost)
    assert found.verdicts() == [
        "give --bytes-per-token or --model-dir, and --prefill-rate, to learn which tiers can win "
        "for a model"
    ]
    assert "break_even" not in found.as_json()


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LLAMA_70B, 320 << 10),
        (LLAMA_70B | {"torch_dtype": "float32"}, 640 << 10),
        (LLAMA_70B | {"head_dim": 64}, 160 << 10),
        ({"text_config": LLAMA_70B}, 320 << 10),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 512),
        (
            {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            61 * 2 * 576,
        ),
        ({}, 0),
        (LLAMA_70B | {"num_attention_heads": 0}, 0),
        (LLAMA_70B | {"hidden_size": None}, 0),
    ],
)
def test_a_checkpoint_says_how_large_its_kv_is(config: dict[str, Any], size: int) -> None:
    assert bytes_of_config(config) == size


def test_what_flags_say_of_a_model(tmp_path: Path) -> None:
    assert token_cost("320KiB", "", "20000") == TokenCost(320 << 10, 1 / 20_000)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert token_cost("", str(tmp_path), "") == TokenCost(320 << 10)
    assert token_cost("1KiB", str(tmp_path), "").bytes == 1024
    for arguments, says in (
        (("much", "", ""), "--bytes-per-token: 'much' is not a size"),
        (("", "", "fast"), "--prefill-rate: 'fast' is not a number per second"),
        (("", str(tmp_path / "absent"), ""), "config.json: No such file or directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            token_cost(*arguments)
        assert says in caught.value.message
    for content, says in ((b"{", "is no JSON"), (b"{}", "does not say how large its KV is")):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            token_cost("", str(tmp_path), "")


def test_the_command_measures_and_judges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disks = {"/fast": FAST, "/absent": DiskProbe("/absent", trouble="cannot be used: no")}
    monkeypatch.setattr(machine, "measure_host", lambda: HOST)
    monkeypatch.setattr(machine, "measure_disk", lambda path: disks[str(path)])
    model = ["--model-dir", str(BUNDLED), "--prefill-rate", "1000"]
    assert main(["doctor", "tiers", "--disk", "/fast", *model]) == exit_codes.OK
    assert "disk /fast: wins for prefixes of" in capsys.readouterr().out
    assert main(["doctor", "tiers", "--disk", "/absent", "--json"]) == exit_codes.FAILED
    told = json.loads(capsys.readouterr().out)
    assert told["disks"][0]["trouble"] == "cannot be used: no"
    assert main(["doctor", "teirs"]) == exit_codes.USAGE
    assert "'teirs' is unknown: use tiers" in capsys.readouterr().err
    assert main(["doctor", *model]) == exit_codes.USAGE
    assert "--model-dir is for the tiers: pdserve doctor tiers" in capsys.readouterr().err
