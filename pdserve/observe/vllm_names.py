"""Names pdserve's numbers as vLLM does, for boards, autoscalers and routers made for vLLM.

`VLLM_METRICS` is the table: every name of vLLM that is served, and what it is made of. vLLM labels
its metrics with the served name and with the engine's number, which is 0 here: a process has one
engine per model, or one for prompts and one that decodes, which count as one. What vLLM counts and
pdserve does not has no line here; `docs/metrics.md` lists those names. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries
from pdserve.observe.merge import sum_series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["VLLM_METRICS", "VllmMetric", "vllm_families"]

_ENGINE: Final = "0"

_Found = dict[str, ScrapedFamily]
"""A process's families by their names without the prefix."""


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """One metric of vLLM."""

    name: str
    """Without the prefix `vllm:`."""
    kind: Literal["counter", "gauge", "histogram"]
    sources: tuple[str, ...]
    """What it is made of, without the prefix `pdserve_`."""
    read: Callable[[_Found, tuple[str, ...]], list[ScrapedSeries]]
    labels: tuple[str, ...] = ("model_name", "engine")

    @property
    def help(self) -> str:
        return f"As {' and '.join(f'pdserve_{source}' for source in self.sources)}."


def vllm_families(families: list[ScrapedFamily]) -> list[ScrapedFamily]:
    """The families of vLLM that can be made of these."""
    found = {one.name.removeprefix("pdserve_"): one for one in families}
    made = []
    for metric in VLLM_METRICS:
        sources = [found[source] for source in metric.sources if source in found]
        series = metric.read(found, metric.sources) if sources else []
        if series:
            made.append(
                ScrapedFamily(
                    *(f"vllm:{metric.name}", metric.kind, metric.help, metric.labels, series),
                    bounds=sources[0].bounds,
                )
            )
    return made


# ---------------------------------------------------------------------- reading


def _labelled(family: ScrapedFamily | None) -> Iterator[tuple[dict[str, str], ScrapedSeries]]:
    """The series of models that are known, with their labels."""
    if family is None:
        return
    for one in family.series:
        labels = dict(zip(family.labels, one.values, strict=True))
        if labels.get("model"):
            yield labels, one


def _sum(found: _Found, sources: tuple[str, ...]) -> list[ScrapedSeries]:
    """Sums by model."""
    return sum_series(
        ScrapedSeries((labels["model"], _ENGINE), one.value, one.counts)
        for source in sources
        for labels, one in _labelled(found.get(source))
    )


def _sum_of_serving(found: _Found, sources: tuple[str, ...]) -> list[ScrapedSeries]:
    """Sums by model, without prefill workers where others are in the process: a prompt that is
    handed over would count twice."""
    picked = [pair for source in sources for pair in _labelled(found.get(source))]
    serving = {labels["model"] for labels, _ in picked if labels["mode"] != "prefill"}
    return sum_series(
        ScrapedSeries((labels["model"], _ENGINE), one.value)
        for labels, one in picked
        if labels["mode"] != "prefill" or labels["model"] not in serving
    )


def _share(found: _Found, sources: tuple[str, ...]) -> list[ScrapedSeries]:
    """The first source as a share of the second, by model."""
    used, whole = ({one.values: one.value for one in _sum(found, (each,))} for each in sources)
    return [
        ScrapedSeries(values, used.get(values, 0.0) / most if most else 0.0)
        for values, most in whole.items()
    ]


_REASONS: Final[Mapping[str, str]] = {"tool_calls": "stop"}
"""vLLM's finish reasons where they differ: it does not know why a chat's text ends."""


def _by_reason(found: _Found, sources: tuple[str, ...]) -> list[ScrapedSeries]:
    return sum_series(
        ScrapedSeries(
            (labels["model"], _ENGINE, _REASONS.get(labels["reason"], labels["reason"])), one.value
        )
        for source in sources
        for labels, one in _labelled(found.get(source))
    )


def _cache_config(found: _Found, sources: tuple[str, ...]) -> list[ScrapedSeries]:
    """Always 1; labels are the sizes of a block and of the pool, of the engine that serves."""
    size, blocks = (_sum_of_serving(found, (each,)) for each in sources)
    return [
        ScrapedSeries((_ENGINE, f"{one.value:.0f}", f"{all_.value:.0f}"), 1.0)
        for one, all_ in zip(size, blocks, strict=False)
        if all_.value  # 0: the engine has not told it yet
    ][:1]


# ---------------------------------------------------------------------- the table


def _histogram(name: str, source: str = "") -> VllmMetric:
    return VllmMetric(name, "histogram", (source or name,), _sum)


VLLM_METRICS: Final = (
    # A worker's.
    VllmMetric("num_requests_running", "gauge", ("num_requests_running",), _sum),
    VllmMetric(
        "num_requests_waiting", "gauge", ("num_requests_waiting", "num_requests_held"), _sum
    ),
    VllmMetric("kv_cache_usage_perc", "gauge", ("kv_blocks_used", "kv_blocks"), _share),
    VllmMetric("prefix_cache_queries_total", "counter", ("prompt_tokens_total",), _sum_of_serving),
    VllmMetric(
        "prefix_cache_hits_total", "counter", ("cached_prompt_tokens_total",), _sum_of_serving
    ),
    VllmMetric(
        "external_prefix_cache_hits_total",
        "counter",
        ("kv_tier_hit_tokens_total",),
        _sum_of_serving,
    ),
    VllmMetric("prompt_tokens_total", "counter", ("prompt_tokens_total",), _sum_of_serving),
    VllmMetric(
        "prompt_tokens_cached_total", "counter", ("cached_prompt_tokens_total",), _sum_of_serving
    ),
    VllmMetric("generation_tokens_total", "counter", ("generation_tokens_total",), _sum_of_serving),
    VllmMetric("num_preemptions_total", "counter", ("preemptions_total",), _sum),
    VllmMetric(
        *("cache_config_info", "gauge", ("kv_block_tokens", "kv_blocks"), _cache_config),
        labels=("engine", "block_size", "num_gpu_blocks"),
    ),
    # A frontend's.
    VllmMetric(
        *("request_success_total", "counter", ("finished_total",), _by_reason),
        labels=("model_name", "engine", "finished_reason"),
    ),
    _histogram("time_to_first_token_seconds"),
    _histogram("inter_token_latency_seconds"),
    _histogram("request_time_per_output_token_seconds"),
    _histogram("e2e_request_latency_seconds"),
    _histogram("request_queue_time_seconds", "request_queue_seconds"),
    _histogram("request_prefill_time_seconds", "request_prefill_seconds"),
    _histogram("request_decode_time_seconds", "request_decode_seconds"),
    _histogram("request_prompt_tokens"),
    _histogram("request_generation_tokens"),
    _histogram("request_max_num_generation_tokens", "request_max_generation_tokens"),
    _histogram("request_prefill_kv_computed_tokens", "request_uncached_tokens"),
)
"""Every name of vLLM that is served."""
