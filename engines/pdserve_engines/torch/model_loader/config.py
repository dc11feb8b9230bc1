"""Reads the architecture from a checkpoint's `config.json`, or refuses it with the reason.

Reads JSON only; it knows no tensors and no devices. What this engine does not support is refused
here by name, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader import mxfp4
from pdserve_engines.torch.model_loader.architectures import (
    CLASSIFIER_ARCHITECTURES,
    HEADLESS_ARCHITECTURES,
    TEXT_PARTS,
    ModelFamily,
    architectures,
    family_of,
)
from pdserve_engines.torch.model_loader.config_keys import Json, flag, number, positive, read_json
from pdserve_engines.torch.model_loader.families import FAMILIES, Fields
from pdserve_engines.torch.model_loader.layer_patterns import parse_nope_layers, parse_windows
from pdserve_engines.torch.model_loader.quantization import (
    refuse_quantised_config,
    refuse_quantised_files,
)
from pdserve_engines.torch.model_loader.rope_config import RopeConfig, max_positions, parse_rope
from pdserve_engines.torch.model_loader.text_part import text_part
from pdserve_engines.torch.model_loader.weight_formats.base import METHODS, weight_format

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SwigluConfig:
    """A gate of `gate * sigmoid(alpha * gate) * (up + 1)`, both cut to `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Mixture-of-experts layers, in which every token uses a few experts."""

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to add up to one."""
    dense_layers: tuple[int, ...]
    """Layers with one ordinary feed-forward instead."""
    # The fields below are at their defaults in most families; see `model_info.compat_hash`.
    bias: bool = False
    """Whether the router and the experts have biases."""
    swiglu: SwigluConfig | None = None
    """None: the activation is SiLU."""
    storage: Literal["separate", "stacked", "stacked_rows", "mxfp4"] = "separate"
    """How the checkpoint stores them: a tensor for each matrix, or one for all experts of a layer,
    whose matrices have a row per input, or per output, or are quantised."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All settings that determine the computation, under this engine's names."""

    family: ModelFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    """Longest sequence the checkpoint was made for, in tokens."""
    tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head of q and k gets an RMS norm before the rotary embedding."""
    sliding_window: int | None
    """Tokens that a query sees, itself included, in the layers with a window; None: no layer has
    one."""
    dtype: str | None
    """The dtype that the checkpoint names."""
    eos_token_ids: tuple[int, ...]
    # The fields below are at their defaults in most families; see `model_info.compat_hash`.
    full_layers: tuple[int, ...] = ()
    """Layers without a window in a model where others have one."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of the layers with a window; None: the same as in the others."""
    experts: ExpertsConfig | None = None
    gelu: bool = False
    """Whether the feed-forward uses GELU (tanh form) instead of SiLU."""
    float_norms: bool = False
    """Whether norms are computed in float32, with their weights plus one."""
    out_norms: bool = False
    """Whether the outputs of attention and feed-forward are normalised, too."""
    embed_scale: float = 1.0
    query_scalar: float | None = None
    """Attention scores are divided by its root; None: by that of `head_dim`."""
    in_norms: bool = True
    """Whether the inputs of attention and feed-forward are normalised."""
    layer_norms: bool = False
    """Whether norms subtract the mean before they scale."""
    whole_qk_norm: bool = False
    """Whether q and k get one norm over all their heads, with `qk_norm`."""
    parallel: bool = False
    """Whether attention and feed-forward have the same input, and both are added to it."""
    nope_layers: tuple[int, ...] = ()
    """Layers without a rotary embedding."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward."""
    logit_scale: float = 1.0
    attention_cap: float | None = None
    """Bound that attention scores approach, by a tanh; None: none."""
    logit_cap: float | None = None
    fused_qkv: bool = False
    """Whether the checkpoint stores q, k and v as one tensor."""
    fused_gate_up: bool = False
    """Whether it stores gate and up as one tensor."""
    multimodal: bool = False
    """Whether the checkpoint has other parts, which are not loaded."""
    tied_unless_stored: bool = False
    """Whether the configuration leaves `tied` to the tensors; unset once they are known."""
    classifier: bool = False
    """Whether the checkpoint stores a classification head instead of an output layer."""
    sinks: bool = False
    """Whether each head has a sink: a score without a key, which takes a part of the weights."""
    headless: bool = False
    """Whether the output layer may be missing, and, once the tensors are known, whether it is: the
    model then makes embeddings, not text, and `tied` is set."""

    @property
    def groups(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.kv_heads

    def window(self, layer: int) -> int | None:
        """Tokens that a query of `layer` sees; None: all before it."""
        return None if layer in self.full_layers else self.sliding_window

    def for_context(self, tokens: int) -> ModelConfig:
        """The model for sequences of up to so many tokens (`RopeConfig.for_context`)."""
        local = self.local_rope and self.local_rope.for_context(tokens)
        return replace(self, rope=self.rope.for_context(tokens), local_rope=local)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of `layer`; None: it has none."""
        if layer in self.nope_layers:
            return None
        local = self.local_rope if self.window(layer) is not None else None
        return local or self.rope


_MOST_LAYERS: Final = 10_000
_MOST_EXPERTS: Final = 10_000
"""In a layer."""
_MOST_TOKENS: Final = 1 << 31
"""Token ids are below it."""


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of the checkpoint in `directory`.

    Raises `UnsupportedCheckpoint`, which names the file or the key at fault.
    """
    raw = _object(directory / "config.json")
    refuse_quantised_files(directory, text_part(raw))
    generation = directory / "generation_config.json"
    try:
        return parse_config(raw, _object(generation) if generation.exists() else {})
    except ArithmeticError as error:
        raise UnsupportedCheckpoint(
            f"config.json: a number is out of all proportion: {error}"
        ) from error


def parse_config(raw: Json, generation: Json | None = None) -> ModelConfig:
    """`read_config` for JSON that is already read."""
    family = family_of(raw)
    reader, multimodal = FAMILIES[family], not TEXT_PARTS.keys().isdisjoint(architectures(raw))
    raw = dict(reader.defaults) | text_part(raw)
    refuse_quantised_config(raw, read=(*METHODS, *_READ_QUANTISED.get(family, ())))
    weight_format(raw)  # refuses settings that are not read
    layers = positive(raw, "num_hidden_layers", most=_MOST_LAYERS)
    window, full_layers = parse_windows(raw, family, layers)
    fields: Fields = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    fields |= {"rms_eps": number(raw, "rms_norm_eps", 1e-6)} | reader.fields(raw)
    _refuse_the_unbuilt(raw, family, gelu=fields.get("gelu", False))
    hidden, heads = positive(raw, "hidden_size"), positive(raw, "num_attention_heads")
    head_dim = _head_dim(raw, hidden, heads)
    rope = parse_rope(raw, family, head_dim)
    return ModelConfig(
        family=family,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        kv_heads=_kv_heads(raw, heads),
        head_dim=head_dim,
        rope=rope,
        max_positions=max_positions(raw, rope),
        tied=flag(raw, "tie_word_embeddings"),
        sliding_window=window,
        dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=_eos_token_ids(raw, generation or {}),
        full_layers=full_layers,
        nope_layers=parse_nope_layers(raw, family, layers, full_layers),
        experts=_experts(raw, family, layers),
        multimodal=multimodal,
        tied_unless_stored=multimodal and "tie_word_embeddings" not in raw,
        classifier=not CLASSIFIER_ARCHITECTURES.keys().isdisjoint(architectures(raw)),
        headless=not HEADLESS_ARCHITECTURES.keys().isdisjoint(architectures(raw)),
        **fields,
    )


def _object(path: Path) -> Json:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{path}: not a JSON object")
    return value


def _refuse_the_unbuilt(raw: Json, family: ModelFamily, *, gelu: bool) -> None:
    if raw.get("is_causal") is False or flag(raw, "use_bidirectional_attention"):
        raise UnsupportedCheckpoint(
            "config.json: its tokens see those after them (is_causal, use_bidirectional_attention),"
            " which is not supported"
        )
    key, possible = "hidden_act", ["silu", "swish"]
    if gelu:
        key, possible = "hidden_activation", ["gelu_pytorch_tanh"]
    act = raw.get(key) or possible[0]
    if act not in possible:
        raise UnsupportedCheckpoint(
            f"config.json: {key} {act!r} is not supported, only {possible[0]}"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(key) and family not in _EXPERTS:
            raise UnsupportedCheckpoint(f"config.json: {key}: experts are not supported")


def _kv_heads(raw: Json, heads: int) -> int:
    kv_heads = positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedCheckpoint(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(raw: Json, hidden: int, heads: int) -> int:
    if raw.get("head_dim") is None and hidden % heads:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads} "
            "and there is no head_dim"
        )
    head_dim = positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise UnsupportedCheckpoint(f"config.json: head_dim {head_dim} is odd")
    return head_dim


_EXPERTS = ("mixtral", "qwen3_moe", "qwen3_vl_moe", "gpt_oss")
_READ_QUANTISED: Mapping[ModelFamily, tuple[str, ...]] = {"gpt_oss": ("mxfp4",)}
"""Methods that are read for some families only."""


def _experts(raw: Json, family: ModelFamily, layers: int) -> ExpertsConfig | None:
    if family not in _EXPERTS:
        return None
    mixtral, gpt_oss = family == "mixtral", family == "gpt_oss"
    # Tools write one or the other of these two keys.
    count = positive(
        raw,
        "num_local_experts" if "num_local_experts" in raw else "num_experts",
        most=_MOST_EXPERTS,
    )
    per_token = positive(raw, "num_experts_per_tok")
    if per_token > count:
        raise UnsupportedCheckpoint(
            f"config.json: num_experts_per_tok {per_token} is more than the {count} experts"
        )
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=positive(
            raw, "intermediate_size" if mixtral or gpt_oss else "moe_intermediate_size"
        ),
        normalized=family != "qwen3_moe" or flag(raw, "norm_topk_prob"),
        dense_layers=() if mixtral or gpt_oss else _dense_layers(raw, layers),
        **_stacked_experts(raw, family),
    )


def _stacked_experts(raw: Json, family: ModelFamily) -> Fields:
    if family != "gpt_oss":
        return {"storage": "stacked"} if family == "qwen3_vl_moe" else {}
    quantised = (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    if quantised:
        for key in ("hidden_size", "intermediate_size"):
            if positive(raw, key) % mxfp4.BLOCK:
                raise UnsupportedCheckpoint(
                    f"config.json: {key} {raw[key]} is no multiple of MXFP4's {mxfp4.BLOCK}"
                )
    return {
        "bias": True,
        "swiglu": SwigluConfig(number(raw, "swiglu_alpha"), number(raw, "swiglu_limit")),
        "storage": "mxfp4" if quantised else "stacked",
    }


def _dense_layers(raw: Json, layers: int) -> tuple[int, ...]:
    step, listed = positive(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise UnsupportedCheckpoint("config.json: mlp_only_layers must be a list")
    return tuple(index for index in range(layers) if index in listed or (index + 1) % step)


def _eos_token_ids(raw: Json, generation: Json) -> tuple[int, ...]:
    """The union of both files' ids; those of `generation_config.json` come first."""
    ids: list[int] = []
    for source, name in ((generation, "generation_config.json"), (raw, "config.json")):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if type(token) is not int or not 0 <= token < _MOST_TOKENS:
                raise UnsupportedCheckpoint(f"{name}: eos_token_id {token!r} is no token id")
            ids.append(token)
    return tuple(dict.fromkeys(ids))
