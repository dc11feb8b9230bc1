from prometheus_client.parser import text_string_to_metric_families

from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries, render
from pdserve.observe.merge import merge
from pdserve.observe.metrics import Metrics
from pdserve.observe.node_metrics import NodeSample

M = ("model", "m")


def samples(families):
    page = render(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def two():
    one, other = Metrics(), Metrics()
    return one, other, lambda: samples(merge([one.families(), other.families()]))


def test_counters_add_up_by_their_labels():
    one, other, merged = two()
    one.requests.labels("m", "completed").value = 3
    other.requests.labels("m", "completed").value = 4
    other.requests.labels("m", "error").value = 1
    other.requests.labels("n", "error").value = 5
    found = merged()
    assert found["pdserve_requests_total", (M, ("outcome", "completed"))] == 7
    assert found["pdserve_requests_total", (M, ("outcome", "error"))] == 1
    assert found["pdserve_requests_total", (("model", "n"), ("outcome", "error"))] == 5


def test_histograms_add_up_bucket_by_bucket():
    one, other, merged = two()
    one.of_model("m").time_to_first_token.observe(0.001)
    other.of_model("m").time_to_first_token.observe(0.03, 2)
    found = merged()
    name = "pdserve_time_to_first_token_seconds"
    assert found[f"{name}_count", (M,)] == 3
    assert found[f"{name}_bucket", (("le", "0.001"), M)] == 1
    assert found[f"{name}_bucket", (("le", "0.04"), M)] == 3
    assert found[f"{name}_bucket", (("le", "+Inf"), M)] == 3
    assert abs(found[f"{name}_sum", (M,)] - 0.061) < 1e-9


def test_gauges_add_up_but_for_those_whose_larger_says_it_all():
    one, other, merged = two()
    one.http_connections.value, other.http_connections.value = 2, 5
    one.event_loop_lag_max.value, other.event_loop_lag_max.value = 0.25, 0.5
    one.degraded.labels("no_uvloop").value = other.degraded.labels("no_uvloop").value = 1
    for metrics, members in ((one, 3), (other, 4)):
        metrics.build_info.labels("1.0", "frontend").value = 1
        seen = NodeSample(role="frontend", members={"worker": members}, links=members, lives=1)
        metrics.attach_node(lambda seen=seen: seen)
    found = merged()
    role = ("role", "frontend")
    assert found["pdserve_http_connections", ()] == 7
    assert found["pdserve_event_loop_lag_max_seconds", ()] == 0.5
    assert found["pdserve_degraded", (("reason", "no_uvloop"),)] == 1
    assert found["pdserve_build_info", (role, ("version", "1.0"))] == 1
    assert found["pdserve_node_members", (("member", "worker"), role)] == 4
    assert found["pdserve_node_links", (role,)] == 7
    assert found["pdserve_node_lives_total", (role,)] == 1


def test_the_process_is_as_old_as_its_oldest_and_as_large_as_all():
    one = Metrics()
    alone, both = samples(one.families()), samples(merge([one.families()] * 2))
    memory = ("process_resident_memory_bytes", ())
    born = ("process_start_time_seconds", ())
    assert both[born] == alone[born]
    assert both[memory] > 1.5 * alone[memory]


def test_one_page_is_itself():
    one = Metrics()
    one.requests.labels("m", "completed").value = 3
    families = one.families()
    assert samples(merge([families])) == samples(families)


def test_histograms_with_other_bounds_keep_those_that_all_have():
    def family(bounds, counts):
        series = [ScrapedSeries(("m",), 1.0, counts)]
        return ScrapedFamily("x", "histogram", "Of x.", ("model",), series, bounds)

    one, other = family([1.0, 2.0, 4.0], [1, 2, 4, 8]), family([1.0, 3.0, 4.0], [10, 20, 40, 80])
    (both,) = merge([[one], [other]])
    assert both.bounds == [1.0, 4.0]
    assert both.series == [ScrapedSeries(("m",), 2.0, [11, 66, 88])]
    assert (one.series[0].counts, one.bounds) == ([1, 2, 4, 8], [1.0, 2.0, 4.0])


def test_pages_are_not_changed_by_their_sum():
    one, other, _ = two()
    one.of_model("m").time_to_first_token.observe(0.001)
    other.of_model("m").time_to_first_token.observe(0.001)
    pages = [one.families(), other.families()]
    before = [render(page) for page in pages]
    merge(pages)
    assert [render(page) for page in pages] == before
