"""The comparison of two versions runs each of its operations, and its page says what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare import ROWS, Finding, compare, page

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(60)
def test_a_tree_is_compared_with_itself():
    findings = compare(ROOT, ROOT, rounds=1, scale=0.001)
    assert findings.keys() == {row.name for row in ROWS}
    for finding in findings.values():
        assert finding.first[0] > 0
        assert finding.second[0] > 0


def test_a_wide_ratio_is_unsteady():
    assert Finding([1.0] * 4, [1.0, 1.2, 1.4, 1.6]).unsteady
    assert not Finding([1.0] * 4, [1.0, 1.01, 1.02, 1.03]).unsteady


def test_the_page_has_the_ratio_of_the_second_to_the_first():
    findings = {row.name: Finding([2e-6] * 3, [1e-6] * 3, (100.0, 60.0)) for row in ROWS}
    text = page(("v1", "v2"), findings, ["a note"])
    assert "- a note" in text
    assert text.count("| 2.00 | 1.00 | 0.500 | 0.500 to 0.500 | 0.600 |") == len(ROWS)
