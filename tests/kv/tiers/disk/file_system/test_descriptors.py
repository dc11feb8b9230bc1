"""Descriptors that stay open between uses."""

from __future__ import annotations

from pdserve.kv.tiers.disk.file_system.descriptors import OpenFiles


class Opener:
    """Hands out numbers and notes which were closed."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[int] = []
        self.files = OpenFiles[str](self.closed.append, most=2)

    def open(self) -> int:
        self.opened += 1
        return self.opened


def test_a_file_is_opened_once():
    opener = Opener()
    for _ in range(3):
        with opener.files.use("a", opener.open) as fd:
            assert fd == 1
    assert opener.closed == []


def test_the_one_that_was_not_used_for_longest_is_closed():
    opener = Opener()
    for key in ("a", "b", "a", "c"):
        with opener.files.use(key, opener.open):
            pass
    assert opener.closed == [2]
    assert "a" in opener.files


def test_files_in_use_stay_open_whatever_their_number():
    opener = Opener()
    with (
        opener.files.use("a", opener.open),
        opener.files.use("b", opener.open),
        opener.files.use("c", opener.open),
    ):
        assert opener.closed == []
    assert len(opener.closed) == 1


def test_a_forgotten_file_is_closed_after_its_last_use():
    opener = Opener()
    with opener.files.use("a", opener.open), opener.files.use("a", opener.open):
        opener.files.forget("a")
        assert opener.closed == []
    assert opener.closed == [1]
    with opener.files.use("a", opener.open) as fd:
        assert fd == 2
    opener.files.forget("a")
    opener.files.forget("a")
    assert opener.closed == [1, 2]


def test_of_two_threads_that_open_one_file_one_keeps_it():
    opener = Opener()

    def slow() -> int:
        with opener.files.use("a", opener.open) as other:
            assert other == 1
        return opener.open()

    with opener.files.use("a", slow) as fd:
        assert fd == 1
    assert opener.closed == [2]


def test_closing_closes_what_is_not_in_use():
    opener = Opener()
    opener.files.put("a", opener.open())
    with opener.files.use("b", opener.open):
        opener.files.close()
        assert opener.closed == [1]
    assert opener.closed == [1, 2]
