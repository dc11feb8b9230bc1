"""Says which KV tiers can ever win on this machine: `pdserve doctor tiers`.

A tier wins if it brings the KV of a token sooner than the device computes it. The measurements are
those of `kv.tiers.measuring.probe`; what a token costs comes from flags and from a model's
config.json.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.cli.parser import value_of
from pdserve.errors import ConfigError
from pdserve.kv.tiers.measuring.probe import (
    break_even,
    can_win,
    describe_disk,
    describe_host,
    measure_disk,
    measure_host,
)
from pdserve.launch.config.units import parse_rate, parse_size
from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.ids import Seconds
    from pdserve.kv.tiers.measuring.probe import DiskProbe, HostProbe

__all__ = ["TierOutlook", "TokenCost", "bytes_of_config", "report_tiers", "token_cost"]

_HOST_LATENCY: Final[Seconds] = 0.001
_DISK_LATENCY: Final[Seconds] = 0.005
"""Time to the first byte, as is usual."""
_ITEM_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a token of a prompt costs."""

    bytes: float = 0.0
    """Bytes of its KV; 0: not known."""
    seconds: Seconds = 0.0
    """Time to compute it; 0: not known."""

    @property
    def known(self) -> bool:
        return bool(self.bytes and self.seconds)


@dataclass(frozen=True, slots=True)
class TierOutlook:
    """What was measured, and what it means for one model."""

    host: HostProbe
    disks: Sequence[DiskProbe]
    cost: TokenCost

    def lines(self) -> list[str]:
        """The report for people."""
        found = describe_host(self.host)
        for disk in self.disks:
            found += describe_disk(disk)
        return [*found, "", *self.verdicts()]

    def verdicts(self) -> list[str]:
        """Which tier wins, and from how many tokens on."""
        cost = self.cost
        if not cost.known:
            return [
                "give --bytes-per-token or --model-dir, and --prefill-rate, to learn which tiers "
                "can win for a model"
            ]
        needed = break_even(cost.bytes, cost.seconds)
        size, rate = approximate_size(int(cost.bytes)), 1 / cost.seconds
        return [
            f"a token has {size} of KV, and {rate:,.0f} are computed per second: a tier has to "
            f"bring {needed / 1e9:.2f} GB/s",
            self._verdict("host memory", self.host.copy, _HOST_LATENCY),
            *(
                self._verdict(f"disk {disk.path}", disk.best_read, _DISK_LATENCY)
                for disk in self.disks
            ),
        ]

    def _verdict(self, tier: str, bandwidth: float, latency: Seconds) -> str:
        fewest = can_win(self.cost.bytes, self.cost.seconds, bandwidth, latency)
        if fewest is None:
            return f"{tier}: never wins, computing is sooner"
        return f"{tier}: wins for prefixes of {fewest} tokens and more"

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        found = dataclasses.asdict(self)
        if self.cost.known:
            found["break_even"] = break_even(self.cost.bytes, self.cost.seconds)
        return found


def report_tiers(directories: Sequence[str], cost: TokenCost) -> TierOutlook:
    """Measure this machine; some seconds for each directory."""
    disks = [measure_disk(Path(one).expanduser()) for one in directories]
    return TierOutlook(measure_host(), disks, cost)


def token_cost(size: str, model: str, rate: str) -> TokenCost:
    """What the flags say of a model. Errors: `ConfigError`."""
    kv = value_of("--bytes-per-token", parse_size, size) if size else 0
    tokens = value_of("--prefill-rate", parse_rate, rate) if rate else 0.0
    if model and not kv:
        kv = _bytes_of(Path(model).expanduser())
    return TokenCost(kv, 1 / tokens if tokens else 0.0)


def _bytes_of(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"--model-dir: {model}/config.json: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"--model-dir: {model}/config.json is no JSON") from None
    found = bytes_of_config(config) if isinstance(config, dict) else 0
    if not found:
        raise ConfigError(
            f"--model-dir: {model}/config.json does not say how large its KV is: give "
            "--bytes-per-token"
        )
    return found


def bytes_of_config(config: dict[str, Any]) -> int:
    """Bytes of KV of a token, by a checkpoint's `config.json`, for all layers at the checkpoint's
    dtype; 0: it does not say. Windows of attention are not considered."""
    config = config.get("text_config") or config
    item = _ITEM_BYTES.get(str(config.get("torch_dtype") or config.get("dtype")), 2)
    try:
        layers = int(config["num_hidden_layers"])
        if config.get("kv_lora_rank"):
            return layers * item * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]))
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0
    return 2 * layers * kv_heads * size * item
