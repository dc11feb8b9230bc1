"""Reads numbers from a page of `/metrics`, whatever further labels the samples have."""

from __future__ import annotations

import re
from typing import Final

_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def find(page: str, wanted: str) -> float | None:
    """The sum of the samples with this name and at least these labels, as in `name{a="b"}`; None:
    there is none."""
    name, _, labels = wanted.partition("{")
    least = set(_LABEL.findall(labels))
    found = [
        float(value)
        for each, others, value in _SAMPLE.findall(page)
        if each == name and least <= set(_LABEL.findall(others))
    ]
    return sum(found) if found else None
