"""A stream between two nodes of one process: what is sent arrives as it is.

    LocalStream   one node's end; implements `net.base.IncomingStream`
    LocalLane     what one node has sent to another, delivered in later turns of the event loop

It behaves as a stream of a link does: two halves that each end once; items in their order, and
none before the code that sent them has run; an abort that ends both. Its items are any objects.
Who sends one gives it away: only the reader may change it.

It knows neither nodes nor what the items mean. Each end is owned by the node that reads it, and
both by their `local_link`.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import LinkLost
from pdserve.wire.error_codec import error_of, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.net.base import StreamLink, StreamSink

__all__ = ["LocalLane", "LocalStream"]

_WINDOW: Final = 4096
"""Most items of one half that have not been read."""
_TURN: Final[Seconds] = 0.005
"""Time after which the rest waits for the next turn: what else the loop serves is not delayed for
longer, except by one item."""


class LocalLane:
    """What waits to arrive at one node from another."""

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], Seconds]
    ) -> None:
        """`clock` measures work within a turn, so the loop's own time will not do."""
        self._call_soon = call_soon
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()
        self._due = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, arrival: Callable[[], None]) -> None:
        """Calls `arrival` in a later turn, after those before it. It must not raise."""
        if not self._due:
            self._due = True
            self._call_soon(self._deliver)
        self._waiting.append(arrival)

    def drain(self) -> None:
        """Delivers all that was sent until now. What arrives may drain the lane itself."""
        for _ in range(len(self._waiting)):
            if not self._waiting:
                return
            self._waiting.popleft()()

    def _deliver(self) -> None:
        """Delivers what was sent until now, for `_TURN` at most; what this sends comes later."""
        waiting, clock = self._waiting, self._clock
        until = clock() + _TURN
        try:
            for _ in range(len(waiting)):
                if not waiting:
                    break  # what arrived has drained the lane
                waiting.popleft()()
                if clock() >= until:
                    break
        finally:
            self._due = bool(waiting)
            if waiting:
                self._call_soon(self._deliver)


class LocalStream:
    """One end of a stream. The other end is the same class at the other node."""

    __slots__ = (
        *("_blocked", "_ended", "_fail", "_granted", "_lane", "_other", "_over", "_sink"),
        *("_under_way", "link", "sending"),
    )

    def __init__(
        self,
        link: StreamLink,
        lane: LocalLane,
        fail: Callable[[LocalStream, Exception], None],
    ) -> None:
        """Args: `lane` leads to the other node; `fail` handles what a sink raises."""
        self.link = link
        self.sending = True
        """True while this end's half goes on."""
        self._lane = lane
        self._fail = fail
        self._other: LocalStream
        self._over: Callable[[], None] = lambda: None
        self._sink: StreamSink | None = None
        # True or the error once the sink gets nothing more.
        self._ended: BaseException | bool = False
        self._granted = False
        self._blocked = False
        self._under_way = 0

    @staticmethod
    def join(
        ours: LocalStream,
        theirs: LocalStream,
        sink: StreamSink,
        *,
        reads: bool,
        over: Callable[[], None],
    ) -> None:
        """Makes one stream of two ends. `reads`: the opener takes items. `over` is called when both
        halves have ended."""
        ours._other, theirs._other = theirs, ours
        ours._sink, theirs._granted = sink, reads
        ours._over = theirs._over = over

    # ------------------------------------------------------------------ reading

    def accept(self, sink: StreamSink, *, window: int = 0) -> None:
        """Reads the stream with `sink`. `window` 0: the opener sends nothing."""
        if self._sink is not None:
            raise RuntimeError("the stream was accepted before")
        self._sink = sink
        if self._ended:
            sink.on_end(None if self._ended is True else self._ended)
        elif window:
            self._other._granted = True
            self._lane.put(self._other._unblock)

    def _take(self, item: Any, last: bool) -> None:
        other = self._other
        other._under_way -= 1
        if other._blocked and 2 * other._under_way <= _WINDOW:
            other._blocked = False
            self._lane.put(other._unblock)
        if self._ended or self._sink is None:
            return
        try:
            self._sink.on_data(item)
        except Exception as error:
            self._fail(self, error)
        if last:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """The other half has ended, or the stream has failed; tells the sink once."""
        if error is not None:
            self._stop()
        if not self._ended:
            self._ended = True if error is None else error
            if self._sink is not None:
                self._sink.on_end(error)

    def lose(self, error: LinkLost) -> None:
        """Ends this end at once: a life of one of the nodes is over."""
        self._end(error)

    # ------------------------------------------------------------------ writing

    @property
    def sendable(self) -> bool:
        """As `net.base.ItemStream.sendable`."""
        return self.sending and self._granted and self._under_way < _WINDOW

    def try_send(self, body: Any, *, last: bool = False) -> bool:
        """Sends one item, which now belongs to the reader. False: nothing was sent. Errors:
        `LinkLost` (not sent) if this half has ended."""
        if not self.sending:
            raise LinkLost("this side of the stream has ended", sent=False)
        if not self._granted or self._under_way >= _WINDOW:
            self._blocked = True
            return False
        self._under_way += 1
        self._lane.put(partial(self._other._take, body, last))
        if last:
            self._stop()
        return True

    def end(self) -> None:
        """As `net.base.ItemStream.end`."""
        if self.sending:
            self._lane.put(partial(self._other._end, None))
            self._stop()

    def abort(self, error: BaseException) -> None:
        """As `net.base.ItemStream.abort`. The reader gets a copy of the error, as from another
        process."""
        if not self._ended:
            self._ended = True
        other = self._other
        if self.sending or other.sending:
            self._lane.put(partial(other._end, error_of(failure_of(error))))
        self._stop()

    def _stop(self) -> None:
        """This half has ended."""
        self.sending = False
        if not self._other.sending:
            self._over()

    def _unblock(self) -> None:
        if self._sink is not None and self.sending:
            try:
                self._sink.on_unblocked()
            except Exception as error:
                self._fail(self, error)
