"""Not read yet: its calls are content."""

from __future__ import annotations

from pdserve.text.tools.hermes import Hermes


class Llama3Json(Hermes):
    name = "llama3_json"  # type: ignore[misc]
