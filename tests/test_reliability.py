"""The page of promises names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def test_the_page_of_promises_names_tests_that_exist() -> None:
    page = (_ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(test_\w+))?`", page)
    assert len(named) > 40
    for path, test in named:
        file = _ROOT / path
        assert file.exists(), path
        if test:
            assert re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE), test
