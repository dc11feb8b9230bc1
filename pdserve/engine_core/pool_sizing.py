"""Computes how many KV blocks an engine gets and the longest sequence they allow. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.limits.sizes import approximate_size

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ModelInfo
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineSpec

__all__ = ["PoolSizing", "check_kv_memory", "size_pool"]


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """The result of `size_pool`, with a warning for the operator."""

    num_blocks: int
    max_model_len: int
    warning: str | None = None


def size_pool(spec: EngineSpec, info: ModelInfo) -> PoolSizing:
    """Divide the KV memory into blocks.

    The pool must hold one sequence of full length, or that sequence could never end. If
    `--max-model-len` does not fit it is refused; the checkpoint's own limit is reduced with a
    warning. Raises `ConfigError`, which names the memory that would suffice or that exists.
    """
    layout = info.layout
    memory = int(_whole(spec, info) * spec.kv_share)
    num_blocks = memory // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"KV memory of {_described(memory, spec, info)} holds no block: one of "
            f"{layout.block_size} tokens takes {layout.block_bytes} bytes. Give it more memory or "
            "take a smaller model; on a GPU a step leaves more with lower --max-batch-tokens and "
            "--max-sequences"
        )
    room = num_blocks * layout.block_size
    wanted = info.max_model_len
    if room >= wanted:
        return PoolSizing(num_blocks, wanted, _capped(memory) if spec.kv_cap else None)
    needed = -(-wanted // layout.block_size) * layout.block_bytes
    shortage = (
        f"KV memory of {_described(memory, spec, info)} holds {room} tokens, a sequence of "
        f"{wanted} tokens needs {needed} bytes ({approximate_size(needed)})"
    )
    enough = math.ceil(needed / spec.kv_share)
    fits = info.kv_most is None or enough <= info.kv_most
    if spec.max_model_len:
        more = f"raise --kv-memory to {enough} or " if fits else ""
        raise ConfigError(f"{shortage}: {more}lower --max-model-len to {room}")
    more = f"--kv-memory {enough} gives all of it" if fits else "more does not fit here"
    if spec.kv_share != 1.0:
        more += ", --aggregated has one worker with all of the memory"
    return PoolSizing(
        num_blocks,
        room,
        f"{shortage}: max_model_len is reduced to {room}; {more}, set --max-model-len {room} to "
        "accept this",
    )


def check_kv_memory(spec: EngineSpec, most: Bytes, reason: str) -> None:
    """Raise `ConfigError`, with both sizes, if `--kv-memory` exceeds `most`."""
    if spec.kv_memory > most and not spec.kv_cap:
        raise ConfigError(
            f"--kv-memory of {approximate_size(spec.kv_memory)} is more than may be taken: "
            f"{approximate_size(most)} {reason}"
        )


def _whole(spec: EngineSpec, info: ModelInfo) -> Bytes:
    """The KV memory of all cores that share it. More than there is, is refused: pages are taken
    only when they are first written, so the engine would run out of memory hours later."""
    whole = spec.kv_memory or info.kv_memory
    if spec.kv_cap:
        return min(whole, spec.kv_cap, whole if info.kv_most is None else info.kv_most)
    if info.kv_most is not None:
        check_kv_memory(spec, info.kv_most, info.kv_reason)
    return whole


def _capped(memory: Bytes) -> str:
    return (
        f"memory ran out: KV has been lowered to {approximate_size(memory)}; lower --kv-memory, or "
        "give this process more memory and start it again"
    )


def _described(memory: Bytes, spec: EngineSpec, info: ModelInfo) -> str:
    """The memory's size and where it comes from, for messages."""
    size = f"{memory} bytes ({approximate_size(memory)}"
    if spec.kv_share != 1.0:
        size += f", {spec.kv_share:.0%} of --kv-memory" if spec.kv_memory else ", for one worker"
    if not spec.kv_memory and info.kv_reason:
        size += f", {info.kv_reason}"
    return f"{size})"
