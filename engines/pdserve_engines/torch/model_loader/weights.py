"""Maps a checkpoint's tensors to the model's matrices, checks and reads them.

The forward pass uses fewer, larger matrices than a checkpoint stores: q, k and v are one product,
gate and up another. The models decide where a tensor is placed and in which format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.quantization import refuse_quantised_tensors
from pdserve_engines.torch.model_loader.safetensors_reader import (
    BYTES,
    DTYPES,
    Checkpoint,
    Entry,
)
from pdserve_engines.torch.model_loader.stacked_experts import StackedExperts

if TYPE_CHECKING:
    from pdserve.engine_core.executor import ProgressFn
    from pdserve_engines.torch.model_loader.config import ExpertsConfig, ModelConfig
    from pdserve_engines.torch.tensor_parallel.shard import Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of the model: the checkpoint's `parts`, stacked along their first dimension."""

    key: str
    """`embed`, `norm`, `head`, or `layers.N.` and one of the names in `_layer`."""
    parts: tuple[tuple[str, Shape], ...]
    """Name and shape of each part."""
    stacked: StackedExperts | None = None
    """What the parts are made of; None: the checkpoint has a tensor for each of them."""

    @property
    def shape(self) -> Shape:
        first = self.parts[0][1]
        return (sum(shape[0] for _, shape in self.parts), *first[1:])

    @property
    def stored(self) -> dict[str, Shape]:
        """Names and shapes of the tensors in the checkpoint."""
        return dict(self.parts) if self.stacked is None else self.stacked.stored


PlaceFn = Callable[[Param, Iterable[torch.Tensor]], None]
"""Takes a parameter's parts; they are views of the file, or made one by one, and must not be
kept."""


def params(config: ModelConfig) -> list[Param]:
    """Every parameter of the model, in the order of the forward pass."""
    hidden, vocab = config.hidden_size, config.vocab_size
    found = [Param("embed", (("model.embed_tokens.weight", (vocab, hidden)),))]
    for index in range(config.num_layers):
        found += _layer(config, index)
    found.append(Param("norm", (("model.norm.weight", (hidden,)),)))
    if not config.tied:
        found.append(Param("head", (("lm_head.weight", (vocab, hidden)),)))
    return found


def nbytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all parameters."""
    return sum(math.prod(param.shape) for param in params(config)) * itemsize


_LLAMA_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_OUTPUT_NORMS = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_NORMS: Mapping[str, Mapping[str, str]] = {
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "glm4": _GLM4_NORMS,
    "olmo2": _OUTPUT_NORMS,
    "olmo3": _OUTPUT_NORMS,
    "exaone4": _OUTPUT_NORMS,
    "cohere": {"attn_norm": "input_layernorm"},
    "cohere2": {"attn_norm": "input_layernorm"},
}
"""A layer's norms and their tensors, by family; other families have Llama's."""


def _layer(config: ModelConfig, index: int) -> Iterator[Param]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
    source, key = f"model.layers.{index}", f"layers.{index}"

    def stacked(name: str, module: str, bias: bool, width: int, **rows: int) -> Iterator[Param]:
        stem = f"{source}.{module}"
        weights = tuple((f"{stem}.{part}_proj.weight", (n, width)) for part, n in rows.items())
        yield Param(f"{key}.{name}", weights)
        if bias:
            biases = tuple((f"{stem}.{part}_proj.bias", (n,)) for part, n in rows.items())
            yield Param(f"{key}.{name}_bias", biases)

    def vector(name: str, module: str, size: int) -> Param:
        return Param(f"{key}.{name}", ((f"{source}.{module}.weight", (size,)),))

    qkv_rows = {"qkv": q + 2 * kv} if config.fused_qkv else {"q": q, "k": kv, "v": kv}
    yield from stacked("qkv", "self_attn", config.qkv_bias, hidden, **qkv_rows)
    if config.qk_norm:
        whole = config.whole_qk_norm
        yield vector("q_norm", "self_attn.q_norm", q if whole else config.head_dim)
        yield vector("k_norm", "self_attn.k_norm", kv if whole else config.head_dim)
    yield from stacked("o", "self_attn", config.o_bias, q, o=hidden)
    if config.sinks:
        yield Param(f"{key}.sinks", ((f"{source}.self_attn.sinks", (config.num_heads,)),))
    for name, module in _NORMS.get(config.family, _LLAMA_NORMS).items():
        yield vector(name, module, hidden)
    if config.experts is not None and index not in config.experts.dense_layers:
        yield from _experts(config, config.experts, source, key)
        return
    rows = {"gate_up": 2 * inner} if config.fused_gate_up else {"gate": inner, "up": inner}
    yield from stacked("gate_up", "mlp", config.mlp_bias, hidden, **rows)
    yield from stacked("down", "mlp", config.mlp_bias, inner, down=hidden)


def _experts(config: ModelConfig, experts: ExpertsConfig, source: str, key: str) -> Iterator[Param]:
    """The router, and the experts' matrices, one expert after the other."""
    hidden, inner = config.hidden_size, experts.intermediate_size
    if experts.storage != "separate":
        yield from _stacked_experts(config, experts, f"{source}.mlp", key)
        return
    module, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if config.family == "mixtral":
        module, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    stem = f"{source}.{module}"
    yield Param(f"{key}.router", ((f"{stem}.gate.weight", (experts.count, hidden)),))
    names = [f"{stem}.experts.{expert}" for expert in range(experts.count)]
    yield Param(
        f"{key}.experts_gate_up",
        tuple((f"{name}.{part}.weight", (inner, hidden)) for name in names for part in (gate, up)),
    )
    yield Param(
        f"{key}.experts_down", tuple((f"{name}.{down}.weight", (hidden, inner)) for name in names)
    )


def _stacked_experts(
    config: ModelConfig, experts: ExpertsConfig, stem: str, key: str
) -> Iterator[Param]:
    hidden, inner = config.hidden_size, experts.intermediate_size
    gpt_oss = config.family == "gpt_oss"
    router = f"{stem}.{'router' if gpt_oss else 'gate'}"
    yield Param(f"{key}.router", ((f"{router}.weight", (experts.count, hidden)),))
    if experts.bias:
        yield Param(f"{key}.router_bias", ((f"{router}.bias", (experts.count,)),))
    quantised = experts.storage == "mxfp4"
    for product, rows, cols in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        name, paired = f"{stem}.experts.{product}_proj", product == "gate_up"
        by_rows = experts.storage == "stacked_rows"
        found = [
            StackedExperts(name, experts.count, rows, cols, quantised, paired, gpt_oss, by_rows)
        ]
        if experts.bias:
            bias = replace(found[0], name=f"{name}_bias", cols=0, quantised=False)
            found.append(bias)
        for source in found:
            suffix = "" if source.cols else "_bias"
            yield Param(f"{key}.experts_{product}{suffix}", source.parts, source)


_STEMS = ("model.", "", "language_model.model.", "model.language_model.")
"""Name prefixes of a checkpoint's text model: as a language model, without a head (embedding
models), and as part of a multimodal model by older and newer tools."""

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.")


def canonical(entries: Mapping[str, Entry], *, multimodal: bool = False) -> dict[str, Entry]:
    """The tensors under the names that `params` uses, without the other parts of a multimodal
    model. `multimodal`: whether the configuration says that it is one."""
    stem = next((stem for stem in _STEMS if f"{stem}embed_tokens.weight" in entries), "model.")
    others = multimodal or "language_model" in stem
    named: dict[str, Entry] = {}
    for name, entry in entries.items():
        bare = name.removeprefix("model.")
        if others and bare.startswith(_OTHER_PARTS):
            continue
        _, head, rest = name.rpartition("lm_head.")
        if head:
            named[f"lm_head.{rest}"] = entry
        else:
            named[f"model.{name.removeprefix(stem)}" if name.startswith(stem) else name] = entry
    return named


def resolve_lm_head(
    config: ModelConfig, entries: Mapping[str, Entry], *, embeds: bool
) -> ModelConfig:
    """Return the configuration with the output layer decided. `embeds`: the checkpoint's other
    files say that it is an embedding model; in any other model a missing output layer is an
    error."""
    if config.tied_unless_stored:
        tied = "lm_head.weight" not in entries
        return replace(config, tied=tied, tied_unless_stored=False, headless=False)
    missing = not config.tied and "lm_head.weight" not in entries
    if missing and (config.headless or embeds):
        return replace(config, tied=True, headless=True)
    return replace(config, headless=False)


def resolve_experts(config: ModelConfig, entries: Mapping[str, Entry]) -> ModelConfig:
    """Return the configuration with the layout of stacked experts decided. Published checkpoints of
    Qwen3-VL store [in_features, out_features]; other tools may write the transposed matrices."""
    experts = config.experts
    if experts is None or experts.storage != "stacked":
        return config
    by_rows = replace(config, experts=replace(experts, storage="stacked_rows"))
    wanted = {name: shape for param in params(by_rows) for name, shape in param.stored.items()}
    stacked = [name for name in entries if name.endswith((".gate_up_proj", ".down_proj"))]
    fits = stacked and all(entries[name].shape == wanted.get(name) for name in stacked)
    return by_rows if fits else config


def check_count(config: ModelConfig, entries: Collection[str]) -> None:
    """Refuse a configuration of more layers than the checkpoint can have tensors for, before
    anything is listed layer by layer."""
    if config.num_layers > len(entries):
        raise UnsupportedCheckpoint(
            f"tensors do not fit config.json: {config.num_layers} layers (num_hidden_layers), and "
            f"{len(entries)} tensors in all"
        )


def check(config: ModelConfig, entries: Mapping[str, Entry]) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's, naming the first few."""
    wanted = {name: shape for param in params(config) for name, shape in param.stored.items()}
    extra = [name for name in entries if name not in wanted and not _is_harmless(name, config)]
    problems = [f"{name} is missing" for name in wanted if name not in entries]
    problems += [f"{name} is not part of a {config.family} model" for name in extra]
    for name, shape in wanted.items():
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.shape != shape:
            problems.append(f"{name} has shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype not in (dtypes := _dtypes(name)):
            problems.append(f"{name} has dtype {entry.dtype}, supported are {', '.join(dtypes)}")
    if problems:
        if config.experts is None or config.experts.storage != "mxfp4":
            refuse_quantised_tensors(entries)
        shown = "; ".join(problems[:4])
        rest = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UnsupportedCheckpoint(f"tensors do not fit config.json: {shown}{rest}")


def _dtypes(name: str) -> Collection[str]:
    return BYTES if name.endswith(("_blocks", "_scales")) else DTYPES


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor that the model does not have may be ignored.

    Old checkpoints store the rotary frequencies, tied ones may store the output layer.
    """
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def load(
    config: ModelConfig,
    checkpoint: Checkpoint,
    place: PlaceFn,
    progress: ProgressFn,
    shard: Shard | None = None,
) -> None:
    """Pass every parameter to `place`, or only the part that `shard` has of it, and report the
    fraction of bytes done."""
    todo = params(config)
    held = config if shard is None else shard.config
    sizes = [sum(checkpoint.entries[name].nbytes for name in param.stored) for param in todo]
    total, done = sum(sizes), 0
    for param, size in zip(todo, sizes, strict=True):
        if param.stacked is not None:
            place(param, param.stacked.read(checkpoint.tensor))
        else:
            part = param
            tensors: Iterable[torch.Tensor] = (checkpoint.tensor(name) for name, _ in param.parts)
            if shard is not None:
                part, tensors = shard.cut(param, list(tensors))
            place(part, _arranged(held, param, tensors))
        done += size
        progress("loading weights", done / total)


def _arranged(
    config: ModelConfig, param: Param, parts: Iterable[torch.Tensor]
) -> Iterable[torch.Tensor]:
    """The parts that the models take: gate and up apart, and the dimensions of each head of q and k
    in the order of `RopeConfig.head_order`, by which no score changes."""
    name = param.key.rpartition(".")[2]
    if name.startswith("experts"):
        # One by one: dequantised, those of a layer take more memory than the rest of it.
        return parts
    tensors = list(parts)
    if name.startswith("gate_up") and len(tensors) == 1:
        return list(tensors[0].chunk(2))
    order = config.rope.head_order(config.head_dim)
    if order is None or not name.startswith(("qkv", "q_norm", "k_norm")):
        return tensors
    whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    heads = whole.view(-1, config.head_dim, *whole.shape[1:])
    turned = heads[: config.num_heads + config.kv_heads] if name.startswith("qkv") else heads
    rest = heads[len(turned) :]
    return [part.flatten(0, 1) for part in (turned[:, order], rest) if len(part)]
