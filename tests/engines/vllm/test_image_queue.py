"""Images are read beside the core's thread, in order, and what was dropped is forgotten."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import InvalidRequest, Overloaded, StepFailed
from pdserve_engines.vllm.image_queue import ImageQueue
from pdserve_engines.vllm.image_reader import ReadPrompt
from tests.engines.vllm.test_core import request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.request import GenerateRequest


class Reader:
    """Reads when it is let; the second token of a prompt says what comes of it."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.read: list[int] = []

    def __call__(self, request: GenerateRequest) -> ReadPrompt:
        self.begun.release()
        assert self.let.acquire(timeout=10.0)
        number = request.prompt[0]
        self.read.append(number)
        if number == 7:
            raise InvalidRequest("no picture")
        if number == 8:
            raise KeyError("pixel_values")
        return ReadPrompt(request, [], (number,), 0)


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def told() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def queue(reader: Reader, told: threading.Semaphore) -> Iterator[ImageQueue]:
    queue = ImageQueue(reader, told.release)
    yield queue
    reader.let.release(100)
    queue.close()
    queue.close()


def test_requests_are_read_in_order(
    queue: ImageQueue, reader: Reader, told: threading.Semaphore
) -> None:
    for handle in (1, 2, 3):
        queue.submit(handle, request((handle, 5), n=2), now=handle / 10)
    assert (len(queue), queue.live(), queue.ready, queue.take()) == (3, 6, False, [])
    reader.let.release(2)
    assert told.acquire(timeout=10.0)
    assert told.acquire(timeout=10.0)
    assert queue.ready
    assert [(h, now, read.tokens) for h, now, read in queue.take()] == [  # type: ignore[union-attr]
        (1, 0.1, (1,)),
        (2, 0.2, (2,)),
    ]
    assert (len(queue), queue.ready) == (1, False)


def test_what_was_dropped_is_neither_read_nor_taken(
    queue: ImageQueue, reader: Reader, told: threading.Semaphore
) -> None:
    for handle in (1, 2, 3):
        queue.submit(handle, request((handle, 5)), now=0.0)
    assert reader.begun.acquire(timeout=10.0)  # the first one
    assert queue.drop(1)
    assert queue.drop(2)
    assert not queue.drop(9)
    reader.let.release(3)
    assert told.acquire(timeout=10.0)
    assert told.acquire(timeout=10.0)
    assert [handle for handle, _, _ in queue.take()] == [3]
    assert reader.read == [1, 3]


def test_a_failure_ends_one_request(
    queue: ImageQueue, reader: Reader, told: threading.Semaphore
) -> None:
    for handle in (7, 8, 9):
        queue.submit(handle, request((handle, 5)), now=0.0)
    reader.let.release(3)
    for _ in range(3):
        assert told.acquire(timeout=10.0)
    refused, failed, read = (result for _, _, result in queue.take())
    assert isinstance(refused, InvalidRequest)
    assert isinstance(failed, StepFailed)
    assert "KeyError" in str(failed)
    assert isinstance(read, ReadPrompt)


def test_files_that_wait_are_bounded(told: threading.Semaphore) -> None:
    reader = Reader()
    queue = ImageQueue(reader, told.release, most=100)
    queue.submit(1, request((1, 5), images=(bytes(300),)), now=0.0)  # alone, whatever it has
    with pytest.raises(Overloaded, match="too many images wait"):
        queue.submit(2, request((2, 5), images=(b"x",)), now=0.0)
    assert queue.drop(1)
    queue.submit(3, request((3, 5), images=(bytes(60),)), now=0.0)
    queue.submit(4, request((4, 5), images=(bytes(40),)), now=0.0)
    with pytest.raises(Overloaded):
        queue.submit(5, request((5, 5), images=(b"x",)), now=0.0)
    reader.let.release(3)
    for _ in range(2):
        assert told.acquire(timeout=10.0)
    while len(queue) > 1:
        queue.take()
    queue.submit(6, request((6, 5), images=(b"x",)), now=0.0)
    reader.let.release(9)
    queue.close()


def test_no_more_is_read_than_the_engine_begins(told: threading.Semaphore) -> None:
    reader = Reader()
    reader.let.release(100)
    queue = ImageQueue(reader, told.release, ahead=2)
    for handle in (1, 2, 3, 7, 5, 6):  # the seventh is refused
        queue.submit(handle, request((handle, 5)), now=0.0)
    for _ in range(2):
        assert told.acquire(timeout=10.0)
    assert [handle for handle, _, _ in queue.take()] == [1, 2]
    assert not told.acquire(timeout=0.05)
    queue.begun(1)
    queue.begun(1)
    queue.begun(99)
    assert told.acquire(timeout=10.0)
    assert not told.acquire(timeout=0.05)
    assert queue.drop(5)
    assert not queue.drop(2), "it was taken, and is ahead no more"
    assert told.acquire(timeout=10.0)
    assert [handle for handle, _, _ in queue.take()] == [3, 7]
    assert told.acquire(timeout=10.0), "a refused one is not ahead"
    assert [handle for handle, _, _ in queue.take()] == [6]
    assert reader.read == [1, 2, 3, 7, 6]
    queue.close()
