"""Not read yet: its calls are content."""

from __future__ import annotations

from pdserve.text.tools.hermes import Hermes


class Mistral(Hermes):
    name = "mistral"  # type: ignore[misc]
