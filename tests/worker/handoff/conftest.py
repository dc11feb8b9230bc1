"""Where the tables are undefined, tests fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.worker.handoff.table import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    Machine.strict = True
    yield
    Machine.strict = False
