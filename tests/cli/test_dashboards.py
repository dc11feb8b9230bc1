"""`pdserve dashboards`: which files it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from pdserve.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Sequence

BOARDS = {
    f"boards/{name}.json" for name in ("service", "workers", "disaggregation", "routers", "planner")
}


def written(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_written_and_named(tmp_path, capsys):
    assert main(["dashboards", "--out", str(tmp_path)]) == 0
    assert written(tmp_path) == BOARDS | {"rules.yml", "prometheus.yml"}
    names = capsys.readouterr().out.splitlines()
    assert {Path(name).relative_to(tmp_path).as_posix() for name in names} == written(tmp_path)
    assert (tmp_path / "targets").is_dir()  # Prometheus watches no folder that comes later


@pytest.mark.parametrize(
    ("flag", "files"), [("--boards-only", BOARDS), ("--rules-only", {"rules.yml"})]
)
def test_a_part_can_be_written(tmp_path, flag, files):
    assert main(["dashboards", "--out", str(tmp_path / "new"), flag]) == 0
    assert written(tmp_path / "new") == files
    assert not (tmp_path / "new/targets").exists()


def test_flags_arrive_in_the_files(tmp_path):
    flags = ["--slo-objective", "99.9%", "--slo-ttft", "500ms", "--runbooks", "https://wiki/p"]
    targets = ["--target", "10.0.0.1:8000", "--target", "[::1]:9001", "--cluster", "prod"]
    assert main(["dashboards", "--out", str(tmp_path), *flags, *targets]) == 0
    groups = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"]
    rules = {
        rule.get("alert", rule.get("record")): rule for group in groups for rule in group["rules"]
    }
    assert rules["pdserve:error_budget"]["expr"].strip() == "vector(0.001)"
    assert rules["PdservePrefillBacklog"]["expr"].strip().endswith("> 0.5")
    url = "https://wiki/p#pdservenoworker"
    assert rules["PdserveNoWorker"]["annotations"]["runbook_url"] == url
    (scrape,) = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [
        {"targets": ["10.0.0.1:8000", "[::1]:9001"], "labels": {"cluster": "prod"}}
    ]


def test_what_was_edited_stays(tmp_path, capsys):
    main(["dashboards", "--out", str(tmp_path)])
    edited = tmp_path / "prometheus.yml"
    edited.write_text(edited.read_text().replace("15s", "5s"))
    assert main(["dashboards", "--out", str(tmp_path), "--slo-objective", "95%"]) == 2
    assert "prometheus.yml was edited" in capsys.readouterr().err
    assert "5s" in edited.read_text()
    assert "vector(0.01)" in (tmp_path / "rules.yml").read_text()
    assert main(["dashboards", "--out", str(tmp_path), "--rules-only", "--slo-objective=95%"]) == 0


REFUSED: tuple[tuple[Sequence[str], str], ...] = (
    ((), "--out DIR is missing"),
    (("--out", "x", "--boards-only", "--rules-only"), "exclude each other"),
    (("--out", "x", "--slo-objective", "much"), "--slo-objective: 'much' is not a share"),
    (("--out", "x", "--slo-objective", "100%"), "give a share from 50% to 99.999%"),
    (("--out", "x", "--slo-objective", "20%"), "give a share from 50% to 99.999%"),
    (("--out", "x", "--slo-ttft", "0s"), "--slo-ttft: '0s' must be more than 0"),
    (("--out", "x", "--slo-ttft", "500"), "'500' has no unit: write 500ms or 500s"),
    (("--out", "x", "--slo-ttft", "2s@p95"), "give the share of requests by --slo-objective"),
    (("--out", "x", "--slo-ttft", "soon"), "--slo-ttft: 'soon' is not a duration"),
    (("--out", "x", "--target", "http://a:1"), "give HOST:PORT, without http://"),
    (("--out", "x", "--target", "a"), "give HOST:PORT"),
    (("--out", "x", "--runbooks", "http://x/{{ end }}"), "give a URL without blanks and braces"),
    (("--out", "x", "--cluster", "a\nb"), "--cluster: give a name of printable characters"),
    (("--out", "x", "--cluster", "a\udcff"), "--cluster: give a name of printable characters"),
    (("--outt", "x"), "did you mean --out?"),
)


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["dashboards", *flags]) == 2
    assert message in capsys.readouterr().err
    assert written(tmp_path) == set()
