"""See `engine`."""

from __future__ import annotations

from tests.fuzz.engine import main

main()
