"""Attention by each of torch's back ends: rates, and what a shape costs that was not there before.

The sizes are those of one layer of Llama-3.1-8B. The engine computes decode steps as here: queries
of a group are rows of one head, and different lengths need a bias.
"""

from __future__ import annotations

import inspect
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.limits import settle
from bench.gpu.probes.base import Row, Unavailable, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.gpu.probes.base import Probe

HEADS, KV_HEADS, DIM = 32, 8, 128
GROUPS = HEADS // KV_HEADS
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
CONTEXT = 2048
QUERIES = 2048
KEYS = (2048, 8192, 32768)
NEW = 6
"""Shapes of which each is met for the first time."""


def ask_default(probe: Probe) -> Iterator[Row]:
    """What torch chooses by itself, and in which order it prefers its back ends."""
    yield Row("cuDNN attention allowed", float(torch.backends.cuda.cudnn_sdp_enabled()), "")  # type: ignore[no-untyped-call]
    order: list[int] = getattr(torch._C, "_get_sdp_priority_order", list)()
    yield Row("torch's order of back ends", note=", ".join(map(str, order)))
    yield Row("cuDNN", note=str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]


def ask_decode(probe: Probe) -> Iterator[Row]:
    """Decode steps of equal and of mixed lengths, and lengths that are new."""
    for name in BACKENDS:
        for batch in (1, 64):
            what = f"decode {batch}, {name}"
            yield from guarded(what, partial(_decode, probe, name, what, batch))
        what = f"decode 64 of mixed lengths, {name}"
        yield from guarded(what, partial(_mixed, probe, name, what))
        what = f"decode, a new length, {name}"
        yield from guarded(what, partial(_new_lengths, probe, name, what))
    yield from guarded("decode, varlen_attn", lambda: _varlen_decode(probe))


def _decode(probe: Probe, name: str, what: str, batch: int) -> Iterator[Row]:
    context = probe.size(CONTEXT, 32)
    queries = _random(probe, batch, KV_HEADS, GROUPS)
    keys, values = (_random(probe, batch, KV_HEADS, context) for _ in range(2))
    with sdpa_kernel([BACKENDS[name]]):
        seconds = probe.device_seconds(
            lambda number: functional.scaled_dot_product_attention(queries, keys, values), 20
        )
    yield _read_rate(what, 2 * keys.nbytes, seconds)


def _mixed(probe: Probe, name: str, what: str) -> Iterator[Row]:
    """A bias hides what a shorter sequence lacks."""
    batch, context = 64, probe.size(CONTEXT, 32)
    queries = _random(probe, batch, KV_HEADS, GROUPS)
    keys, values = (_random(probe, batch, KV_HEADS, context) for _ in range(2))
    lengths = _lengths(probe, batch, context)
    hidden = torch.arange(context, device=probe.device) >= lengths[:, None]
    bias = torch.zeros(batch, 1, GROUPS, context, device=probe.device, dtype=queries.dtype)
    bias.masked_fill_(hidden[:, None, None], -torch.inf)
    with sdpa_kernel([BACKENDS[name]]):
        seconds = probe.device_seconds(
            lambda number: functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=bias
            ),
            20,
        )
    yield _read_rate(what, 2 * keys.nbytes, seconds)


def _lengths(probe: Probe, batch: int, context: int) -> torch.Tensor:
    """From half of the context to all of it: what the engine computes in one group."""
    return torch.linspace(context // 2, context, batch, device=probe.device).long()


def _new_lengths(probe: Probe, name: str, what: str) -> Iterator[Row]:
    context = probe.size(CONTEXT, 32)
    queries = _random(probe, 1, KV_HEADS, GROUPS)

    def attend(length: int) -> Callable[[], object]:
        keys, values = (_random(probe, 1, KV_HEADS, length) for _ in range(2))
        return partial(functional.scaled_dot_product_attention, queries, keys, values)

    with sdpa_kernel([BACKENDS[name]]):
        attend(context)()
        yield _first_call(probe, what, [attend(context + 1 + each) for each in range(NEW)])


def _first_call(probe: Probe, what: str, works: Sequence[Callable[[], object]]) -> Row:
    """How much longer the first call of each shape takes than its second."""
    extra = []
    for work in works:
        first, second = (_once(probe, work) for _ in range(2))
        extra.append(first - second)
    return Row(what, statistics.median(extra) * 1e3, "ms", f"at most {max(extra) * 1e3:.2f} ms")


def _once(probe: Probe, work: Callable[[], object]) -> float:
    settle(probe.device)
    begin = time.perf_counter()
    work()
    settle(probe.device)
    return time.perf_counter() - begin


def ask_prefill(probe: Probe) -> Iterator[Row]:
    """Queries of one chunk over its own and all earlier keys."""
    for name in BACKENDS:
        for length in KEYS[: 1 if probe.dry or name == "math" else None]:
            what = f"prefill {QUERIES} over {length}, {name}"
            yield from guarded(what, partial(_prefill, probe, name, what, length))
        what = f"prefill, a new length, {name}"
        yield from guarded(what, partial(_new_prefills, probe, name, what))
    yield from guarded("prefill, varlen_attn", lambda: _varlen_prefill(probe))


def _prefill(probe: Probe, name: str, what: str, length: int) -> Iterator[Row]:
    count, length = (probe.size(each, each // 64) for each in (QUERIES, length))
    seconds = probe.device_seconds(_chunk(probe, name, count, length), 3)
    yield _causal_rate(what, count, length, seconds)


def _new_prefills(probe: Probe, name: str, what: str) -> Iterator[Row]:
    count = probe.size(QUERIES, 16)
    _chunk(probe, name, count, count)(0)
    works = [_chunk(probe, name, count + 8 * each, count + 8 * each) for each in range(1, NEW)]
    yield _first_call(probe, what, [partial(work, 0) for work in works])


def _chunk(probe: Probe, name: str, count: int, length: int) -> Callable[[int], object]:
    """Only flash shares a group's keys by itself. Behind earlier keys, cuDNN and math would need a
    mask in memory: they compute hidden keys too, and the rate counts only what is needed."""
    from torch.nn.attention.bias import causal_lower_right  # with torch's compiler: a second

    queries = _random(probe, 1, HEADS, count)
    shared = name in ("flash", "cudnn")
    heads = KV_HEADS if shared else HEADS
    keys, values = (_random(probe, 1, heads, length) for _ in range(2))
    square = count == length
    lower = not square and name in ("flash", "efficient")

    def attend(number: int) -> object:
        with sdpa_kernel([BACKENDS[name]]):
            return functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=causal_lower_right(count, length) if lower else None,
                is_causal=square,
                enable_gqa=shared,
            )

    return attend


# ---------------------------------------------------------------- sequences laid end to end


def _varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Unavailable(f"torch has no varlen_attn: {error}") from error
    return varlen_attn


def _varlen_prefill(probe: Probe) -> Iterator[Row]:
    attend = _varlen()
    parameters = inspect.signature(attend).parameters
    yield Row("varlen_attn takes", note=", ".join(parameters))
    probe.require_cuda()
    for length in KEYS:
        what = f"prefill {QUERIES} over {length}, varlen_attn"
        yield from guarded(what, partial(_varlen_chunk, probe, what, length))
    if "block_table" in parameters:
        yield from guarded("varlen_attn with block_table", lambda: _varlen_pages(probe))


def _varlen_chunk(probe: Probe, what: str, length: int) -> Iterator[Row]:
    call = _varlen_call(probe, [QUERIES], [length], causal=True)
    yield _causal_rate(what, QUERIES, length, probe.device_seconds(call, 3))


def _varlen_decode(probe: Probe) -> Iterator[Row]:
    probe.require_cuda()
    lengths = _lengths(probe, 64, CONTEXT).tolist()
    size = 2 * sum(lengths) * KV_HEADS * DIM * 2
    seconds = probe.device_seconds(_varlen_call(probe, [1] * 64, lengths, causal=False), 20)
    yield _read_rate("decode 64 of mixed lengths, varlen_attn", size, seconds)
    calls = [
        partial(_varlen_call(probe, [1], [CONTEXT + 1 + each], causal=False), 0)
        for each in range(NEW)
    ]
    yield _first_call(probe, "decode, a new length, varlen_attn", calls)


def _varlen_call(
    probe: Probe, counts: list[int], lengths: list[int], *, causal: bool
) -> Callable[[int], object]:
    attend = _varlen()
    queries = _random(probe, sum(counts), HEADS)
    keys, values = (_random(probe, sum(lengths), KV_HEADS) for _ in range(2))
    ends = (_ends(probe, counts), _ends(probe, lengths))
    options = _options(attend, causal=causal)
    return lambda number: attend(queries, keys, values, *ends, max(counts), max(lengths), **options)


def _options(attend: Any, *, causal: bool) -> dict[str, Any]:
    """Says causal, and that heads are grouped, in the words of this version of torch."""
    parameters = inspect.signature(attend).parameters
    options: dict[str, Any] = {}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    if causal and "window_size" in parameters:
        options["window_size"] = (-1, 0)
    elif causal:
        options["is_causal"] = True
    return options


def _varlen_pages(probe: Probe) -> Iterator[Row]:
    """One sequence of 2048 tokens in pages of 256, the size that upstream's kernel takes."""
    attend = _varlen()
    queries = _random(probe, 1, HEADS)
    keys, values = (_random(probe, 8, 256, KV_HEADS) for _ in range(2))
    table = torch.arange(8, dtype=torch.int32, device=probe.device)[None]
    ends = (_ends(probe, [1]), _ends(probe, [CONTEXT]))
    options = _options(attend, causal=False) | {"block_table": table}
    if "seqused_k" in inspect.signature(attend).parameters:
        options["seqused_k"] = torch.tensor([CONTEXT], dtype=torch.int32, device=probe.device)
    attend(queries, keys, values, *ends, 1, CONTEXT, **options)
    settle(probe.device)
    yield Row("varlen_attn with block_table", note="works with pages of 256")


def _ends(probe: Probe, counts: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *counts], device=probe.device).cumsum(0)
    return ends.to(torch.int32)


# ---------------------------------------------------------------- rates


def _read_rate(what: str, size: int, seconds: float) -> Row:
    return Row(what, seconds * 1e6, "µs", f"{size / seconds / 1e9:,.0f} GB/s of KV")


def _causal_rate(what: str, count: int, length: int, seconds: float) -> Row:
    """Counts only the keys that a query looks at."""
    looks = count * (length - count) + count * (count + 1) // 2
    rate = 4 * looks * HEADS * DIM / seconds / 1e12
    return Row(what, seconds * 1e6, "µs", f"{rate:,.0f} TFLOP/s")


def _random(probe: Probe, *extents: int) -> torch.Tensor:
    made = torch.empty(*extents, DIM, dtype=torch.bfloat16, device=probe.device)
    return made.normal_()
