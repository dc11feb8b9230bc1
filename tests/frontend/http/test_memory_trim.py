"""Memory is given back when much was held and nothing is any more."""

from __future__ import annotations

from pdserve.frontend.http.memory_trim import MemoryTrimmer, malloc_trim

MIB = 1 << 20


def test_memory_is_given_back_once_after_much_was_held():
    given: list[int] = []
    trimmer = MemoryTrimmer(lambda: given.append(len(given)))
    for size in (MIB, 0, 5 * MIB, 20 * MIB, MIB):
        trimmer.held(size)
    assert given == [], "after little, or while something is held"
    trimmer.held(0)
    trimmer.held(0)
    assert len(given) == 1
    for size in (64 * MIB, 0):
        trimmer.held(size)
    assert len(given) == 2


def test_many_bodies_one_after_the_other_are_as_much_as_one():
    given: list[int] = []
    trimmer = MemoryTrimmer(lambda: given.append(len(given)))
    for size in (MIB, 0) * 7:
        trimmer.held(size)
    assert not given
    for size in (MIB, 0) * 8:
        trimmer.held(size)
    assert len(given) == 1


def test_the_c_library_is_asked():
    malloc_trim()
