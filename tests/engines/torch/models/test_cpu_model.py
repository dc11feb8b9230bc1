"""The native model against its torch twin, on every instruction set this machine has.

Besides being right it keeps a stronger promise: a row's bits depend on its own tokens only.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve import accel
from pdserve.engine_core.executor import KvBlockShape, ScheduledChunk
from pdserve.errors import ConfigError
from pdserve.messages.request import SamplingParams
from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.fp8_kv import FP8, round_rows
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import ModelConfig, parse_config
from pdserve_engines.torch.model_loader.weights import params
from pdserve_engines.torch.models import cpu_model
from pdserve_engines.torch.models.cpu_model import CpuModel
from pdserve_engines.torch.models.forward_batch import ForwardBatch, make_batch
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.checkpoints import NATIVE, VOCAB, checkpoint
from tests.engines.torch.driver import Driver, loaded, sequence, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engines.torch.models.base import ForwardModel

needs_native = pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
SETS = accel.native.cpu_kernel_sets() if accel.NATIVE else []
DTYPES = ["float32", "bfloat16"]
BLOCK = 8
CPU = torch.device("cpu")

# Sizes around what the kernels cut at: more columns than are multiplied at once, rows and
# vocabulary that fill no panel, heads wider and narrower than a panel.
MIDDLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 533,
    "hidden_size": 420,
    "intermediate_size": 1030,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 600,
    "head_dim": 80,
    "attention_bias": True,
}
BIASED = MIDDLE | {
    "architectures": ["LlamaForCausalLM"],
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "head_dim": 36,
    "num_key_value_heads": 6,
}
WINDOWED = MIDDLE | {
    "use_sliding_window": True,
    "sliding_window": 45,
    "layer_types": ["sliding_attention", "full_attention"],
}
SPARSE = MIDDLE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 70,
    "mlp_only_layers": [0],
}
EVERY_EXPERT = SPARSE | {"num_experts_per_tok": 5, "norm_topk_prob": True}
GEMMA = MIDDLE | {
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 45,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 60,
}
GPT_OSS = MIDDLE | {
    "architectures": ["GptOssForCausalLM"],
    "intermediate_size": 70,
    "num_local_experts": 5,
    "num_experts_per_tok": 5,
    "sliding_window": 45,
    "swiglu_limit": 0.5,
}
GEMMA2 = GEMMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 9.0,
}
OLMO = MIDDLE | {"architectures": ["Olmo2ForCausalLM"]}
GRANITE = MIDDLE | {
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
COHERE = MIDDLE | {
    "architectures": ["Cohere2ForCausalLM"],
    "sliding_window": 45,
    "sliding_window_pattern": 2,
    "logit_scale": 0.3,
}
MINISTRAL = MIDDLE | {
    "architectures": ["Ministral3ForCausalLM"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 150,
        "llama_4_scaling_beta": 0.5,
    },
}
RAW = {
    "middle": MIDDLE,
    "biased": BIASED,
    "windowed": WINDOWED,
    "sparse": SPARSE,
    "every_expert": EVERY_EXPERT,
    "gemma": GEMMA,
    "gpt_oss": GPT_OSS,
    "gemma2": GEMMA2,
    "olmo": OLMO,
    "granite": GRANITE,
    "cohere": COHERE,
    "ministral": MINISTRAL,
}


class Side:
    """One model with its own pool."""

    def __init__(
        self,
        model: ForwardModel,
        config: ModelConfig,
        dtype: torch.dtype,
        scales: tuple[tuple[float, float], ...] = (),
    ) -> None:
        """`dtype` and `scales` are the pool's."""
        layout = KvBlockShape(
            config.num_layers, config.kv_heads, BLOCK, config.head_dim, dtype.itemsize
        )
        generator = torch.Generator().manual_seed(1)
        for param in params(config):
            parts = []
            for name, shape in param.parts:
                part = torch.randn(shape, generator=generator) * 0.06
                parts.append(part + 1 if "norm" in name and not config.float_norms else part)
            model.place(param, parts)
        self.model = model
        self.pool = KvPool(layout, 120, dtype, CPU, scales)
        model.bind(self.pool)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        return self.model.logits(self.model.forward(batch))

    def close(self) -> None:
        self.model.close()
        self.pool.close()


def chunk_of(
    length: int, start: int, blocks: list[int], seed: int, whole: int = 0
) -> ScheduledChunk:
    """`whole`: tokens that are drawn, if more than the chunk's."""
    tokens = random.Random(seed).choices(range(533), k=max(length, whole))
    made = sequence(tokens, SamplingParams(max_tokens=1))
    made.blocks = blocks
    return ScheduledChunk(made, start, length - start, samples=True)


def _computed() -> Iterator[Any]:
    """Kernels, a model and a dtype: every model once in every run, the others as long tests."""
    for name in RAW:
        for dtype in DTYPES:
            for kernels in SETS:
                always = name in ("middle", "biased") or (kernels, dtype) == (SETS[0], "float32")
                # In bfloat16 rounding would decide between experts.
                if (name, dtype) != ("sparse", "bfloat16"):
                    marks = [] if always else [pytest.mark.long]
                    yield pytest.param(kernels, name, dtype, marks=marks)


@needs_native
@pytest.mark.parametrize(("kernels", "name", "dtype"), list(_computed()))
def test_a_mixed_step_agrees_with_torch(kernels: str, name: str, dtype: str) -> None:
    """Against float32 torch: bfloat16 may differ by its rounding, float32 hardly."""
    config, kind = parse_config(RAW[name]), getattr(torch, dtype)
    native = Side(CpuModel(config, TorchSettings(CPU, kind, 2, 600, kernels)), config, kind)
    for found, expected in zip(two_steps(native), twin_steps(name), strict=True):
        assert found.shape == expected.shape
        # Gemma's logits are as much larger as its embeddings are.
        size = max(1.0, float(expected.std()))
        tolerance = (2e-4 if dtype == "float32" else 0.12) * size
        assert (found - expected).abs().max() < tolerance
    native.close()


@functools.cache
def twin_steps(name: str) -> list[torch.Tensor]:
    config = parse_config(RAW[name])
    model = TorchModel(config, TorchSettings(CPU, torch.float32, 1, 600))
    side = Side(model, config, torch.float32)
    found = two_steps(side)
    side.close()
    return found


def two_steps(side: Side) -> list[torch.Tensor]:
    """Logits of a prefill step and of a mixed one, then the KV they left."""
    ids = list(range(120))
    random.Random(0).shuffle(ids)
    first = [chunk_of(333, 0, ids[:42], 0), chunk_of(40, 0, ids[42:47], 1)]
    second = [chunk_of(335, 333, ids[:42], 0), chunk_of(41, 40, ids[42:48], 1)]
    second.append(chunk_of(9, 0, ids[50:52], 2))
    with torch.inference_mode():
        found = [
            side.logits(make_batch(chunks, rows, BLOCK))
            for chunks, rows in ((first, [3, 332, 372]), (second, [1, 2, 11]))
        ]
    return [*found, side.pool.tensor[ids[:41]].float()]


FP8_SCALES = ((1.0, 0.002), (40.0, 0.3))
"""Of the keys and values of two layers: most values of the first one are cut, most keys of the
second one are among the smallest numbers."""


def _in_fp8() -> Iterator[Any]:
    """Kernels, a model and a dtype; most as long tests."""
    for name in RAW:
        for kernels in SETS:
            for dtype in DTYPES:
                always = name in ("middle", "biased") and kernels == SETS[0]
                if (name, dtype) != ("sparse", "bfloat16"):
                    marks = [] if always else [pytest.mark.long]
                    yield pytest.param(kernels, name, dtype, marks=marks)


def fp8_side(
    kernels: str, name: str, dtype: str, scales: tuple[tuple[float, float], ...] = FP8_SCALES
) -> Side:
    """`kernels`: `torch` for the twin."""
    config, kind = parse_config(RAW[name]), getattr(torch, dtype)
    settings = TorchSettings(CPU, kind, 2, 600, kernels)
    model = TorchModel(config, settings) if kernels == "torch" else CpuModel(config, settings)
    return Side(model, config, FP8, scales)


@needs_native
@pytest.mark.parametrize(("kernels", "name", "dtype"), list(_in_fp8()))
def test_fp8_is_stored_as_torch_rounds_it(kernels: str, name: str, dtype: str) -> None:
    """Bit by bit, in the first layer: it does not depend on KV. Ties are frequent in bfloat16."""
    config, kind = parse_config(RAW[name]), getattr(torch, dtype)
    plain = Side(CpuModel(config, TorchSettings(CPU, kind, 2, 600, kernels)), config, kind)
    rounded = fp8_side(kernels, name, dtype)
    chunks = [chunk_of(300, 0, list(range(38)), 0)]
    for side in (plain, rounded):
        side.logits(make_batch(chunks, [299], BLOCK))
    rows = plain.pool.tensor[:37, 0].transpose(2, 3).reshape(37, 2, BLOCK, -1)
    rows = rows.transpose(1, 2).reshape(37 * BLOCK, 2 * config.kv_heads, config.head_dim)
    found = rounded.pool.tensor.view(torch.uint8)[:37, 0].transpose(2, 3)
    found = found.reshape(37, 2, BLOCK, -1).transpose(1, 2).reshape(rows.shape)
    expected = round_rows(rows, FP8_SCALES[0])
    assert torch.equal(found, expected)
    if name != "olmo":  # its values are small
        assert len(expected.unique()) > 150
        assert ((expected & 0x7F) == 0x7E).any(), "nothing was cut"
    plain.close()
    rounded.close()


@needs_native
@pytest.mark.parametrize(("kernels", "name", "dtype"), list(_in_fp8()))
def test_fp8_is_read_as_torch_widens_it(kernels: str, name: str, dtype: str) -> None:
    """All bytes that are numbers, in blocks that both find; what is not written is no number. In
    bfloat16 only small ones: large scores would make its rounding decide which key counts."""
    scales = FP8_SCALES if dtype == "float32" else ((0.5, 0.3), (0.25, 2.0))
    generator = torch.Generator().manual_seed(3)
    found = []
    for each in (kernels, "torch"):
        side = fp8_side(each, name, dtype, scales)
        content = side.pool.tensor.view(torch.uint8)
        content.random_(0, 256, generator=generator.manual_seed(3))
        content[(content & 0x7F) == 0x7F] = 3
        if dtype == "bfloat16":
            content &= 0xB7
        content[25, :, :, :, 201 % BLOCK :] = 0x7F
        chunks = [chunk_of(201, 200, list(range(26)), 0), chunk_of(75, 70, list(range(40, 50)), 1)]
        with torch.inference_mode():
            found.append(side.logits(make_batch(chunks, [0, 3, 5], BLOCK)).float())
        side.close()
    size = max(1.0, float(found[1].std()))
    assert found[0].isfinite().all()
    assert (found[0] - found[1]).abs().max() < (1e-4 if dtype == "float32" else 0.25) * size


@needs_native
@pytest.mark.parametrize(
    "kernels", [*SETS[:1], *(pytest.param(each, marks=pytest.mark.long) for each in SETS[1:])]
)
@pytest.mark.parametrize("name", ["windowed", "sparse", "gemma2", "gpt_oss", "olmo", "cohere"])
def test_no_bit_of_a_long_chunk_depends_on_how_it_is_cut(kernels: str, name: str) -> None:
    """The steps have more rows than an expert takes at a time, and the chunk has several windows;
    then the same chunk is computed in parts, and in no company."""
    check_cuts(kernels, name, torch.float32, "auto")


@needs_native
@pytest.mark.parametrize(
    "kernels", [*SETS[:1], *(pytest.param(each, marks=pytest.mark.long) for each in SETS[1:])]
)
@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        (torch.bfloat16, "auto"),
        pytest.param(torch.float32, "fp8_e4m3", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "fp8_e4m3", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", ["sparse", "gemma2"])
def test_nor_does_a_bit_of_narrower_numbers(
    kernels: str, name: str, dtype: torch.dtype, kv: str
) -> None:
    check_cuts(kernels, name, dtype, kv)


def check_cuts(kernels: str, name: str, dtype: torch.dtype, kv: str) -> None:
    """Compare logits of a chunk in company with those of its parts alone."""
    config = parse_config(RAW[name])
    settings = TorchSettings(CPU, dtype, 2, 600, kernels, kv_cache_dtype=kv)
    model = CpuModel(config, settings)
    side = Side(model, config, settings.kv_dtype)
    ids = list(range(120))
    crowd = [chunk_of(330, 0, ids[:42], 0), chunk_of(200, 0, ids[42:70], 1)]
    whole = side.logits(make_batch(crowd, list(range(330)), BLOCK))
    ends = [0, 1, 40, 41, 170, 329, 330]
    for begin, end in itertools.pairwise(ends):
        part = [chunk_of(end, begin, ids[70:112], 0, 330)]
        alone = side.logits(make_batch(part, list(range(end - begin)), BLOCK))
        assert torch.equal(alone, whole[begin:end])
    side.close()


@needs_native
@pytest.mark.parametrize("kernels", SETS)
def test_greedy_steps_choose_the_first_likeliest_token_of_every_wanted_row(kernels: str) -> None:
    config = parse_config(BIASED | {"num_hidden_layers": 1})
    model = CpuModel(config, TorchSettings(CPU, torch.float32, 2, 600, kernels))
    side = Side(model, config, torch.float32)
    rows = [row for row in range(300) if row % 7]  # more than are worked on at a time
    batch = make_batch([chunk_of(300, 0, list(range(38)), 0)], rows, BLOCK)
    expected = side.logits(batch).argmax(-1).tolist()
    assert model.greedy(batch) == expected
    assert len(set(expected)) > 50
    # Two equal rows of the embedding tie; the first of them is chosen.
    top = expected[0]
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(533, 420, generator=generator) * 0.06
    for twin in (top - 9, top + 9):
        changed = embedding.clone()
        changed[twin % 533] = embedding[top]
        model.place(params(config)[0], [changed])
        assert model.greedy(batch)[0] == min(top, twin % 533)
    side.close()


def every_logprob(driver: Driver, prompt: list[int], chunk: int, shared: int = 0) -> list[Any]:
    """Full distributions along a greedy run of `prompt`, computed `chunk` tokens at a time."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=VOCAB)
    made = driver.add(prompt, sampling)
    if shared:
        source = driver.add(prompt)
        driver.finish([source], 1, chunk=11)
        driver.share(source, made, shared)
    company = [driver.add(prompt[:length]) for length in range(3, 3 + chunk % 5)]
    found = []
    while made.num_output < 4:
        driver.advance([*company, made], chunk)
        records = filter(None, driver.results[-1].logprobs)
        found += [(record.token, record.top) for record in records]
    return found


def _scheduled() -> Iterator[Any]:
    """Kernels, a configuration and a dtype: some in half of all runs, the others as long tests."""
    often = {("qwen3", kernels) for kernels in SETS}
    often |= {(name, SETS[0]) for name in ("llama_biased", "gpt_oss")}
    names = ("llama_biased", "qwen3", "mistral_windowed", "mixtral", "qwen3_moe", "gpt_oss")
    for name in (*names, "gemma2", "olmo3", "cohere2"):
        for kernels in SETS:
            for dtype in DTYPES:
                rare = (name, kernels) not in often or (name == "gpt_oss" and dtype != "float32")
                mark = pytest.mark.long if rare else pytest.mark.long(one_in=2)
                yield pytest.param(kernels, name, dtype, marks=mark)


@needs_native
@pytest.mark.parametrize(("kernels", "name", "dtype"), list(_scheduled()))
def test_no_bit_depends_on_scheduling(kernels: str, name: str, dtype: str) -> None:
    prompt = random.Random(3).choices(range(VOCAB), k=61)
    outcomes = []
    for threads in (1, 3):
        executor = loaded(
            checkpoint(name)[0],
            num_blocks=120,
            block_size=BLOCK,
            dtype=dtype,
            threads=threads,
            options={"kernels": kernels},
        )
        for chunk, shared in ((61, 0), (1, 0), (7, 0), (8, 16), (9, 21), (33, 60), (16, 0)):
            outcomes.append(every_logprob(Driver(executor, seed=chunk), prompt, chunk, shared))
        executor.close()
    assert all(outcome == outcomes[0] for outcome in outcomes)


def _named() -> Iterator[Any]:
    """A model and kernels: every model with the best ones in every run, the others as long
    tests."""
    for name in NATIVE:
        for kernels in SETS:
            marks = [pytest.mark.long] if kernels != SETS[0] and name != "qwen3" else []
            yield pytest.param(name, kernels, marks=marks)


@needs_native
@pytest.mark.parametrize(("name", "kernels"), list(_named()))
def test_each_instruction_set_gives_the_tokens_of_the_torch_model(name: str, kernels: str) -> None:
    outputs = []
    for choice in ("torch", kernels):
        executor = loaded(checkpoint(name)[0], block_size=BLOCK, options={"kernels": choice})
        driver = Driver(executor)
        made = [driver.add(random.Random(k).choices(range(VOCAB), k=k)) for k in (1, 20, 37)]
        driver.finish(made, 10, chunk=13)
        outputs.append([seq.output for seq in made])
        executor.close()
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def small() -> Iterator[Side]:
    config = parse_config(BIASED | {"num_hidden_layers": 1})
    side = Side(CpuModel(config, TorchSettings(CPU, torch.float32, 1, 100)), config, torch.float32)
    yield side
    side.close()


def arrays(**changes: object) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "positions": [4, 5, 0],
        "offsets": [0, 2, 3],
        "starts": [4, 0],
        "tables": [7, 8],
        "table_offsets": [0, 1, 2],
        "rows": [1, 2],
    }
    return {name: np.array(value, np.int32) for name, value in (fields | changes).items()}


@needs_native
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": [1, 2, 533]}, "token id"),
        ({"tokens": [1, -2, 3]}, "token id"),
        ({"tokens": [1, 2]}, "fit together"),
        ({"tables": [7, 120]}, "block id"),
        ({"tables": [-1, 8]}, "block id"),
        ({"offsets": [0, 2, 4]}, "cover the tokens"),
        ({"offsets": [0, 0, 3]}, "chunk is empty"),
        ({"offsets": [0, 50_000_000, 3]}, "do not ascend"),
        ({"offsets": [0, -2, 3]}, "do not ascend"),
        ({"offsets": [0, 3]}, "fit together"),
        ({"table_offsets": [0, 1, 1]}, "cover the tables"),
        ({"table_offsets": [0, 5_000_000, 2]}, "do not ascend"),
        ({"table_offsets": [0, -1, 2]}, "do not ascend"),
        ({"table_offsets": [0, 0, 2]}, "table is too short"),
        ({"starts": [7, 0], "positions": [7, 8, 0]}, "table is too short"),
        ({"starts": [99, 0], "positions": [99, 100, 0]}, "lies outside"),
        ({"starts": [-1, 0], "positions": [-1, 0, 0]}, "lies outside"),
        ({"positions": [4, 6, 0]}, "positions do not follow"),
        ({"rows": [2, 1]}, "wanted rows"),
        ({"rows": [0, 3]}, "wanted rows"),
        ({"rows": [-1, 1]}, "wanted rows"),
        ({"rows": [1]}, "output must be"),
    ],
)
def test_a_batch_out_of_range_is_refused_before_anything_is_touched(
    small: Side, changes: dict[str, object], complaint: str
) -> None:
    model: Any = small.model
    hidden = np.empty((2, 420), np.float32)
    model._native.forward(*arrays().values(), hidden)
    before = small.pool.tensor.clone()
    with pytest.raises(ValueError, match=complaint):
        model._native.forward(*arrays(**changes).values(), hidden)
    assert torch.equal(before, small.pool.tensor)


@needs_native
def test_a_row_is_the_same_to_the_bit_whatever_is_computed_beside_it(small: Side) -> None:
    """What `ForwardModel.exact` reservations."""
    model: Any = small.model
    both, alone = np.empty((2, 420), np.float32), np.empty((1, 420), np.float32)
    model._native.forward(*arrays().values(), both)
    one: dict[str, object] = {
        "tokens": [1, 2],
        "positions": [4, 5],
        "offsets": [0, 2],
        "starts": [4],
        "tables": [7],
        "table_offsets": [0, 1],
        "rows": [1],
    }
    model._native.forward(*arrays(**one).values(), alone)
    assert both[0].tobytes() == alone[0].tobytes()
    step = one | {"tokens": [2], "positions": [5], "offsets": [0, 1], "starts": [5], "rows": [0]}
    model._native.forward(*arrays(**step).values(), alone)
    assert both[0].tobytes() == alone[0].tobytes()


@needs_native
def test_weights_that_do_not_fit_are_refused() -> None:
    native: Any = accel.native
    sizes = {"layers": 1, "hidden": 8, "inner": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}
    rest = {"vocab": 9, "epsilon": 1e-6, "tied": True, "threads": 1, "bfloat16": False}
    model = native.CpuModel(**sizes, **rest)
    with pytest.raises(ValueError, match="no such tensor: gates"):
        model.place("gates", 0, 0, 8, bytes(256))
    with pytest.raises(ValueError, match="no such layer"):
        model.place("gate", 1, 0, 8, bytes(256))
    with pytest.raises(ValueError, match="a part of gate does not fit"):
        model.place("gate", 0, 1, 8, bytes(256))
    with pytest.raises(ValueError, match="a part of gate does not fit"):
        model.place("gate", 0, 0, 8, bytes(255))
    with pytest.raises(ValueError, match="some weights were not placed"):
        model.bind(bytearray(8 * 4 * 4), 1, 1)
    with pytest.raises(ValueError, match="must be even"):
        native.CpuModel(**sizes | {"hidden": 7}, **rest)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        native.CpuModel(**sizes | {"kv_heads": 3}, **rest)
    with pytest.raises(ValueError, match="no such kernels"):
        native.CpuModel(**sizes, **rest, kernels="abacus")


@needs_native
def test_parts_of_experts_go_to_their_expert_or_are_refused() -> None:
    native: Any = accel.native
    fields: dict[str, Any] = {"layers": 2, "hidden": 8, "inner": 8, "heads": 2, "kv_heads": 1}
    fields |= {"head_dim": 4}
    fields |= {"vocab": 9, "epsilon": 1e-6, "tied": True, "threads": 1, "bfloat16": False}
    sparse: dict[str, Any] = {
        "sparse": [False, True],
        "experts": 3,
        "experts_per_token": 2,
        "experts_inner": 6,
    }
    model = native.CpuModel(**fields, **sparse)
    model.place("experts_gate", 1, 12, 6, bytes(6 * 8 * 4))
    for at, rows in ((12, 7), (5, 2), (18, 1), (-1, 1)):
        with pytest.raises(ValueError, match="a part of experts_gate does not fit"):
            model.place("experts_gate", 1, at, rows, bytes(rows * 8 * 4))
    with pytest.raises(ValueError, match="no such tensor: experts_gate"):
        model.place("experts_gate", 0, 0, 6, bytes(6 * 8 * 4))
    for wrong, complaint in (
        ({"experts_per_token": 4}, "at least as many as one token uses"),
        ({"experts_inner": 5}, "an even inner size"),
        ({"experts": 0, "experts_per_token": 0}, "the model has none"),
        ({"sparse": [True]}, "must name every layer or none"),
        ({"windows": [1, -1]}, "out of range"),
        ({"ropes": [0, 2]}, "out of range"),
        ({"activation": "step"}, "no such activation"),
    ):
        with pytest.raises(ValueError, match=complaint):
            native.CpuModel(**fields | sparse | wrong)
    with pytest.raises(ValueError, match="no layer uses that rotary table"):
        model.set_rope(bytes(64), 1)


# ---------------------------------------------------------------- which one serves


def stages(name: str = "llama", **fields: object) -> list[str]:
    executor, seen = TorchExecutor(), []
    executor.load(spec(checkpoint(name)[0], **fields), lambda stage, _: seen.append(stage))
    executor.close()
    return [stage for stage in seen if stage.startswith("kernels")]


@needs_native
def test_loading_says_which_kernels_serve() -> None:
    assert stages(threads=2) == [f"kernels: native {SETS[0]}, 2 threads"]
    line = "kernels: torch on cpu, 1 threads (no native kernels: they were not asked for)"
    assert stages(options={"kernels": "torch"}) == [line]


@needs_native
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mixtral", "they know no experts, which mixtral has"),
        ("llama", "they know no factor, which llama has"),
        ("gemma3", "they know no "),
        ("gpt_oss", "they know no "),
    ],
)
def test_what_the_native_kernels_lack_torch_computes_and_says_why(
    monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    """So a field that is new in a configuration is never passed over."""
    monkeypatch.setattr(cpu_model, "_KNOWN", frozenset())
    monkeypatch.setattr(cpu_model, "_KNOWN_ROPE", frozenset())
    start = f"kernels: torch on cpu, 1 threads (no native kernels: {reason}"
    assert stages(name)[0].startswith(start)
    with pytest.raises(ConfigError, match=f"kernels=native: not possible, {reason}"):
        stages(name, options={"kernels": "native"})


@needs_native
@pytest.mark.parametrize(
    "raw",
    [
        MIDDLE | {"hidden_size": 421},
        MIDDLE | {"intermediate_size": 1031},
        MIDDLE | {"head_dim": 514},
        SPARSE | {"moe_intermediate_size": 71},
    ],
)
def test_odd_sizes_and_large_heads_are_left_to_torch(raw: dict[str, Any]) -> None:
    reason = cpu_model.unsupported_reason(parse_config(raw), CPU)
    assert reason == "the model's sizes are odd or its heads too large"


def test_without_the_extension_torch_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "NATIVE", False)
    monkeypatch.setattr(accel, "REASON", "PDSERVE_PURE is set")
    line = "kernels: torch on cpu, 1 threads (no native kernels: PDSERVE_PURE is set)"
    assert stages() == [line]
    with pytest.raises(
        ConfigError, match="native' is not possible here; auto, torch, triton, invariant are"
    ):
        stages(options={"kernels": "native"})


def test_kernels_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels='abacus' is not possible here"):
        stages(options={"kernels": "abacus"})
    with pytest.raises(ConfigError, match="no option beds, colour"):
        stages(options={"colour": "red", "beds": "2"})
