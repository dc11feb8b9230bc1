"""Results come from the device's own stream; a device is played by the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pdserve_engines.torch.models import download
from pdserve_engines.torch.models.download import Download

if TYPE_CHECKING:
    import pytest


def test_the_cpu_copies_nothing() -> None:
    tensor = torch.arange(3)
    assert Download([tensor]).wait()[0] is tensor


def test_the_copies_are_waited_for_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the thread's current one: with a GPU for each rank they may differ."""
    calls: list[Any] = []
    event = SimpleNamespace(
        record=lambda stream: calls.append(("record", stream)),
        synchronize=lambda: calls.append("synchronize"),
    )
    host: Any = SimpleNamespace(copy_=lambda tensor, non_blocking: calls.append("copy"))
    played = SimpleNamespace(
        empty=lambda shape, dtype, pin_memory: host,
        cuda=SimpleNamespace(
            Event=lambda: event, current_stream=lambda device: f"stream of {device}"
        ),
    )
    monkeypatch.setattr(download, "torch", played)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 1), shape=(3,), dtype=torch.int64)
    found = Download([tensor, tensor])
    assert calls == ["copy", "copy", ("record", "stream of cuda:1")]
    assert found.wait() == [host, host]
    assert calls[-1] == "synchronize"
