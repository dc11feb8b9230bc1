"""Where the tables are undefined, tests fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.worker.disagg.state_table import StateMachine

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    StateMachine.strict = True
    yield
    StateMachine.strict = False
