"""The reference pages say what the code says: a row for every option, metric and exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.launch import exit_codes
from pdserve.launch.config.options import GROUPS, OPTIONS
from pdserve.launch.config.resolve import resolve
from pdserve.observe.metrics import Metrics

DOCS = Path(__file__).parents[2] / "docs"


def option_rows() -> list[str]:
    defaults = resolve({}, {"PDSERVE_CONFIG": "none"})
    rows = []
    for group in GROUPS:
        for option in OPTIONS:
            if option.group == group:
                default = option.text(defaults.value(option))
                flag = f"--{option.name} {option.metavar}".strip()
                rows.append(f"| `{flag}` | {default} | {option.help} |")
    return rows


def metric_rows() -> list[str]:
    rows = []
    for metric in Metrics.definitions():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        rows.append(f"| `{metric.name}{labels}` | {metric.kind} | {metric.owner} | {metric.help} |")
    return rows


def exit_rows() -> list[str]:
    return [f"| {value} | `{name}` |" for name, value in vars(exit_codes).items() if name.isupper()]


@pytest.mark.parametrize(
    ("page", "rows"),
    [
        ("configuration.md", option_rows()),
        ("metrics.md", metric_rows()),
        ("operations.md", exit_rows()),
    ],
)
def test_the_page_has_every_row_and_none_of_what_is_gone(page, rows):
    lines = (DOCS / page).read_text().splitlines()
    missing = [row for row in rows if not any(line.startswith(row) for line in lines)]
    assert not missing, "\n".join(["write into the page:", *missing])
    beginnings = tuple({row[: len("| `--")] for row in rows})
    gone = [line for line in lines if line.startswith(beginnings) and not known(line, rows)]
    assert page == "operations.md" or not gone, "\n".join(["no longer in the code:", *gone])


def known(line: str, rows: list[str]) -> bool:
    return any(line.startswith(row) for row in rows)
