"""Computes the forward pass on an NVIDIA GPU with pdserve's own kernels around torch's products.

The weights are those of `models.torch_model`, which also computes what the kernels do not know;
`support` says what that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_engines.torch.cuda.add_norm import add_norm
from pdserve_engines.torch.cuda.gated_activation import gated_activation
from pdserve_engines.torch.cuda.graphs.static_inputs import Capacity, StaticInputs
from pdserve_engines.torch.cuda.rotate_store import HeadNorms, rotate_store
from pdserve_engines.torch.cuda.step_attention import StepAttention
from pdserve_engines.torch.models.experts import MOST_FEW, feed_experts, feed_few
from pdserve_engines.torch.models.torch_model import TorchModel, query_scales

if TYPE_CHECKING:
    import torch

    from pdserve_engines.torch.cuda.graphs.static_inputs import StaticStep
    from pdserve_engines.torch.cuda.step_attention import StepInputs
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

__all__ = ["KernelModel"]


class KernelModel(TorchModel):
    """Implements `base.ForwardModel`."""

    @property
    def kernels(self) -> str:
        return f"triton on {self._device}, {self._threads} threads"

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        assert self._pool is not None, "bind comes before forward"
        step = StepAttention(batch, self._pool, self._config, self._windows, self._dtype)
        return self._compute(step, batch.fill(step.tokens), after)

    @property
    def graph_obstacle(self) -> str:
        """Implements `decode_graphs.GraphedModel`."""
        return ""

    def decode(self, step: StaticStep) -> torch.Tensor:
        """Implements `decode_graphs.GraphedModel`."""
        return self._compute(step, step.tokens)

    def static_inputs(self, rows: int, max_model_len: int, programs: int) -> StaticInputs:
        """Implements `decode_graphs.GraphedModel`."""
        pool = self._pool
        assert pool is not None, "bind comes before graphs"
        capacity = Capacity.of(rows, pool.num_blocks, pool.layout.block_size, max_model_len)
        return StaticInputs(capacity, self._windows, pool, self._config, programs)

    def _compute(
        self,
        step: StepInputs,
        tokens: torch.Tensor,
        after: LayersDoneFn | None = None,
    ) -> torch.Tensor:
        weights, config = self._held, self._config
        scales = query_scales(config.rope, step.positions, self._dtype)
        x = self._embed(tokens)
        added: torch.Tensor | None = None
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            normed = self._add_and_norm(x, added, layer.get("attn_norm"))
            mixed = self._mix(index, layer, normed, step, scales)
            if index == last and len(step.rows) < len(x):
                # The other rows are not needed any more; their keys and values are stored.
                mixed, x = mixed[step.rows], x[step.rows]
            mixed = self._project(layer, "o", mixed)
            if after is not None:
                after(index + 1)
            added = self._output(layer, "attn_out_norm", mixed)
            normed = self._add_and_norm(x, added, layer.get("mlp_norm"))
            added = self._output(layer, "mlp_out_norm", self._feed_forward(layer, normed))
        return self._add_and_norm(x, added, weights.params["norm"])

    def _add_and_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """Add to `x` in place; the result is `x` itself for a layer without this norm."""
        if weight is not None:
            return add_norm(x, added, weight, self._config.rms_eps)
        return x if added is None else x.add_(added)

    def _mix(
        self,
        index: int,
        layer: dict[str, torch.Tensor],
        normed: torch.Tensor,
        step: StepInputs,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer, before the output product."""
        assert self._pool is not None
        config = self._config
        qkv = self._linear(normed, layer["qkv"], layer.get("qkv_bias"))
        rope = config.rope_of(index)
        norms = None
        if config.qk_norm:
            norms = HeadNorms(layer["q_norm"], layer["k_norm"], config.rms_eps)
        rotate_store(
            qkv,
            None if rope is None else self._ropes[rope],
            step.positions,
            step.blocks,
            self._pool.tensor[:, index],
            norms,
            self._pool.scales(index),
        )
        if scales is not None:
            qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads] *= scales
        return step.attend(index, qkv)

    def _feed_forward(self, layer: dict[str, torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
        if "router" in layer:
            return self._experts(layer, normed)
        gate_up = self._linear(normed, layer["gate_up"], layer.get("gate_up_bias"))
        active = gated_activation(gate_up, gelu=self._config.gelu)
        return self._project(layer, "down", active)

    def _experts(self, layer: dict[str, torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
        assert self._config.experts is not None
        feed = feed_few if len(normed) <= MOST_FEW else feed_experts
        return feed(self._config.experts, layer, normed)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return add_norm(x, None, weight, self._config.rms_eps)
