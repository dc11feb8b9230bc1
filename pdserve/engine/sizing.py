"""How many KV blocks an engine gets, and how long a sequence may be with them. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.engine.executor import ModelInfo
    from pdserve.messages.engine import EngineSpec

__all__ = ["Sizing", "size_pool"]


@dataclass(frozen=True, slots=True)
class Sizing:
    """The result, with what an operator should be told about it."""

    num_blocks: int
    max_model_len: int
    warning: str | None = None


def size_pool(spec: EngineSpec, info: ModelInfo) -> Sizing:
    """Divide the KV memory into blocks.

    The pool must hold one sequence of full length, or that sequence could never end. A length that
    was asked for is refused if it does not fit, the checkpoint's own limit is reduced with a
    warning. Raises `ConfigError`, which names the memory that would suffice.
    """
    layout = info.layout
    memory = int((spec.kv_memory or info.kv_memory) * spec.kv_share)
    share = "" if spec.kv_share == 1.0 else f", which is {spec.kv_share:.0%} of --kv-memory,"
    num_blocks = memory // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"KV memory of {memory} bytes{share} holds no block: one of {layout.block_size} tokens "
            f"takes {layout.block_bytes} bytes"
        )
    room = num_blocks * layout.block_size
    wanted = info.max_model_len
    if room >= wanted:
        return Sizing(num_blocks, wanted)
    needed = -(-wanted // layout.block_size) * layout.block_bytes
    shortage = (
        f"KV memory of {memory} bytes{share} holds {room} tokens, a sequence of {wanted} tokens "
        f"needs {needed} bytes"
    )
    if spec.max_model_len:
        raise ConfigError(f"{shortage}: raise --kv-memory or lower --max-model-len")
    return Sizing(num_blocks, room, f"{shortage}: max_model_len is reduced to {room}")
