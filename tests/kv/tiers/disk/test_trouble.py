"""When a tier may write after errors."""

from __future__ import annotations

import errno as codes

import pytest

from pdserve.kv.tiers.disk.trouble import CORRUPT, DiskTrouble


@pytest.mark.parametrize("errno", [codes.ENOSPC, codes.EDQUOT, codes.EROFS, codes.ENOENT])
def test_pauses_double_up_to_ten_minutes(errno: int):
    trouble = DiskTrouble()
    now = 100.0
    for pause in (30, 60, 120, 240, 480, 600, 600):
        trouble.failed(errno, now)
        assert not trouble.may_write(now + pause - 0.1)
        now += pause
        assert trouble.may_write(now)
    trouble.wrote(now)
    assert trouble.text(now) == ""
    trouble.failed(errno, now)
    assert trouble.may_write(now + 30)


def test_batches_that_were_under_way_do_not_make_the_pause_longer():
    trouble = DiskTrouble()
    for _ in range(5):
        trouble.failed(codes.ENOSPC, 1.0)
    trouble.wrote(2.0)  # it began before the disk was full
    assert not trouble.may_write(30.9)
    assert trouble.may_write(31.0)
    assert trouble.by_errno == {codes.ENOSPC: 5}


@pytest.mark.parametrize("errno", [codes.EIO, CORRUPT])
def test_three_errors_within_a_minute_stop_writing_for_ten(errno: int):
    trouble = DiskTrouble()
    for now in (0.0, 61.0, 120.0):  # never three within a minute
        trouble.failed(errno, now)
        assert trouble.may_write(now)
    trouble.failed(errno, 121.0)
    assert not trouble.may_write(720.9)
    assert trouble.may_write(721.0)


def test_the_text_says_what_is_wrong_and_for_how_long():
    trouble = DiskTrouble()
    assert trouble.text(0.0) == ""
    trouble.failed(codes.ENOSPC, 0.0)
    full = "cannot write: No space left on device (make room, or name a smaller size)"
    assert trouble.text(10.0) == f"{full}; no writes for 30 s"
    assert trouble.text(20.0) == trouble.text(10.0), "each change of the text is logged"
    assert trouble.text(31.0).endswith("the next write is a trial")
    for _ in range(3):
        trouble.failed(CORRUPT, 40.0)
    assert trouble.text(40.0) == (
        "3 errors within 60 s, the last: a record does not match its checksum; no writes for 600 s"
    )


def test_a_directory_that_is_gone_has_a_remedy():
    trouble = DiskTrouble()
    trouble.failed(codes.ENOENT, 0.0)
    assert "its directory is gone: make it again, and restart the worker" in trouble.text(0.0)
