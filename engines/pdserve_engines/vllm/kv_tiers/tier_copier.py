"""Copies a rank's KV between vLLM's cache and the frames of lower tiers, in vLLM's steps."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING

from pdserve_engines.vllm.kv_tiers.step_io import RankReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.staged_kv.pool import StagingHandle
    from pdserve.ids import Seconds
    from pdserve_engines.vllm.kv_tiers.step_io import Pairs, TierCopies
    from pdserve_engines.vllm.kv_transfer.kv_copy import RankCopier

__all__ = ["TierCopier"]

_log = logging.getLogger(__name__)


class TierCopier:
    """The copies of one rank. An error is reported, and ends nothing: the blocks are a miss."""

    def __init__(self, copier: RankCopier) -> None:
        self._copier = copier
        self._report: RankReport | None = None

    def copy_out(self, copies: TierCopies, arena: StagingHandle | None) -> None:
        """Copy blocks to frames."""
        took, error = self._copy(self._copier.save, copies.out, arena)
        self._report = RankReport(copies.number, out_seconds=took, out_error=error)

    def copy_in(self, copies: TierCopies, arena: StagingHandle | None) -> None:
        """Copy frames to blocks."""
        took, error = self._copy(self._copier.load, copies.into, arena)
        report = self._report or RankReport(copies.number)
        self._report = dataclasses.replace(report, in_seconds=took, in_error=error)

    def _copy(
        self, copy: Callable[[Pairs], None], pairs: Pairs, arena: StagingHandle | None
    ) -> tuple[Seconds, str]:
        if not pairs:
            return 0.0, ""
        began = time.monotonic()
        try:
            assert arena is not None
            self._copier.map(arena)
            copy(pairs)
        except Exception as error:
            _log.exception("KV was not copied between vLLM's cache and the host tier")
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
        return time.monotonic() - began, ""

    def take_report(self) -> RankReport | None:
        """The report of this step's copies; None if it had none."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """Let go of the frames."""
        self._copier.close()
