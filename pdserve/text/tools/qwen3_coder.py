"""Not read yet: its calls are content."""

from __future__ import annotations

from pdserve.text.tools.hermes import Hermes


class Qwen3Coder(Hermes):
    name = "qwen3_coder"  # type: ignore[misc]
