"""Which adapters of a machine are opened; played, since few machines have any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import TransferError
from pdserve.ids import Epoch, NodeId
from pdserve.transfer.rdma import adapters, pyverbs_loader
from pdserve.transfer.rdma.transport import RdmaTransport

if TYPE_CHECKING:
    from pdserve.transfer.rdma.negotiate import DeviceName


class PlayedAdapter:
    """mlx5_1 has no cable."""

    def __init__(self, verbs: Any, name: DeviceName) -> None:
        self.name = name
        if name.name == "mlx5_1":
            reason = "the port is in state 1, not active"
            raise TransferError.at("", f"{name} over rdma", "open", reason)

    def register(self, *_: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of its adapters."""
    names: list[str] = []
    monkeypatch.setattr(adapters, "Adapter", PlayedAdapter)
    monkeypatch.setattr(pyverbs_loader, "load_pyverbs", lambda: None)
    monkeypatch.setattr(pyverbs_loader, "adapter_names", lambda: names)
    return names


def opened(*devices: str) -> list[str]:
    async def ask(*_: object) -> Any:
        raise AssertionError("nobody is asked")

    made = RdmaTransport(NodeId("p"), Epoch(1), [], ask, devices=devices)
    made._adapters.open()
    return [adapter.name.name for adapter in made.adapters]


def test_an_adapter_without_a_cable_is_left_out(machine: list[str]) -> None:
    machine += ["mlx5_0", "mlx5_1", "mlx5_2"]
    assert opened() == ["mlx5_0", "mlx5_2"]


def test_one_that_was_named_must_work(machine: list[str]) -> None:
    machine += ["mlx5_0", "mlx5_1"]
    assert opened("mlx5_0") == ["mlx5_0"]
    with pytest.raises(TransferError, match="not active"):
        opened("mlx5_0", "mlx5_1")


def test_if_none_can_be_used_the_reason_is_told(machine: list[str]) -> None:
    machine += ["mlx5_1"]
    with pytest.raises(TransferError, match="not active"):
        opened()
