"""vLLM's names: each that is claimed has vLLM's kind and labels, and is on the page."""

from __future__ import annotations

import importlib.util
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from pdserve.observe.engine_metrics import EngineSample
from pdserve.observe.exposition import render
from pdserve.observe.merge import merge
from pdserve.observe.metrics import Metrics
from pdserve.observe.scrapes import METRIC_NAMES, ScrapeForm, page_of
from pdserve.observe.tier_metrics import TierSample
from pdserve.observe.vllm_names import VLLM_METRICS, VllmMetric, vllm_families
from tests.observe import vllm_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "metrics.md").read_text()
SECTION = DOCS.partition("## vLLM's names")[2].partition("\n## ")[0]
FACTS = {
    name: (words[0], tuple(words[1:]))
    for name, words in tomllib.loads((HERE / "vllm_metrics.toml").read_text()).items()
}

READ_BY_OTHERS = {
    # vLLM's own Grafana board.
    *("e2e_request_latency_seconds", "prompt_tokens_total", "generation_tokens_total"),
    *("inter_token_latency_seconds", "num_requests_running", "num_requests_waiting"),
    *("time_to_first_token_seconds", "kv_cache_usage_perc", "request_prompt_tokens"),
    *("request_generation_tokens", "request_success_total", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    "request_max_num_generation_tokens",
    # Routers and autoscalers of llm-d and AIBrix, beside some of these.
    *("cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    "request_time_per_output_token_seconds",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def busy(*engines: EngineSample) -> Metrics:
    """Numbers for everything that a request and an engine count."""
    metrics = Metrics()
    model = metrics.of_model("m")
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token"):
        getattr(model, name).observe(0.25)
    for name in ("e2e_request_latency", "request_queue", "request_prefill", "request_decode"):
        getattr(model, name).observe(0.5)
    for name in ("prompt", "generation", "max_generation", "uncached"):
        getattr(model, f"request_{name}_tokens").observe(7)
    for reason in ("stop", "tool_calls", "tool_calls", "length", "abort", "error"):
        model.finished(reason)
    model.num_requests_held.value = 3
    metrics.of_model("").ended("invalid")
    for engine in engines:
        metrics.attach_engine(lambda engine=engine: engine)  # type: ignore[misc]
    return metrics


def engine(mode: str, **numbers: Any) -> EngineSample:
    tiers = {name: TierSample(hit_tokens=20) for name in ("host", "disk")}
    return EngineSample(model="m", mode=mode, ready=True, block_tokens=16, tiers=tiers, **numbers)


def samples(page: bytes) -> Samples:
    return {
        (sample.name.removeprefix("vllm:"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset({"model_name": "m", "engine": "0", **labels}.items())]


# ---------------------------------------------------------------------- against vLLM


@pytest.mark.parametrize("metric", VLLM_METRICS, ids=lambda metric: metric.name)
def test_a_name_is_vllms_with_its_kind_and_labels(metric):
    kind, labels = FACTS[metric.name]
    assert (metric.kind, set(metric.labels)) == (kind, set(labels))


def unserved(table: Sequence[VllmMetric]) -> set[str]:
    """What others read and the table lacks; and what is neither served nor in the documents."""
    served = {metric.name for metric in table}
    told = set(re.findall(r"`(\w+)`", SECTION))
    return (READ_BY_OTHERS - served) | (set(FACTS) - served - told)


def test_every_name_of_vllm_is_served_or_the_documents_say_why_not():
    assert unserved(VLLM_METRICS) == set()


@pytest.mark.parametrize("metric", VLLM_METRICS, ids=lambda metric: metric.name)
def test_a_name_that_is_forgotten_is_noticed(metric):
    """A planted bug: each line of the table once left out."""
    assert unserved([one for one in VLLM_METRICS if one is not metric]) == {metric.name}


def test_the_documents_say_what_each_name_is_made_of():
    rows = re.findall(r"^\| `vllm:(\w+)` \| (.*?) \|$", SECTION, re.MULTILINE)
    found = {name: tuple(re.findall(r"`pdserve_(\w+)`", made_of)) for name, made_of in rows}
    assert found == {metric.name: metric.sources for metric in VLLM_METRICS}


def test_facts_are_read_from_the_source():
    source = """
self.x = self._gauge_cls(name="vllm:running", documentation="", labelnames=labelnames)
self._counter_cls(name="vllm:done", labelnames=labelnames + ["why"])
self._histogram_cls(name="vllm:h", labelnames=["a", "b"])
other(name="vllm:no")
"""
    assert vllm_facts.facts(source) == {
        "done_total": ("counter", "model_name", "engine", "why"),
        "h": ("histogram", "a", "b"),
        "running": ("gauge", "model_name", "engine"),
    }


@pytest.mark.vllm
def test_the_facts_are_those_of_the_installed_vllm():
    if importlib.util.find_spec("vllm") is None and not os.environ.get("PDSERVE_REQUIRE_VLLM"):
        pytest.skip("needs the environment of `make vllm`")
    found = vllm_facts.facts(vllm_facts.installed())
    served = {metric.name for metric in VLLM_METRICS}
    assert {name: found.get(name) for name in served} == {
        name: (FACTS[name][0], *FACTS[name][1]) for name in served
    }


# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_name_is_on_the_page_with_its_kind_and_labels(openmetrics):
    metrics = busy(engine("aggregated", blocks_total=8, blocks_used=2, prompt_tokens=5))
    form = ScrapeForm("vllm", openmetrics=openmetrics)
    page = page_of(metrics.families(), form).body.decode()
    assert "pdserve_" not in re.sub(r"# HELP .*", "", page)
    kinds = dict(re.findall(r"^# TYPE vllm:(\S+) (\w+)$", page, re.MULTILINE))
    for metric in VLLM_METRICS:
        counts = metric.kind == "counter" and openmetrics
        assert kinds.pop(metric.name.removesuffix("_total") if counts else metric.name) == (
            metric.kind
        )
        suffix = "_count" if metric.kind == "histogram" else ""
        found = re.findall(rf"^vllm:{metric.name}{suffix}\{{(.*)\}} \S+$", page, re.MULTILINE)
        assert found, metric.name
        for labels in found:
            assert set(re.findall(r'(\w+)="', labels)) == set(metric.labels)
    assert not kinds
    assert "process_resident_memory_bytes" in page


@pytest.mark.parametrize("names", METRIC_NAMES)
def test_no_name_is_on_a_page_twice(names):
    metrics = busy(engine("prefill", blocks_total=8), engine("decode", blocks_total=8))
    page = page_of(metrics.families(), ScrapeForm(names)).body.decode()
    kinds = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    lines = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    opened = page_of(metrics.families(), ScrapeForm(names, openmetrics=True)).body.decode()
    assert list(parse_openmetrics(opened))


def test_both_names_show_the_same_numbers():
    metrics = busy(engine("aggregated", running=2, waiting=4, blocks_total=8, blocks_used=2))
    found = samples(page_of(metrics.families(), ScrapeForm("both")).body)
    assert value(found, "num_requests_running") == 2
    assert value(found, "num_requests_waiting") == 4 + 3
    assert value(found, "kv_cache_usage_perc") == 0.25
    assert value(found, "time_to_first_token_seconds_sum") == 0.25
    assert value(found, "request_prompt_tokens_bucket", le="10.0") == 1
    assert value(found, "request_success_total", finished_reason="stop") == 3
    assert value(found, "request_success_total", finished_reason="length") == 1
    for name in ("abort", "error"):
        assert value(found, "request_success_total", finished_reason=name) == 1
    ours = frozenset({("model", "m"), ("mode", "aggregated")})
    assert found["pdserve_num_requests_running", ours] == 2


def test_a_prompt_that_is_handed_over_counts_once():
    metrics = busy(
        engine("prefill", running=1, prompt_tokens=100, cached_tokens=10, blocks_total=8),
        engine("decode", running=2, prompt_tokens=100, cached_tokens=90, blocks_total=8),
    )
    found = samples(render(vllm_families(metrics.families())))
    assert value(found, "num_requests_running") == 3
    assert value(found, "prompt_tokens_total") == 100
    assert value(found, "prompt_tokens_cached_total") == 90
    assert value(found, "external_prefix_cache_hits_total") == 40
    alone = busy(engine("prefill", prompt_tokens=100))
    found = samples(render(vllm_families(alone.families())))
    assert value(found, "prompt_tokens_total") == 100


def test_a_role_serves_what_it_owns():
    frontend = {one.name for one in vllm_families(busy().families())}
    assert "vllm:time_to_first_token_seconds" in frontend
    assert "vllm:num_requests_waiting" in frontend
    assert not {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} & frontend
    worker = Metrics()
    worker.attach_engine(lambda: engine("decode"))
    names = {one.name for one in vllm_families(worker.families())}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= names
    assert "vllm:time_to_first_token_seconds" not in names


def test_frontends_that_share_a_port_are_summed_before():
    both = merge([busy().families(), busy().families()])
    found = samples(render(vllm_families(both)))
    assert value(found, "time_to_first_token_seconds_count") == 2
    assert value(found, "request_success_total", finished_reason="stop") == 6
