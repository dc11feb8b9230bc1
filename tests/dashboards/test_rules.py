"""Rule files and configurations are YAML that says what the tables say."""

from __future__ import annotations

import yaml

from pdserve.dashboards.alerts import Promise, alerts, recordings
from pdserve.dashboards.files import untouched
from pdserve.dashboards.rules import render_prometheus, render_rules
from tests.support.prometheus import promtool

ALERTS, RECORDINGS = alerts(Promise()), recordings(Promise())


def test_a_rule_file_says_what_the_table_says() -> None:
    text = render_rules(RECORDINGS, ALERTS)
    assert untouched(text)
    (group,) = yaml.safe_load(text)["groups"]
    recorded, alerting = group["rules"][: len(RECORDINGS)], group["rules"][len(RECORDINGS) :]
    assert [(rule["record"], rule["expr"].strip()) for rule in recorded] == [
        (one.name, one.expr) for one in RECORDINGS
    ]
    for rule, alert in zip(alerting, ALERTS, strict=True):
        assert rule["alert"] == alert.name
        assert rule["expr"].strip() == alert.expr
        assert rule["for"] == alert.hold
        assert rule["labels"] == {"severity": alert.severity}
        assert rule["annotations"]["summary"] == alert.summary
        assert rule["annotations"]["description"] == alert.description


def test_names_with_quotes_stay_names(tmp_path) -> None:
    text = render_prometheus(["a:1"], 'our "cluster": 1 # one')
    (scrape,) = yaml.safe_load(text)["scrape_configs"]
    assert scrape["static_configs"][0]["labels"] == {"cluster": 'our "cluster": 1 # one'}


def test_prometheus_takes_the_configuration(tmp_path) -> None:
    (tmp_path / "rules.yml").write_text(render_rules(RECORDINGS, ALERTS))
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets/slurm.json").write_text('[{"targets": ["b:2"]}]')
    config = tmp_path / "prometheus.yml"
    config.write_text(render_prometheus(["a:1", "[::1]:9001"], "c"))
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout
