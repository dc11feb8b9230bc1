"""Block memory: what one process writes another can read; nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdserve.errors import ConfigError
from pdserve.kv.storage import BlockMemory, attach

READER = """
import sys
from pdserve.kv.storage import MemoryExport, attach
fd, size, block_bytes, block = map(int, sys.argv[1:])
memory = attach(MemoryExport(fd, size, block_bytes, (), 1))
sys.stdout.buffer.write(memory[block * block_bytes : (block + 1) * block_bytes])
memory[:4] = b"back"
"""


@pytest.fixture
def memory():
    memory = BlockMemory(6, (2, 2, 4, 8, 2), 4)
    yield memory
    memory.close()


def test_blocks_are_contiguous_runs_in_order(memory: BlockMemory):
    assert memory.block_bytes == 2 * 2 * 4 * 8 * 2 * 4
    assert memory.size == 6 * memory.block_bytes
    memory.view(2)[:] = b"\x07" * memory.block_bytes
    everything = memory.view()
    assert everything.nbytes == memory.size
    assert set(everything[: 2 * memory.block_bytes]) == {0}
    assert set(everything[2 * memory.block_bytes : 3 * memory.block_bytes]) == {7}


def test_a_block_is_copied_whole(memory: BlockMemory):
    memory.view(1)[:] = os.urandom(memory.block_bytes)
    memory.copy(1, 5)
    assert memory.view(5) == memory.view(1)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")
def test_another_process_sees_a_blocks_bytes(memory: BlockMemory):
    content = os.urandom(memory.block_bytes)
    memory.view(3)[:] = content
    export = memory.export()
    assert export.layout == (2, 2, 4, 8, 2)
    seen = subprocess.run(
        [sys.executable, "-c", READER]
        + [str(n) for n in (export.fd, export.size, export.block_bytes, 3)],
        pass_fds=(export.fd,),
        stdout=subprocess.PIPE,
        check=True,
        timeout=30,
    ).stdout
    assert seen == content
    assert bytes(memory.view(0)[:4]) == b"back"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")
def test_a_peer_cannot_truncate_what_it_was_given(memory: BlockMemory):
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.export().fd, 1)


def test_closing_twice_is_fine_and_views_outlive_it(memory: BlockMemory):
    view = memory.view(0)
    memory.close()
    memory.close()
    view[:1] = b"x"
    with pytest.raises(ValueError, match="closed"):
        memory.view()


def test_without_memfd_it_is_anonymous_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(os, "memfd_create")
    memory = BlockMemory(1, (16,))
    assert memory.backing == "anonymous"
    assert "cannot be shared" in caplog.text
    memory.view(0)[:] = b"\x01" * 16
    with pytest.raises(ConfigError, match="cannot be exported"):
        memory.export()
    memory.close()


def test_more_memory_than_there_is_names_the_flag():
    with pytest.raises(ConfigError, match="--kv-memory"):
        BlockMemory(1 << 30, (1 << 30,))
    with pytest.raises(ValueError, match="empty"):
        BlockMemory(0, (4,))


def test_a_missing_block_is_an_index_error(memory: BlockMemory):
    for block in (-1, 6):
        with pytest.raises(IndexError):
            memory.view(block)


def test_an_attached_memory_is_the_same_memory(memory: BlockMemory):
    with attach(memory.export()) as other:
        other[:3] = b"abc"
    assert bytes(memory.view(0)[:3]) == b"abc"
