"""Fingerprints: equal only if every field is."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pdserve.kv.tiers.disk.fingerprint import Fingerprint
from tests.support.disk_tiers import FINGERPRINT


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_every_field_counts(field: str):
    more = {str: "x", bytes: b"x", int: 1}
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + more[type(value)]})
    assert other.id != FINGERPRINT.id
    assert Fingerprint.unpacked(other.packed()) == other


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"secret_id":"zz"}', b'{"secret_id":1}'])
def test_other_bytes_are_no_fingerprint(data: bytes):
    with pytest.raises(ValueError):  # noqa: PT011
        Fingerprint.unpacked(data)


def test_fields_must_fit_into_a_header():
    FINGERPRINT.check()
    for other in (
        replace(FINGERPRINT, dtype="x" * 17),
        replace(FINGERPRINT, scales="x" * 33),
        replace(FINGERPRINT, dtype="flöat"),
    ):
        with pytest.raises(ValueError, match="longer"):
            other.check()
