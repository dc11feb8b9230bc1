"""What may go wrong with KV tiers, and the tests that show what happens then.

Two tables, which a reader can check: each kind of failure with the tests that bring it about, and
each classical bug with the planted one that a test finds. The tests that are named exist.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.worlds.faults import KINDS, TIER_KINDS

_TESTS: Final = Path(__file__).parents[1]

FAILURES: Final[dict[str, tuple[str, ...]]] = {
    "a read fails, is short, or brings wrong bytes": (
        "world tier-reads",
        "kv/tiers/disk/test_tier.py",
    ),
    "a write fails": ("world tier-writes", "kv/tiers/disk/test_trouble.py"),
    "the disk is full": ("world tier-full", "kv/tiers/disk/test_files.py"),
    "the disk is slow or hangs": ("world tier-slow", "kv/tiers/test_thread_io.py"),
    "a file is deleted by somebody else": ("world tier-reads", "kv/tiers/disk/test_tier.py"),
    "fsync fails": ("kv/tiers/disk/test_segment_log.py", "kv/tiers/disk/test_files.py"),
    "a record is torn by a loss of power": ("kv/tiers/disk/test_recovery.py",),
    "a copy between device and host fails": ("world tier-copies",),
    "the owner dies while it sends": ("world crash", "world lose", "world engine"),
    "the owner is slow": ("world kv-slow", "world stall", "world slow-worker"),
    "the path is lost while blocks travel": ("world kv-lost", "world reset", "world cut"),
    "bytes land after their sender gave up": ("world kv-late",),
    "bytes are wrong after a fetch": ("world kv-wrong",),
    "the router's knowledge is old": ("world amnesia", "router/test_kv_sources.py"),
    "a worker leaves and others inherit": ("world drain", "worker/kv_fetch/test_push.py"),
    "a worker comes back in a later life": ("world leave", "world pause"),
    "the hash secret changes": ("engine_core/tiers/test_planted_bugs.py",),
    "two workers want one directory": ("kv/tiers/disk/test_directory.py",),
    "a step of the engine fails": ("world step",),
}
"""`world KIND`: a fault of `tests.worlds.faults`, judged by the oracle of outcomes."""

_KV, _DISK = "kv/tiers/test_planted_bugs.py", "kv/tiers/disk/test_planted_bugs.py"
_CORE, _ROUTER = "engine_core/tiers/test_planted_bugs.py", "router/test_planted_bugs.py"
_FETCH, _EXACT = "engine_core/kv_fetch/test_random_fetches.py", "engine_core/test_exactness.py"

BUGS: Final[dict[str, tuple[str, str]]] = {
    "the status of an operation is ignored": (_CORE, "failed_copies_out_count"),
    "a claim ends when the copy begins": (
        _CORE,
        "frames_are_claimed_only_until_the_copy_begins",
    ),
    "stored is published at reserve": (_CORE, "stored_is_told_when_a_copy_begins"),
    "removed is not published before reuse": (_DISK, "removed_not_published"),
    "checksums of the disk are skipped": (_DISK, "payload_checksum_skipped"),
    "another rank's record is accepted": (_DISK, "rank_forgotten_in_the_fingerprint"),
    "the namespace is not in the key": (_DISK, "secret_forgotten_in_the_fingerprint"),
    "roots go first": (_KV, "roots_go_before_leaves"),
    "blocks behind a gap are loaded": (_CORE, "what_comes_behind_a_gap_is_used"),
    "layers are read one group too early": (_CORE, "a_step_waits_for_the_group_before"),
    "the quota of fetches is off by one": (_CORE, "one_block_more_is_fetched_than_allowed"),
    "a join has no deadline": (_CORE, "a_fetch_has_no_deadline"),
    "a probe takes a claim": (_CORE, "a_probe_claims_what_it_finds"),
    "frames are taken before it is known what exists": (
        _CORE,
        "a_frame_is_taken_before_it_is_known_to_be_needed",
    ),
    "a refusal is not remembered": (_KV, "refused_blocks_are_not_remembered"),
    "the cleaner does not look at the generation again": (
        _KV,
        "a_block_that_changed_while_it_was_copied_counts",
    ),
    "a reservation is partial": (_CORE, "frames_of_a_refused_fetch_stay_claimed"),
    "an abort frees without a fence": (
        _CORE,
        "blocks_of_a_cancelled_pull_are_free_before_its_fence",
    ),
    "a hint to a dead life is followed": (_ROUTER, "every_source_is_a_first_life"),
    "a pinned block is evicted": (_CORE, "pins_do_not_keep_blocks"),
    "a table is trusted without its checksum": (_DISK, "table_trusted_without_checksum"),
    "an earlier use of a segment is believed": (_DISK, "epoch_not_checked"),
    "a full disk leaves frames reserved": (_CORE, "a_full_disk_keeps_the_frames_claimed"),
    "bytes of a failed job stay in their lane": (_KV, "bytes_of_failed_jobs_stay"),
    "ghosts have no bound": (_KV, "ghosts_have_no_bound"),
    "a partly filled block is shared": (_EXACT, "a_shared_partial_block"),
    "a salt is missing": (_EXACT, "salts_that_are_ignored"),
    "the write budget is overdrawn": (_KV, "the_write_budget_may_be_overdrawn"),
    "blocks that are sent are freed too early": (_FETCH, "release_before_done"),
    "blocks are used before all has come": (_FETCH, "use_before_all_has_come"),
}
"""The file of each planted bug, and its function there."""


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the functions of a test file."""
    tree = ast.parse((_TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_has_tests(failure: str) -> None:
    for shown in FAILURES[failure]:
        kind = shown.removeprefix("world ")
        if kind != shown:
            assert kind in KINDS | TIER_KINDS
        else:
            assert any(name.startswith("test_") for name in functions(shown)), shown


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_planted(bug: str) -> None:
    file, name = BUGS[bug]
    assert name in functions(file)
