"""The table of renamed names fits both trees; what it says of a name, with tables made up here."""

from __future__ import annotations

import pytest

from tests.compat.previous import module_names, module_names_today, names_today, release_names
from tests.compat.renames import Renames, defined, paths_of, read, renames

OLD = {"p.a": {"One", "two", "THREE"}, "p.b": {"Four"}, "p.b.c": {"Five"}}
NEW = {"p.x": {"Uno", "two", "THREE"}, "q": set(), "q.c": {"Five"}, "q.d": {"Quatro"}}
TABLE = Renames(
    modules={"p.a": "p.x", "p.b": "q"},
    symbols={"p.a:One": "Uno", "p.b:Four": "q.d:Quatro"},
    gone={"p.b:Four": "nobody asks"},
)


def test_every_entry_fits_the_release_before_and_this_tree():
    mistakes = renames().mistakes(module_names, module_names_today)
    assert not mistakes, "\n".join(mistakes)


def test_every_public_name_of_the_release_before_is_found_today():
    """Modules, classes and functions: under their names, under those of the table, or in [gone]."""
    lost = renames().missing(release_names(), names_today())
    assert not lost, "\n".join(lost)


def test_both_trees_are_read():
    assert "BlockStored" in (module_names("pdserve.messages.kv") or ())
    assert module_names("pdserve.messages") is not None
    assert module_names("pdserve_engines.sim") is not None
    assert module_names("pdserve.of_no_release") is None
    assert module_names_today("pdserve.of_no_release") is None
    assert "PdserveError" in (module_names_today("pdserve.errors") or ())
    assert module_names_today("pdserve_engines.sim") is not None


def test_names_are_those_of_today():
    assert TABLE.module("p.a") == "p.x"
    assert TABLE.module("p.b.c") == "q.c"
    assert TABLE.module("p.bc") == "p.bc"
    assert TABLE.module("other") == "other"
    assert TABLE.symbol("p.a:One") == "p.x:Uno"
    assert TABLE.symbol("p.a:two") == "p.x:two"
    assert TABLE.symbol("p.b:Four") == "q.d:Quatro"
    assert TABLE.dotted("p.b.c.Five") == "q.c.Five"


def test_the_longest_entry_counts():
    table = Renames(modules={"p": "q", "p.b": "r", "p.b.c": "s.t"})
    assert [table.module(name) for name in ("p.a", "p.b.x", "p.b.c")] == ["q.a", "r.x", "s.t"]


def test_types_have_the_names_of_today():
    table = Renames({"pdserve.a": "pdserve.b"}, {"pdserve.a:One": "Uno"})
    hint = "tuple[<class 'pdserve.a.One'>, pdserve.a.Two, int | None]"
    assert table.hint(hint) == "tuple[<class 'pdserve.b.Uno'>, pdserve.b.Two, int | None]"
    assert Renames().hint(hint) == hint


def test_a_name_that_nothing_is_known_of_is_missing():
    today = {"p.x.Uno", "q.c.Five"}
    assert not TABLE.missing(["p.a.One", "p.b.c.Five", "p.b.Four"], today)
    (sentence,) = TABLE.missing(["p.a.two"], today)
    assert sentence.startswith("p.a.two is not there as p.x.two")
    assert not Renames(gone={"p": "all of it"}).missing(["p.a.two", "p.b.c.Five"], today)


def test_a_table_that_fits_has_no_mistakes():
    table = Renames(TABLE.modules, TABLE.symbols, {"p.a:two": "nobody asks"})
    assert not table.mistakes(OLD.get, {**NEW, "p.x": {"Uno"}}.get)
    assert not Renames().mistakes(OLD.get, NEW.get)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Renames({"p.z": "p.x"}), "[modules] p.z: the release before had no such module"),
        (Renames({"p.a": "p.z"}), "[modules] p.a: there is no module p.z"),
        (Renames({}, {"p.z:One": "Uno"}), "[symbols] p.z:One: the release before had no such name"),
        (Renames({}, {"p.a:Six": "Uno"}), "[symbols] p.a:Six: the release before had no such name"),
        (Renames({}, {"p.a:One": "Uno"}), "[symbols] p.a:One: there is no p.a:Uno"),
        (Renames({"p.a": "p.x"}, {"p.a:One": "Six"}), "there is no p.x:Six"),
        (
            Renames({"p.a": "p.x"}, {"p.a:One": "two", "p.a:two": "two"}),
            "2 names have become p.x:two",
        ),
        (
            Renames({}, {}, {"p.a:Six": "why"}),
            "[gone] p.a:Six: the release before had no such name",
        ),
        (Renames({}, {}, {"p.z": "why"}), "[gone] p.z: the release before had no such name"),
        (
            Renames({"p.a": "p.x"}, {}, {"p.a:two": "why"}),
            "[gone] p.a:two: it is there, as p.x:two",
        ),
        (Renames({}, {}, {"p.a:One": ""}), "[gone] p.a:One: say why it is no longer sent"),
    ],
)
def test_an_entry_that_does_not_fit_is_told(table, says):
    assert says in "\n".join(table.mistakes(OLD.get, NEW.get))


def test_the_file_has_three_tables_and_no_other():
    table = read('[modules]\n"p.a" = "p.x"\n[symbols]\n"p.a:One" = "Uno"\n[gone]\n"p.b" = "why"\n')
    assert table == Renames({"p.a": "p.x"}, {"p.a:One": "Uno"}, {"p.b": "why"})
    with pytest.raises(TypeError, match="symbol"):
        read("[symbol]\n")


def test_a_module_defines_what_stands_at_its_top():
    source = (
        "import os\nA = B = 1\nC, D = 1, 2\nE: int = 3\ndef f(): g = 1\nasync def h(): ...\n"
        "class I:\n  j = 1\nif A:\n  K = 1\nelse:\n  L = 1\n"
        "try:\n  M = 1\nexcept OSError:\n  N = 1\n"
    )
    assert defined(source) == {*"ABCDEfhIKLMN"}


def test_sources_of_engines_are_elsewhere():
    assert paths_of("pdserve.a.b") == ("pdserve/a/b.py", "pdserve/a/b/__init__.py")
    assert paths_of("pdserve_engines.sim")[1] == "engines/pdserve_engines/sim/__init__.py"
