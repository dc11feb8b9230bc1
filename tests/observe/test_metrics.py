import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from pdserve import errors
from pdserve.observe import metrics as metrics_module
from pdserve.observe.engine_metrics import EngineSample
from pdserve.observe.exposition import render
from pdserve.observe.instruments import OTHER
from pdserve.observe.metrics import MOST_MODELS, Metrics, outcome_of
from pdserve.observe.scrapes import ScrapeForm

M = ("model", "m")


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = render(metrics.families())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_a_scrape_shows_what_hot_paths_added():
    metrics = Metrics()
    model = metrics.of_model("m")
    for _ in range(3):
        model.ended("completed")
    model.time_to_first_token.observe(0.03)
    metrics.http_connections.value = 1
    samples = scrape(metrics)
    assert samples["pdserve_requests_total", (M, ("outcome", "completed"))] == 3
    assert samples["pdserve_http_connections", ()] == 1
    assert samples["pdserve_time_to_first_token_seconds_count", (M,)] == 1
    assert samples["pdserve_time_to_first_token_seconds_sum", (M,)] == pytest.approx(0.03)


def test_buckets_are_cumulative_and_end_in_infinity():
    metrics = Metrics()
    for value in (0.0001, 0.03, 1e9):
        metrics.of_model("m").time_to_first_token.observe(value)
    buckets = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in scrape(metrics).items()
        if name == "pdserve_time_to_first_token_seconds_bucket"
    ]
    counts = [value for _, value in sorted(buckets)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 3)
    assert max(bound for bound, _ in buckets) == float("inf")


def test_engine_numbers_are_absent_until_a_worker_attaches_them():
    metrics = Metrics()
    assert "pdserve_num_requests_running" not in {name for name, _ in scrape(metrics)}
    metrics.attach_engine(
        lambda: EngineSample(
            model="m",
            ready=True,
            running=2,
            blocks_total=10,
            blocks_used=4,
            output_tokens=99,
            restarts=1,
        )
    )
    samples = scrape(metrics)
    labels = (("mode", "aggregated"), M)
    assert samples["pdserve_num_requests_running", labels] == 2
    assert samples["pdserve_kv_cache_usage_ratio", labels] == pytest.approx(0.4)
    assert samples["pdserve_generation_tokens_total", labels] == 99
    assert samples["pdserve_engine_ready", labels] == 1
    assert samples["pdserve_engine_restarts_total", labels] == 1


def test_two_instances_share_nothing():
    one, two = Metrics(), Metrics()
    one.of_model("m").ended("error")
    assert "pdserve_requests_total" in {name for name, _ in scrape(one)}
    assert "pdserve_requests_total" not in {name for name, _ in scrape(two)}


def test_a_model_is_looked_up_once():
    metrics = Metrics()
    assert metrics.of_model("m") is metrics.of_model("m")
    assert metrics.of_model("m").model == "m"


def test_models_beyond_the_bound_share_a_value():
    metrics = Metrics()
    for name in ("", *(f"m{number}" for number in range(1000))):
        metrics.of_model(name).ended("completed")
        metrics.of_model(name).e2e_request_latency.observe(1.0)
    found = {
        dict(labels)["model"]: value
        for (name, labels), value in scrape(metrics).items()
        if name == "pdserve_requests_total"
    }
    assert len(found) == MOST_MODELS + 2
    assert found[""] == 1
    assert found[OTHER] == 1000 - MOST_MODELS
    assert len(metrics.e2e_request_latency) == MOST_MODELS + 2


async def test_openmetrics_is_served_to_whoever_asks():
    metrics = Metrics()
    metrics.unknown_fields.labels("user_id").inc()
    page = await metrics.page(ScrapeForm(openmetrics=True))
    assert page.content_type.startswith("application/openmetrics-text")
    families = {family.name for family in parse_openmetrics(page.body.decode())}
    assert "pdserve_unknown_fields" in families


def test_a_label_without_its_bound_is_noticed(monkeypatch):
    """A planted bug: without the bound, the test above fails."""
    monkeypatch.setattr(metrics_module, "MOST_MODELS", 10**9)
    with pytest.raises(AssertionError):
        test_models_beyond_the_bound_share_a_value()


def test_unknown_fields_cannot_grow_the_process():
    metrics = Metrics()
    for index in range(1000):
        metrics.unknown_fields.labels(f"field{index}").inc()
    assert len(metrics.unknown_fields) <= 65


def test_names_are_unique_and_follow_the_conventions():
    definitions = Metrics.definitions()
    names = [definition.name for definition in definitions]
    assert len(set(names)) == len(names)
    for definition in definitions:
        assert re.fullmatch(r"pdserve_[a-z][a-z0-9_]*", definition.name)
        assert definition.name.endswith("_total") == (definition.kind == "counter")
        assert definition.help.endswith(".")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "completed"),
        (errors.Cancelled("gone"), "cancelled"),
        (errors.ContextLengthExceeded("long"), "invalid"),
        (errors.Unauthorized("who"), "invalid"),
        (errors.RateLimited("slow down"), "overloaded"),
        (errors.Draining("going"), "unavailable"),
        (errors.DeadlineExceeded("late"), "deadline"),
        (errors.EngineDied("dead"), "error"),
        (RuntimeError("bug"), "error"),
    ],
)
def test_every_ending_has_one_word(error, outcome):
    assert outcome_of(error) == outcome
