"""Refuses LoRA adapters for an engine that cannot compute them.

It does not know how adapters are loaded or computed: engines do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineSpec

__all__ = ["check_loras"]


def check_loras(spec: EngineSpec, *, able: bool) -> None:
    """Raise `ConfigError` if the spec has adapters and the engine is not `able` to load them."""
    if spec.loras and not able:
        names = ", ".join(repr(adapter.name) for adapter in spec.loras)
        raise ConfigError(
            f"the {spec.engine} engine computes no LoRA adapters, but --lora names {names}: leave "
            "--lora out, or merge the adapter into its base model (peft's merge_and_unload) and "
            "serve the result with --model"
        )
