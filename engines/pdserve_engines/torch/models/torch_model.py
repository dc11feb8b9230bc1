"""Computes the forward pass in torch operations, for CPU and CUDA, float32 and bfloat16.

A step is one flat batch of decodes and prefill chunks; each row is a token. The model owns its
weights and uses the executor's KV pool; it knows nothing of sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pdserve_engines.torch.models.attention import PagedAttention
from pdserve_engines.torch.models.experts import feed_experts
from pdserve_engines.torch.models.rope import rope_table
from pdserve_engines.torch.models.upload import upload
from pdserve_engines.torch.sampling.sampler import argmax

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.rope_config import RopeConfig
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings


class _Weights:
    """Tensors by name; written while they are placed, then only read."""

    def __init__(self, num_layers: int) -> None:
        self.params: dict[str, torch.Tensor] = {}
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in range(num_layers)]


class TorchModel:
    """Weights as torch tensors, stacked where one product can do the work of several."""

    def __init__(
        self, config: ModelConfig, settings: TorchSettings, weights: _Weights | None = None
    ) -> None:
        """Use these weights, or start with none placed."""
        self._config = config
        self._threads = settings.threads
        self._dtype, self._device = settings.dtype, settings.device
        self._kv_dtype = settings.kv_dtype
        self._weights: _Weights | None = weights or _Weights(config.num_layers)
        """None once closed; siblings have references of their own."""
        self._ropes = {
            rope: rope_table(rope, config.head_dim, settings.max_model_len).to(settings.device)
            for rope in map(config.rope_of, range(config.num_layers))
            if rope is not None
        }
        self._windows = {config.window(layer) for layer in range(config.num_layers)}
        self._pool: KvPool | None = None

    @property
    def kernels(self) -> str:
        return f"torch on {self._device}, {self._threads} threads"

    @property
    def exact(self) -> str:
        # The order in which products are summed depends on the number of rows.
        return ""

    @property
    def torch_threads(self) -> int:
        return self._threads

    @property
    def weight_bytes(self) -> int:
        groups = [self._held.params, *self._held.layers]
        return sum(tensor.nbytes for group in groups for tensor in group.values())

    def place(self, param: Param, parts: Iterable[torch.Tensor]) -> None:
        group, _, name = param.key.rpartition(".")
        float_norm = self._config.float_norms and name.endswith("norm")
        dtype = torch.float32 if float_norm else self._dtype
        tensor = torch.empty(param.shape, dtype=dtype, device=self._device)
        row = 0
        for part in parts:
            tensor[row : row + len(part)].copy_(part)
            row += len(part)
        if float_norm:
            tensor += 1
        weights = self._held
        owner = weights.layers[int(group.removeprefix("layers."))] if group else weights.params
        owner[name] = tensor

    def sibling(self, settings: TorchSettings) -> TorchModel | None:
        weights = self._weights
        return None if weights is None else type(self)(self._config, settings, weights)

    def bind(self, pool: KvPool) -> None:
        self._pool = pool

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        assert self._pool is not None, "bind comes before forward"
        weights, config = self._held, self._config
        attention = PagedAttention(
            batch,
            self._pool,
            config.groups,
            self._windows,
            config.query_scalar,
            config.attention_cap,
            sinks=config.sinks,
            dtype=self._dtype,
        )
        positions = upload(batch.positions, self._device)
        angles: dict[RopeConfig | None, _Angles | None] = {
            rope: _angles(table[positions]) for rope, table in self._ropes.items()
        }
        scales = query_scales(config.rope, positions, self._dtype)
        rows = upload(batch.rows, self._device)
        x = self._embed(batch.fill(upload(batch.tokens, self._device)))
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            normed = self._norm_input(layer, "attn_norm", x)
            turns = angles.get(config.rope_of(index))
            mixed = self._attend(index, layer, normed, attention, turns, scales)
            if index == last and len(rows) < len(x):
                # The other rows are not needed any more; their keys and values are stored.
                mixed, x = mixed[rows], x[rows]
                normed = normed[rows] if config.parallel else normed
            mixed = self._project(layer, "o", mixed)
            if after is not None:
                after(index + 1)
            x += self._output(layer, "attn_out_norm", mixed)
            if not config.parallel:
                normed = self._norm_input(layer, "mlp_norm", x)
            x += self._output(layer, "mlp_out_norm", self._feed_forward(layer, normed))
        return self._norm(x, weights.params["norm"])

    def greedy(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> list[int]:
        with torch.inference_mode():
            tokens: list[int] = argmax(self.logits(self.forward(batch, after))).tolist()
        return tokens

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._output_product(hidden).float()
        if self._config.logit_scale != 1.0:
            logits *= self._config.logit_scale
        cap = self._config.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def close(self) -> None:
        self._pool = None
        self._weights = None

    @property
    def _held(self) -> _Weights:
        assert self._weights is not None, "the model is closed"
        return self._weights

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.embedding(tokens, self._held.params["embed"])
        if self._config.embed_scale == 1.0:
            return x
        # Models were trained with the scale rounded to the weights' dtype.
        return x * torch.tensor(self._config.embed_scale, dtype=x.dtype)

    def _attend(
        self,
        index: int,
        layer: dict[str, torch.Tensor],
        normed: torch.Tensor,
        attention: PagedAttention,
        angles: _Angles | None,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self._config
        qkv = self._linear(normed, layer["qkv"], layer.get("qkv_bias"))
        heads = qkv.view(len(normed), -1, config.head_dim)
        split = config.num_heads + config.kv_heads
        turned = place = heads[:, :split]
        if config.qk_norm:
            turned = self._norm_heads(layer, turned)
        if angles is not None:
            _rotate(turned, *angles, place)
        elif turned is not place:
            place.copy_(turned)
        queries, written = heads[:, : config.num_heads], heads[:, config.num_heads :]
        attention.write(index, written)
        if scales is not None:
            queries *= scales
        window = config.window(index)
        return attention.attend(index, queries, window, layer.get("sinks")).flatten(1)

    def _norm_heads(self, layer: dict[str, torch.Tensor], heads: torch.Tensor) -> torch.Tensor:
        """The norms of q and k: of each head, or of all of them as one row."""
        count, whole = self._config.num_heads, self._config.whole_qk_norm
        found = []
        for part, name in ((heads[:, :count], "q_norm"), (heads[:, count:], "k_norm")):
            rows = part.flatten(1) if whole else part
            found.append(self._norm(rows, layer[name]).view(part.shape))
        return torch.cat(found, dim=1)

    def _norm_input(
        self, layer: dict[str, torch.Tensor], name: str, x: torch.Tensor
    ) -> torch.Tensor:
        return self._norm(x, layer[name]) if self._config.in_norms else x

    def _output(
        self, layer: dict[str, torch.Tensor], name: str, computed: torch.Tensor
    ) -> torch.Tensor:
        """What is added to the layer's input: the output, normed or scaled in some families."""
        if self._config.out_norms:
            return self._norm(computed, layer[name])
        scale = self._config.residual_scale
        return computed if scale == 1.0 else computed.mul_(scale)

    def _feed_forward(self, layer: dict[str, torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
        config = self._config
        if config.experts is not None and "router" in layer:
            return feed_experts(config.experts, layer, normed)
        product = self._linear(normed, layer["gate_up"], layer.get("gate_up_bias"))
        gate, up = product.chunk(2, dim=-1)
        active = functional.gelu(gate, approximate="tanh") if config.gelu else functional.silu(gate)
        return self._project(layer, "down", active.mul_(up))

    def _project(self, layer: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        """A product that ends attention or feed-forward."""
        return self._linear(x, layer[name], layer.get(f"{name}_bias"))

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def _output_product(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._held.params["embed" if self._config.tied else "head"]
        return self._linear(hidden, head)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self._config.rms_eps
        if self._config.layer_norms:
            return functional.layer_norm(x, weight.shape, weight, None, eps)
        if weight.dtype == x.dtype:
            return functional.rms_norm(x, weight.shape, weight, eps)
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


_Angles = tuple[torch.Tensor, torch.Tensor]


def _angles(table: torch.Tensor) -> _Angles:
    """Cosines and sines as `_rotate` takes them, each `[T, 1, head_dim]`, of `[T, 2, head_dim / 2]`
    of a rope table."""
    cosines, sines = table.unsqueeze(1).unbind(2)
    return torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)


def query_scales(
    rope: RopeConfig, positions: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """What queries are multiplied by, `[T, 1, 1]`; None: nothing."""
    if not rope.query_beta:
        return None
    contexts = torch.floor(positions / rope.original_max_positions)
    scales: torch.Tensor = 1 + rope.query_beta * torch.log(1 + contexts)
    return scales[:, None, None].to(dtype)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, out: torch.Tensor) -> None:
    """Write `[T, heads, head_dim]` with the rotary embedding to `out`, which may be `x`; the two
    halves of a head are its pairs. Computed in float32, in few operations: each costs the host as
    much as a launch."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    torch.add(x * cosines, swapped * sines, out=out)
