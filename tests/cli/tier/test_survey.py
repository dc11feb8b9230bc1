"""What a directory of a disk tier tells without a worker, and what is found in damaged files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.cli.tier.survey import BlockCheck, WorkerPart, read_parts, verify_part
from pdserve.errors import ConfigError
from pdserve.kv.tiers.disk.format import PAGE, record_bytes
from tests.kv.tiers.disk.test_tier import open_tier, own
from tests.support.disk_tiers import FINGERPRINT, PAYLOAD, chain

if TYPE_CHECKING:
    from pathlib import Path


def stored(root: Path, *, owner: str = "a", chains: int = 2, length: int = 10) -> Path:
    """A closed part with blocks; its path."""
    tier, machine = open_tier(root, owner)
    for number in range(chains):
        machine.store_all(chain(number, length, root=bytes([number]) * 16))
    tier.close()
    return own(tier)


def segments(part: Path) -> list[Path]:
    return sorted(part.glob("seg-*"))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (before,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([before ^ 1]))


def test_a_part_says_whose_it_is_and_what_it_has(tmp_path: Path) -> None:
    part = stored(tmp_path)
    (found,) = read_parts(tmp_path)
    assert (found.name, found.owner, found.fingerprint) == (part.name, "a", FINGERPRINT)
    assert (found.records, found.payload, found.chains) == (20, 20 * PAYLOAD, 2)
    assert (found.segments, found.sealed, found.strange) == (3, 3, 0)
    assert not found.in_use
    assert found.disk >= found.payload
    assert 0 < found.opened <= found.newest + 1


def test_a_part_of_a_running_worker_is_in_use_and_left_alone(tmp_path: Path) -> None:
    tier, machine = open_tier(tmp_path)
    machine.store_all(chain(0, 3))
    (found,) = read_parts(tmp_path)
    assert found.in_use
    assert (found.records, found.sealed) == (3, 0)
    assert verify_part(own(tier)).whole == 3
    machine.store_all(chain(1, 3))
    assert len(machine.served()) == 6
    tier.close()


def test_a_part_of_another_release_is_listed_and_not_read(tmp_path: Path) -> None:
    part = stored(tmp_path)
    (part / "TIER").write_text('{"format": 99}')
    (found,) = read_parts(tmp_path)
    assert found == WorkerPart(part.name, disk=found.disk)
    assert verify_part(part) == BlockCheck()


def test_what_is_no_directory_is_said(tmp_path: Path) -> None:
    assert read_parts(tmp_path) == []
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_parts(tmp_path / "absent")


def test_whole_blocks_are_counted(tmp_path: Path) -> None:
    part, heard = stored(tmp_path), []
    verdict = verify_part(part, lambda so_far: heard.append(so_far.whole))
    assert (verdict.whole, verdict.read, verdict.bad) == (20, 20 * PAYLOAD, {})
    assert heard == [8, 16, 20]


def test_a_flipped_bit_of_a_payload_or_header_is_found(tmp_path: Path) -> None:
    part = stored(tmp_path)
    first, second, _ = segments(part)
    flip(first, PAGE + PAGE + 17)
    flip(second, PAGE + record_bytes(PAYLOAD) + 40)
    verdict = verify_part(part)
    assert (verdict.whole, dict(verdict.bad)) == (18, {"crc": 1, "format": 1})


def test_a_segment_that_lost_its_table_is_read_by_its_headers(tmp_path: Path) -> None:
    part = stored(tmp_path)
    first = segments(part)[0]
    flip(first, first.stat().st_size - PAGE + 10)
    assert verify_part(part).whole == 20
    flip(first, 40)
    (found,) = read_parts(tmp_path)
    assert (found.strange, found.records) == (1, 12)


def test_parts_of_several_models_stand_side_by_side(tmp_path: Path) -> None:
    stored(tmp_path)
    tier, machine = open_tier(tmp_path, "b", replace(FINGERPRINT, content="other"))
    machine.store_all(chain(0, 2))
    tier.close()
    parts = {part.owner: part for part in read_parts(tmp_path)}
    assert {owner: part.records for owner, part in parts.items()} == {"a": 20, "b": 2}
