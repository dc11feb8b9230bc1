"""Nothing that users or other releases see goes away unnoticed: see `surface.py`."""

from __future__ import annotations

import tomllib

import pytest

from tests.compat import surface


@pytest.mark.parametrize("name", surface.PARTS)
def test_nothing_that_others_see_is_gone_or_other(name):
    sentences = surface.lost(name, surface.committed(name), surface.PARTS[name]())
    assert not sentences, "\n".join([*sentences, surface.REMEDY])


def test_every_file_is_of_a_part():
    assert {path.stem for path in surface.FILES.iterdir()} == set(surface.PARTS)


@pytest.mark.parametrize("name", surface.PARTS)
def test_every_section_has_items(name):
    """A collector that finds nothing any more would have nothing to lose when it is made anew."""
    assert all(surface.committed(name).values())


BEFORE = {"flags": {"--port": ["default 8000", "takes PORT"], "--host": []}}


def test_additions_are_no_loss():
    more = {"flags": {"--port": ["default 8000", "takes PORT", "also -p"], "--host": ["new"]}}
    more["more flags"] = {"--new": []}
    assert not surface.lost("x", BEFORE, more)
    assert not surface.lost("x", BEFORE, BEFORE)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ({"flags": {"--host": []}}, "x.toml, [flags]: '--port' is gone"),
        ({"flags": {"--port": ["default 1", "takes PORT"], "--host": []}}, "was 'default 8000'"),
        ({"flags": {"--port": ["takes PORT"], "--host": []}}, "and is now 'takes PORT'"),
        ({}, "'--host' is gone"),
    ],
)
def test_a_loss_is_told_in_a_sentence(now, says):
    assert says in "\n".join(surface.lost("x", BEFORE, now))


def test_a_file_says_what_was_collected():
    part = {"a b": {'quoted "x"': ["…", "\\d\n"], "many": [f"fact {n}" for n in range(20)]}}
    found = tomllib.loads(surface.text_of(part))
    assert not surface.lost("x", part, found)
    assert not surface.lost("x", found, part)


def test_words_are_found_where_they_are_said():
    def spoken(found: dict[str, int]) -> str:
        """unsaid"""
        found["stored"] = 1
        return "one" if found else "two words"

    assert surface.words(spoken) == {"stored", "one", "two words"}
    assert surface.keys_of_dicts(spoken) == {"stored"}
