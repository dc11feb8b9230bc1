"""Counts which states and events of KV tiers and of fetches a run has met.

`residency`  a frame of the host tier, against what happens to it
`job`        a copy or a read or write of the disk, and how it ended
`bring up`   a fetch from the tiers of the same worker, and why it was cut short
`pull`       a fetch from another worker, and how it ended
`serve`      a question of another worker, and why it got less than it asked for

Part of `coverage`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.engine_core.kv_fetch.ports import REASONS
from pdserve.engine_core.kv_fetch.puller import KvPuller
from pdserve.engine_core.kv_fetch.server import KvServer
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.jobs import CopyIn, CopyOut, Fill, Spill
from pdserve.kv.tiers.moves.fetching import Fetching
from pdserve.kv.tiers.moves.job_lanes import JobLanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.kv_transfer.connector import AttemptKey
    from pdserve.ids import Seconds
    from pdserve.kv.tiers.block import TierBlock
    from pdserve.kv.tiers.jobs import JobDone
    from tests.worlds.oracle.coverage import Cells

__all__ = ["PROBES", "TIER_CELLS", "TIER_ON_PURPOSE", "TIER_SHOWN_BY"]

_FRAMES: Final[dict[str, tuple[str, ...]]] = {
    "free": ("reserve",),
    "filling": ("commit", "had already", "abandon"),
    "valid": ("claim", "touch", "shadow", "evict", "drop", "namespace retired"),
    "claimed": ("claim", "release", "touch", "shadow", "drop", "namespace retired"),
    "leaving": ("release",),
}
"""A frame is `leaving` when its block is gone and somebody still reads it."""
_JOBS: Final[dict[str, tuple[str, ...]]] = {
    "copy out": ("ok", "failed"),
    "copy in": ("ok", "failed"),
    "read": ("ok", "io", "crc", "absent", "format"),
    "write": ("ok", "failed"),
}
_BROUGHT_UP: Final = ("whole", "deadline", "cancelled", "io", "crc", "format", "absent", "busy")
_SHORT: Final = "fewer"
"""The owner had fewer blocks than were wanted."""

_PULLER, _SERVER = "engine_core/kv_fetch/test_puller.py", "engine_core/kv_fetch/test_server.py"
_HOST: Final = "kv/tiers/test_host_index.py"

TIER_SHOWN_BY: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    f"{_HOST}::test_clearing_frees_all_but_what_is_read_or_filled": (
        ("residency valid", "namespace retired"),
        ("residency claimed", "namespace retired"),
        ("residency leaving", "release"),
    ),
    f"{_HOST}::test_a_dropped_block_is_not_found_but_its_readers_keep_the_frame": (
        ("residency claimed", "drop"),
    ),
    f"{_HOST}::test_a_claimed_block_is_no_victim_until_the_last_release": (
        ("residency claimed", "claim"),
    ),
    f"{_HOST}::test_a_block_is_not_stored_twice": (("residency filling", "had already"),),
    "engine_core/tiers/test_drops.py::test_everything_goes": (("residency valid", "drop"),),
    f"{_PULLER}::test_an_answer_with_too_few_parts_ends_the_pull": (("pull", "misfit"),),
    f"{_PULLER}::test_transports_that_are_not_ready_are_a_reason": (("pull", "unready"),),
    f"{_PULLER}::test_the_requester_dies[0]": (("pull", "closed"),),
    f"{_PULLER}::test_the_requester_dies[3]": (("serve", "gone"),),
    f"{_PULLER}::test_the_owners_reason_is_the_pulls[epoch]": (("pull", "epoch"),),
    f"{_PULLER}::test_an_owner_waits_no_longer_than_the_deadline_and_some_slack": (
        ("serve", "deadline"),
    ),
    f"{_SERVER}::test_parts_that_cannot_be_sent_end_the_pull": (("serve", "transfer"),),
}
"""Cells that worlds do not visit, by the tests that visit them instead: `test_tier_coverage` runs
these tests and looks. Three of them (`closed`, `gone` and `had already`) one drawn world in 75
visits, which is too seldom to ask it of a few hundred."""

TIER_ON_PURPOSE: Final = frozenset(("bring up", end) for end in ("io", "crc", "format"))
"""Cells of which 75 drawn worlds visited one, once. `plans.with_tiers` makes a disk fail that is
read from, and visits them."""

_EVERY: Final = frozenset(
    (f"{what} {state}", event)
    for what, table in (("residency", _FRAMES), ("job", _JOBS))
    for state, events in table.items()
    for event in events
) | frozenset(
    (what, event)
    for what, events in (
        ("bring up", _BROUGHT_UP),
        ("pull", ("whole", _SHORT, *REASONS)),
        (
            "serve",
            ("whole", "short", "absent", "busy", "gone", "deadline", "transfer"),
        ),
        ("quarantine", ("fenced",)),
    )
    for event in events
)

TIER_CELLS: Final = (
    _EVERY - TIER_ON_PURPOSE - {cell for cells in TIER_SHOWN_BY.values() for cell in cells}
)
"""What worlds of tiers must visit."""


# ---------------------------------------------------------------------------- frames


def _state(host: HostIndex, frame: int) -> str:
    resident = host._by_frame.get(frame)
    if resident is None:
        return "filling" if frame in host._filling else "free"
    if host._is_leaving(resident):
        return "leaving"
    return "claimed" if resident.claims else "valid"


def _reserved(cells: Cells, host: HostIndex) -> None:
    if host._free:
        cells["residency free", "reserve"] += 1


def _committed(cells: Cells, host: HostIndex, frame: int, block: TierBlock, now: Seconds) -> None:
    event = "had already" if block.hash in host else "commit"
    cells[f"residency {_state(host, frame)}", event] += 1


def _of_frame(event: str) -> Callable[..., None]:
    def look(cells: Cells, host: HostIndex, frame: int) -> None:
        cells[f"residency {_state(host, frame)}", event] += 1

    return look


def _of_block(event: str) -> Callable[..., None]:
    def look(cells: Cells, host: HostIndex, block_hash: bytes, *rest: Any, **words: Any) -> None:
        frame = host.frame(block_hash)
        if frame is not None:
            cells[f"residency {_state(host, frame)}", event] += 1

    return look


def _evicted(cells: Cells, host: HostIndex, block_hash: bytes) -> None:
    _of_block("evict")(cells, host, block_hash)
    vars(host)["watched_eviction"] = block_hash


def _dropped(cells: Cells, host: HostIndex, block_hash: bytes) -> None:
    """An eviction drops the block, too: it is counted as `evict` alone."""
    frame = host.frame(block_hash)
    if frame is not None and vars(host).pop("watched_eviction", b"") != block_hash:
        cells[f"residency {_state(host, frame)}", "drop"] += 1


def _retired(cells: Cells, host: HostIndex) -> None:
    for frame in host._by_frame:
        cells[f"residency {_state(host, frame)}", "namespace retired"] += 1


# ---------------------------------------------------------------------------- jobs and fetches


def _ended(cells: Cells, lanes: JobLanes, done: JobDone, now: Seconds) -> None:
    names = {CopyOut: "copy out", CopyIn: "copy in", Fill: "read", Spill: "write"}
    how = "ok"
    if type(done.job) not in names:
        return
    if done.error:
        how = (done.reason or "io") if isinstance(done.job, Fill) else "failed"
    cells[f"job {names[type(done.job)]}", how] += 1


def _brought_up(cells: Cells, fetching: Fetching, fetch: Any) -> None:
    if fetch.number in fetching._fetches:
        cells["bring up", fetch.reason or "whole"] += 1


def _pulled(
    cells: Cells, puller: KvPuller, pull: Any, blocks: int, error: str, *rest: Any, **words: Any
) -> None:
    whole = "whole" if blocks == len(pull.blocks) else _SHORT
    cells["pull", error or whole] += 1


def _fenced(cells: Cells, puller: KvPuller, key: AttemptKey, now: Seconds) -> None:
    if key in puller._closing:
        cells["quarantine", "fenced"] += 1


def _refused(cells: Cells, server: KvServer, number: int, reason: str) -> None:
    cells["serve", reason] += 1


def _answered(cells: Cells, server: KvServer, serving: Any) -> None:
    if not serving.answered and serving.sent:
        whole = serving.sent == len(serving.ticket.blocks)
        cells["serve", "whole" if whole else "short"] += 1


PROBES: Final[tuple[tuple[type, str, Callable[..., None]], ...]] = (
    (HostIndex, "reserve", _reserved),
    (HostIndex, "commit", _committed),
    (HostIndex, "abandon", _of_frame("abandon")),
    (HostIndex, "claim", _of_frame("claim")),
    (HostIndex, "release", _of_frame("release")),
    (HostIndex, "touch", _of_block("touch")),
    (HostIndex, "shadow", _of_block("shadow")),
    (HostIndex, "evict", _evicted),
    (HostIndex, "drop", _dropped),
    (HostIndex, "clear", _retired),
    (JobLanes, "ended", _ended),
    (Fetching, "_finish", _brought_up),
    (KvPuller, "_report", _pulled),
    (KvPuller, "_fenced", _fenced),
    (KvServer, "_refuse", _refused),
    (KvServer, "_answer", _answered),
)
"""Methods that are looked at before each call."""
