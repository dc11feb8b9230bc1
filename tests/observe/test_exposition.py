import math

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pdserve.observe.exposition import ScrapedFamily, ScrapedSeries, content_type, render

NASTY = 'a "b" \\ c\nd {,}'

FAMILIES = [
    ScrapedFamily(
        *("x_total", "counter", 'Of "x" \\ and\nmore.', ("model", "reason")),
        series=[ScrapedSeries((NASTY, ""), 3), ScrapedSeries(("m", "r"), 1e20)],
    ),
    ScrapedFamily("y", "gauge", "Of y.", series=[ScrapedSeries((), -0.5)]),
    ScrapedFamily("none", "gauge", "Without series.", ("a",)),
    ScrapedFamily(
        *("z_seconds", "histogram", "Of z.", ("model",)),
        series=[ScrapedSeries((NASTY,), 9.25, [1, 2, 4]), ScrapedSeries(("m",), 0.0, [0, 0, 0])],
        bounds=[0.5, 1],
    ),
    ScrapedFamily("bare", "histogram", "No labels.", series=[ScrapedSeries((), 1, [1])]),
]
SAMPLES = {
    ("x_total", frozenset({("model", NASTY), ("reason", "")})): 3,
    ("x_total", frozenset({("model", "m"), ("reason", "r")})): 1e20,
    ("y", frozenset()): -0.5,
    ("z_seconds_bucket", frozenset({("model", NASTY), ("le", "0.5")})): 1,
    ("z_seconds_bucket", frozenset({("model", NASTY), ("le", "1.0")})): 3,
    ("z_seconds_bucket", frozenset({("model", NASTY), ("le", "+Inf")})): 7,
    ("z_seconds_count", frozenset({("model", NASTY)})): 7,
    ("z_seconds_sum", frozenset({("model", NASTY)})): 9.25,
    ("bare_bucket", frozenset({("le", "+Inf")})): 1,
    ("bare_count", frozenset()): 1,
    ("bare_sum", frozenset()): 1,
}


def read(parse, page: bytes) -> dict:
    families = list(parse(page.decode()))
    assert {one.type for one in families if one.name == "z_seconds"} == {"histogram"}
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_own_parsers_read_both_formats():
    for found in (
        read(parse_text, render(FAMILIES)),
        read(parse_open, render(FAMILIES, openmetrics=True)),
    ):
        assert {key: found[key] for key in SAMPLES} == SAMPLES
        assert sum(labels >= {("model", "m")} for _, labels in found) == 6


def test_help_texts_survive():
    helps = {one.name: one.documentation for one in parse_text(render(FAMILIES).decode())}
    assert helps["x"] == 'Of "x" \\ and\nmore.'
    opened = parse_open(render(FAMILIES, openmetrics=True).decode())
    assert {one.name: one.documentation for one in opened}["x"] == helps["x"]


def test_numbers_that_are_no_numbers_are_written_as_prometheus_does():
    family = ScrapedFamily("y", "gauge", "Of y.", ("n",))
    family.series = [
        ScrapedSeries((str(value),), value) for value in (math.nan, math.inf, -math.inf)
    ]
    text = render([family]).decode()
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["NaN", "+Inf", "-Inf"]


def test_the_content_type_names_the_format():
    opened = content_type(openmetrics=True)
    assert opened == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert content_type(openmetrics=False) == "text/plain; version=0.0.4; charset=utf-8"
