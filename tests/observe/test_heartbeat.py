"""The page in which a core shows that it gets on."""

from __future__ import annotations

import os
import time

from pdserve.observe.heartbeat import HeartbeatPage


def test_every_sign_of_progress_is_a_tick():
    page = HeartbeatPage.in_memory()
    seen = [page.look().ticks]
    for act in (
        page.tick,
        lambda: page.tick(5),
        lambda: page.heard(2),
        page.compute,
        lambda: page.rest(None),
        lambda: page.rest(1.0),
    ):
        act()
        seen.append(page.look().ticks)
    assert seen == sorted(set(seen))
    assert page.look().heard == 2


def test_it_says_what_the_core_is_doing_and_until_when():
    page = HeartbeatPage.in_memory()
    assert page.look().what == "loading"
    page.heard(1)
    assert page.look().what == "taking commands"
    page.compute()
    page.compute()
    assert (page.look().what, page.look().due) == ("step 2", 0.0)
    page.tick(7)
    assert page.look().what == "step 2, after layer 7"
    page.rest(5.0)
    assert page.look().what == "its sleep"
    assert 4.0 < page.look().due - time.monotonic() <= 5.0
    page.rest(None)
    assert page.look().due > time.monotonic() + 1e6
    page.compute()
    assert (page.look().what, page.look().due) == ("step 3", 0.0)


def test_both_sides_see_one_page():
    ours = HeartbeatPage.create()
    assert ours.fd is not None
    theirs = HeartbeatPage.attach(os.dup(ours.fd))
    ours.close_fd()
    theirs.tick()
    assert ours.look() == theirs.look()
    theirs.close()
    last = ours.look()
    ours.close()
    ours.close()
    assert ours.look() == last


def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        page = HeartbeatPage.create()
        assert page.fd is not None
        other = HeartbeatPage.attach(os.dup(page.fd))
        page.close()
        other.close()
    assert len(os.listdir("/proc/self/fd")) == before
