from pdserve.cli.top import frame


def test_a_frame_draws_over_the_last_one():
    drawn = frame("one\ntwo", (80, 24))
    assert drawn == "\x1b[Hone\x1b[K\ntwo\x1b[K\n\x1b[K\nq or Ctrl-C ends\x1b[J"


def test_a_frame_never_scrolls():
    drawn = frame("\n".join(f"line {i}" for i in range(100)), (20, 10))
    assert drawn.count("\n") < 10
    assert "line 6" in drawn
    assert "line 7" not in drawn
    assert "… 93 more lines" in drawn


def test_long_lines_are_cut():
    drawn = frame("x" * 200, (20, 10))
    assert "x" * 19 in drawn
    assert "x" * 20 not in drawn
