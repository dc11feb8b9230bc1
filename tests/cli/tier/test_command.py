"""`pdserve tier`, as it is typed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.cli.main import main
from pdserve.cli.tier import command
from pdserve.ids import NodeId
from pdserve.launch import exit_codes
from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport, TierReport
from tests.cli.tier.test_survey import flip, segments, stored

if TYPE_CHECKING:
    from pathlib import Path


def tier(*arguments: str) -> int:
    return main(["tier", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the following arguments are required: ACTION"),
        (("inspct",), "'inspct' is unknown, did you mean 'inspect'?"),
        (("empty",), "'empty' is unknown: use one of status, inspect, verify, drop, warm"),
        (("status", "/kv"), "status takes no directory"),
        (("inspect",), "name the directory of --disk-kv: pdserve tier inspect DIR"),
        (("verify", "/no/such/folder"), "/no/such/folder cannot be read: No such file"),
        (("drop",), "say what is to be forgotten"),
        (("warm",), "there is no prompt to send"),
        (("warm", "--prompt", "/dev/null"), "/dev/null is empty"),
    ],
)
def test_what_is_typed_wrongly_is_explained(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tier(*arguments) == exit_codes.USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("text", "says"), [("2d", "a day is the most"), ("x", "--ttl: 'x' is")])
def test_a_wish_is_bounded(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p").write_text("hello")
    assert tier("warm", "--prompt", str(tmp_path / "p"), "--ttl", text) == exit_codes.USAGE
    assert says in capsys.readouterr().err


def test_a_directory_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tier("inspect", str(tmp_path)) == exit_codes.OK
    assert capsys.readouterr().out == "no worker has stored KV here\n"
    part = stored(tmp_path)
    assert tier("inspect", str(tmp_path)) == exit_codes.OK
    heads, row = capsys.readouterr().out.splitlines()
    assert heads.split()[:5] == ["PART", "OWNER", "STATE", "MODEL", "DTYPE"]
    assert row.startswith(f"{part.name}  a      free   model  bfloat16  1/1   20 ")
    assert "3 (3 sealed)" in row
    assert tier("inspect", str(tmp_path), "--json") == exit_codes.OK
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["name"], told["records"]) == (part.name, 20)
    assert told["fingerprint"]["secret_id"] == b"secret-1".hex()


def test_a_part_of_another_release_is_a_row_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored(tmp_path) / "TIER").write_text("{}")
    assert tier("inspect", str(tmp_path)) == exit_codes.OK
    assert "of another release" in capsys.readouterr().out
    assert tier("verify", str(tmp_path)) == exit_codes.OK
    assert "of another release, not read" in capsys.readouterr().out


def test_damage_is_told_and_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = stored(tmp_path)
    assert tier("verify", str(tmp_path)) == exit_codes.OK
    assert f"{part.name}: 20 blocks are whole (97.7 KiB, " in capsys.readouterr().out
    flip(segments(part)[0], 8192 + 5)
    assert tier("verify", str(tmp_path)) == exit_codes.FAILED
    out = capsys.readouterr().out
    assert "19 blocks are whole" in out
    assert "; 1 do not match their checksum" in out
    assert tier("verify", str(tmp_path), "--json") == exit_codes.FAILED
    assert json.loads(capsys.readouterr().out)[part.name]["bad"] == {"crc": 1}


class Reach:
    """A cluster, played."""

    def __init__(self, *tiers: TierReport) -> None:
        self.tiers = tiers

    def client(self) -> Reach:
        return self

    async def status(self) -> ClusterStatus:
        worker: Any = MemberStatus(
            node=NodeId("w1"), role="worker", epoch=1, report=NodeReport(tiers=self.tiers)
        )
        return ClusterStatus(cluster="c", asked=NodeId("r"), now=0.0, members=(worker,))

    async def close(self) -> None:
        pass


def test_the_tiers_of_a_cluster_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = TierReport(name="disk", capacity=1 << 30, valid=1 << 29, retention=600.0)
    monkeypatch.setattr(command, "reach_of", lambda parsed: Reach(disk))
    assert tier("status") == exit_codes.OK
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == [
        *("w1", "disk", "1.0", "GiB", "50%", "10min"),
    ]
    assert tier("status", "--json") == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["w1"][0]["retention"] == 600.0
    monkeypatch.setattr(command, "reach_of", lambda parsed: Reach())
    assert tier("status") == exit_codes.OK
    assert capsys.readouterr().out == "no worker has KV tiers below its device\n"
    assert tier("status", "--json") == exit_codes.OK
    assert capsys.readouterr().out == "{}\n"
