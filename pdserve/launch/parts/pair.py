"""The two workers of an all-in-one: one computes prompts, the other decodes; one engine process has
both, with one copy of the weights and two pools."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Final

from pdserve.engine.shared import SharedProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.carrier import Carrier
    from pdserve.launch.parts.base import Context
    from pdserve.messages.handoff import Mode
    from pdserve.worker.config import WorkerConfig

__all__ = ["pair"]

_MODES: Final[tuple[Mode, ...]] = ("prefill", "decode")


def pair(context: Context) -> list[tuple[WorkerConfig, Callable[[], Carrier]]]:
    """What each of the two is told, and what carries its engine."""
    process = context.config.process
    shared = SharedProcess(
        len(_MODES),
        log_format=process.log_format,
        log_level=process.log_level,
        on_line=context.screen.write_line,
    )
    return [
        (
            dataclasses.replace(context.config.worker, mode=mode, kv_share=1 / len(_MODES)),
            functools.partial(shared.carrier, number),
        )
        for number, mode in enumerate(_MODES)
    ]
