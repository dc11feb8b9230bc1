"""Everything that travels between nodes: one release reads what the one before and after it write.

Records are arrays: a reader ignores what comes after the fields it knows and takes the default for
what is missing. So fields are only added at the end, with a default, and none changes its type.
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

if TYPE_CHECKING:
    from tests.compat.previous import Release

SCHEMA = Path(schema.__file__)
LOCAL = "pdserve.messages.engine."
"""A node and its engine core are of one installation: of these records only those matter that
others contain."""
RETYPED = {
    "pdserve.messages.request.GenerateRequest.n": "a bound that no frontend reaches",
}
"""Fields whose type takes more or less than before, and why neither release is sent what it cannot
read."""
TAGGED: dict[str, str] = {}
"""New kinds of messages where an older node expects one of a few, and why it is never sent one."""

Records = dict[str, Any]


@pytest.fixture(scope="module")
def old(release: Release) -> Records:
    found: Records = json.loads(release.run(SCHEMA))["records"]
    return found


@pytest.fixture(scope="module")
def new() -> Records:
    return schema.records()


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
    assert {"pdserve.messages.channel.Batch", "pdserve.gossip.messages.Record"} <= new.keys()
    assert not [name for name, form in new.items() if "unread" in form]
    assert "pdserve.messages.engine.Rejected" in travelling(new)


def test_fields_are_only_added_at_the_end_with_a_default(old, new):
    broken = []
    for name in travelling(old):
        if name not in new:
            continue  # nobody sends it any more
        before, now = old[name]["fields"], new[name]["fields"]
        if len(now) < len(before):
            broken.append(f"{name} has lost fields: an older node expects them")
        for (was, type_, _), (field, is_, _) in zip(before, now, strict=False):
            if was != field:
                broken.append(f"{name}: {field} stands where {was} was")
            elif type_ != is_ and f"{name}.{field}" not in RETYPED:
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


def test_the_release_before_is_the_one_that_is_named():
    """`previous.txt` moves on when a release is made; a clone without tags cannot tell."""
    tag, commit = named()
    tags = (git("tag", "--list", "v[0-9]*", "--sort=-version:refname", "--merged") or "").split()
    before = [one for one in tags if one != f"v{__version__}"]
    if not before:
        pytest.skip("this clone has no tags of releases")
    assert before[0] == tag
    assert git("rev-parse", f"{tag}^{{commit}}") == commit
