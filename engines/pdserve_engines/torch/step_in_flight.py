"""Holds a step that was begun and is not finished: what lies between two calls of the executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    import torch

    from pdserve.engine_core.executor import StepPlan
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve_engines.torch.sampling.sampler import SampledTokens

__all__ = ["StepInFlight"]


@dataclass(slots=True, eq=False)
class StepInFlight:
    """One step of an executor that runs ahead."""

    plan: StepPlan
    hidden: torch.Tensor
    """`[n, hidden]`: the rows of all chunks."""
    sequences: list[Sequence] = field(default_factory=list)
    """Those that were sampled, in order."""
    sampled: SampledTokens | None = None
    """None: no tokens were chosen."""
    faults: dict[int, str] = field(default_factory=dict)
    """Index among `sequences` -> why it has no token."""
    lasting: set[int] = field(default_factory=set)
    """Those of `faults` that would fail on any worker."""

    def rows_of(self, plan: StepPlan) -> torch.Tensor:
        """The hidden states of `plan`, whose chunks are some of the step's."""
        if len(plan.chunks) == len(self.plan.chunks):
            return self.hidden
        places = {id(chunk.sequence): place for place, chunk in enumerate(self.plan.chunks)}
        rows = np.array([places[id(chunk.sequence)] for chunk in plan.chunks], np.int64)
        return self.hidden[upload(rows, self.hidden.device)]
