"""Everything that travels between nodes: one release reads what the one before and after it write.

Records are arrays: a reader ignores what comes after the fields it knows and takes the default for
what is missing. So fields are only added at the end, with a default, and none changes its type.
Names are not sent: a record that was renamed is found by `renames.toml`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdserve import __version__
from tests.compat import schema
from tests.compat.previous import git, named
from tests.compat.renames import Renames, renames

if TYPE_CHECKING:
    from tests.compat.previous import Release

SCHEMA = Path(schema.__file__)
RENAMES = renames()
LOCAL = f"{RENAMES.module('pdserve.messages.engine')}."
"""A node and its engine core are of one installation: of these records only those matter that
others contain."""
RETYPED = {
    ("pdserve.messages.request.GenerateRequest", "n"): "a bound that no frontend reaches",
    (
        "pdserve.messages.request.GenerateRequest",
        "prompt",
    ): "packed bytes for peers whose handshake has `PACKED_IDS`; others are sent the list",
}
"""Fields whose type takes more or less than before, and why neither release is sent what it cannot
read. Records by the names that the release before has for them."""
TAGGED: dict[str, str] = {
    "pdserve.transfer.tcp.transport._ProbeOrder": "only for peers whose `_Details` have `probes`",
    "pdserve.transfer.tcp.transport._Probe": "only the answer to a `_ProbeOrder`",
}
"""New kinds of messages where an older node expects one of a few, and why it is never sent one."""

Records = dict[str, Any]


@pytest.fixture(scope="module")
def before(release: Release) -> Records:
    """The release's, by its own names."""
    found: Records = json.loads(release.run(SCHEMA))["records"]
    return found


@pytest.fixture(scope="module")
def old(before: Records) -> Records:
    """The release's, by the names of today."""
    return translated(before, RENAMES)


@pytest.fixture(scope="module")
def new() -> Records:
    return schema.records(places_today(RENAMES))


def translated(records: Records, table: Renames) -> Records:
    """Records by today's names, and so the names in their types."""
    return {
        table.dotted(name): form
        | {
            "fields": [
                [field, table.hint(hint), default]
                for field, hint, default in form.get("fields", ())
            ]
        }
        for name, form in records.items()
    }


def places_today(table: Renames) -> list[str]:
    """Where records are: today's places of the old ones, and wherever else parts of them went."""
    inside = tuple(f"{place}." for place in schema.PLACES)
    parts = [name for name in table.modules if name.startswith(inside)]
    left = [table.symbol(name) for name in table.symbols if name.startswith(inside)]
    found = [*map(table.module, (*schema.PLACES, *parts)), *(one.split(":")[0] for one in left)]
    return list(dict.fromkeys(found))


def travelling(records: Records) -> list[str]:
    """Those that other nodes see, by themselves or within others."""
    wanted = [name for name in records if not name.startswith(LOCAL)]
    seen = dict.fromkeys(wanted)
    while wanted:
        for _, hint, _ in records[wanted.pop()].get("fields", ()):
            for name in re.findall(r"pdserve[\w.]+", hint):
                if name in records and name not in seen:
                    seen[name] = None
                    wanted.append(name)
    return list(seen)


def test_all_records_are_looked_at(new):
    expected = ("pdserve.messages.channel.Batch", "pdserve.gossip.messages.Record")
    assert {*map(RENAMES.dotted, expected)} <= new.keys()
    assert not [name for name, form in new.items() if "unread" in form]
    assert RENAMES.dotted("pdserve.messages.engine.Rejected") in travelling(new)


def test_no_record_of_the_release_before_is_lost(before, old, new):
    sent = {*travelling(old)}
    missing = RENAMES.missing([name for name in before if RENAMES.dotted(name) in sent], new)
    assert not missing, "\n".join(missing)


def test_fields_are_only_added_at_the_end_with_a_default(old, new):
    broken = []
    retyped = {(RENAMES.dotted(name), field) for name, field in RETYPED}
    for name in travelling(old):
        if name not in new:
            continue  # see [gone]: nobody sends it any more
        before, now = old[name]["fields"], new[name]["fields"]
        if len(now) < len(before):
            broken.append(f"{name} has lost fields: an older node expects them")
        for (was, type_, _), (field, is_, _) in zip(before, now, strict=False):
            if was != field:
                broken.append(f"{name}: {field} stands where {was} was")
            elif type_ != is_ and (name, field) not in retyped:
                broken.append(f"{name}.{field} was {type_} and is {is_}")
        for field, _, has_default in now[len(before) :]:
            if not has_default:
                broken.append(f"{name}.{field} is new and has no default")
        if old[name]["tag"] != new[name]["tag"]:
            broken.append(f"{name} has another tag")
    assert not broken, "\n".join(broken)


def test_an_older_node_is_sent_no_message_of_a_kind_it_does_not_expect(old, new):
    there = {name.rpartition(".")[0] for name, form in old.items() if form["tag"] is not None}
    added = [
        name
        for name in travelling(new)
        if name not in old
        and new[name]["tag"] is not None
        and name.rpartition(".")[0] in there
        and name not in TAGGED
    ]
    assert not added, f"an older node breaks off at these: {added}"


def test_records_are_compared_by_the_names_of_today():
    table = Renames(
        {"pdserve.messages": "pdserve.records", "pdserve.messages.kv": "pdserve.kv.events"},
        {"pdserve.messages.kv:Old": "New", "pdserve.net.link:Gone": "pdserve.other:There"},
    )
    old = {"pdserve.messages.kv.Old": {"tag": 1, "fields": [["x", "pdserve.messages.a.B", True]]}}
    expected = {"tag": 1, "fields": [["x", "pdserve.records.a.B", True]]}
    assert translated(old, table) == {"pdserve.kv.events.New": expected}
    places = places_today(table)
    assert {"pdserve.records", "pdserve.kv.events", "pdserve.other", "pdserve.net"} <= {*places}
    assert places_today(Renames()) == [*schema.PLACES]


def test_the_release_before_is_the_one_that_is_named():
    """`previous.txt` moves on when a release is made; a clone without tags cannot tell."""
    tag, commit = named()
    tags = (git("tag", "--list", "v[0-9]*", "--sort=-version:refname", "--merged") or "").split()
    before = [one for one in tags if one != f"v{__version__}"]
    if not before:
        pytest.skip("this clone has no tags of releases")
    assert before[0] == tag
    assert git("rev-parse", f"{tag}^{{commit}}") == commit
