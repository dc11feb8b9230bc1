"""Each alert fires when it must and only then, as Prometheus itself computes it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.dashboards import alerts as table
from pdserve.dashboards.alerts import Promise, alerts, recordings
from pdserve.dashboards.rules import render_rules
from pdserve.observe.metrics import Metrics
from tests.support.prometheus import promtool
from tests.support.promql import Reading, Registry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.dashboards.table import Alert

ROOT = Path(__file__).parents[2]
PROMISE = Promise()
ALERTS = {alert.name: alert for alert in alerts(PROMISE)}
REGISTRY = Registry(Metrics.definitions(), {one.name: one.expr for one in recordings(PROMISE)})


@dataclasses.dataclass(frozen=True)
class Case:
    """Series with a value per minute, and whether the alert fires at some minute."""

    alert: str
    title: str
    fires: bool
    minute: int
    series: dict[str, str]


def slo(good: str, bad: str) -> dict[str, str]:
    """Judged requests of one model."""
    labels = 'model="m", objective="both"'
    series = {f'pdserve_slo_total{{{labels}, result="good", cause=""}}': good}
    if bad:
        series[f'pdserve_slo_total{{{labels}, result="bad", cause="queue"}}'] = bad
    return series


def gauge(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {f"pdserve_{name}{{{inside}}}": values}


def tier(name: str, values: str) -> dict[str, str]:
    return gauge(f"kv_tier_{name}", values, instance="a", model="m", mode="decode", tier="disk")


def ready(values: str, instance: str = "a", model: str = "m") -> dict[str, str]:
    return gauge("engine_ready", values, instance=instance, model=model, mode="decode")


def load(running: str, waiting: str, instance: str = "a") -> dict[str, str]:
    of = {"instance": instance, "model": "m", "mode": "decode"}
    return gauge("num_requests_running", running, **of) | gauge(
        "num_requests_waiting", waiting, **of
    )


def pressure(usage: str, preemptions: str) -> dict[str, str]:
    of = {"instance": "a", "model": "m", "mode": "decode"}
    return gauge("kv_cache_usage_ratio", usage, **of) | gauge(
        "preemptions_total", preemptions, **of
    )


def queue(tokens: str, computed: str) -> dict[str, str]:
    return gauge("prefill_queue_tokens", tokens, role="router", model="m") | gauge(
        "computed_tokens_total", computed, model="m", mode="prefill"
    )


def hits(cached: str, prompts: str, requests: str) -> dict[str, str]:
    of = {"model": "m", "mode": "aggregated"}
    return (
        gauge("cached_prompt_tokens_total", cached, **of)
        | gauge("prompt_tokens_total", prompts, **of)
        | gauge("requests_total", requests, model="m", outcome="completed")
    )


def lag(slow: str) -> dict[str, str]:
    """100 turns of the event loop a minute, of which some took up to a second."""
    name = "event_loop_lag_seconds_bucket"
    counts = {"0.05": slow, "1.0": "0+100x60", "+Inf": "0+100x60"}
    series: dict[str, str] = {}
    for le, values in counts.items():
        series |= gauge(name, values, instance="a", le=le)
    return series


def degraded(reason: str, values: str = "1x90") -> dict[str, str]:
    return gauge("degraded", values, instance="a", reason=reason)


def spans(exported: str, dropped: str, reason: str = "undelivered") -> dict[str, str]:
    return gauge("trace_spans_exported_total", exported, instance="a") | gauge(
        "trace_spans_dropped_total", dropped, instance="a", reason=reason
    )


def members(*counts: str) -> dict[str, str]:
    series: dict[str, str] = {}
    for number, count in enumerate(counts):
        name = f"n{number}"
        series |= gauge("node_members", count, instance=name, role="worker", member="worker")
        series |= gauge("node_members", "1x30", instance=name, role="worker", member="router")
    return series


def planned(name: str, values: str, **labels: str) -> dict[str, str]:
    return gauge(f"planner_{name}", values, **{"instance": "p", "model": "m", **labels})


def least(ready: str, wanted: str = "2x30") -> dict[str, str]:
    serving = planned("workers", ready, mode="decode", state="ready")
    return serving | planned("least_workers", wanted)


def ended(values: str, action: str, result: str) -> dict[str, str]:
    return planned("changes_ended_total", values, action=action, result=result)


def exits(values: str, how: str) -> dict[str, str]:
    return gauge("agent_exits_total", values, instance="a", kind="gpu", how=how)


YESTERDAY = 1440
CASES = (
    Case("PdserveSloBurnFast", "a quarter is bad", True, 70, slo("0+15x90", "0+5x90")),
    Case("PdserveSloBurnFast", "a tenth is bad", False, 90, slo("0+18x90", "0+2x90")),
    Case("PdserveSloBurnFast", "all is good", False, 90, slo("0+20x90", "")),
    Case("PdserveSloBurnFast", "few requests", False, 90, slo("0+1x90", "0+1x90")),
    Case("PdserveSloBurnFast", "over", False, 80, slo("0+15x90", "0+5x60 300x30")),
    Case("PdserveSloBurnFast", "just begun", False, 2, slo("0+15x90", "0+5x90")),
    Case("PdserveSloBurn", "8 of 100 are bad", True, 60, slo("0+23x90", "0+2x90")),
    Case("PdserveSloBurn", "5 of 100 are bad", False, 90, slo("0+19x90", "0+1x90")),
    Case("PdserveSloBurn", "few requests", False, 90, slo("0+0.3x90", "0+0.3x90")),
    Case("PdserveSloBurnSlow", "4 of 100 are bad", True, 130, slo("0+24x180", "0+1x180")),
    Case("PdserveSloBurnSlow", "2 of 100 are bad", False, 180, slo("0+49x180", "0+1x180")),
    Case("PdserveSloBurnSlow", "few requests", False, 180, slo("0+0.05x180", "0+0.05x180")),
    Case("PdserveNoWorker", "the only one restarts", True, 13, ready("1x10 0x20")),
    Case("PdserveNoWorker", "the only one is gone", True, 19, ready("1x10 _x20")),
    Case("PdserveNoWorker", "one of two", False, 25, ready("1x10 0x20") | ready("1x30", "b")),
    Case(
        "PdserveNoWorker", "another model's", True, 25, ready("1x10 0x20") | ready("1x30", "b", "n")
    ),
    Case("PdserveNoWorker", "loads for the first time", False, 25, ready("0x30")),
    Case("PdserveWorkerNotReady", "loads for long", True, 17, ready("0x30")),
    Case("PdserveWorkerNotReady", "loads", False, 14, ready("0x30")),
    Case(
        "PdserveEngineRestarts",
        "five times",
        True,
        6,
        gauge("engine_restarts_total", "0 1 2 3 4 5x30", instance="a", model="m", mode="decode"),
    ),
    Case(
        "PdserveEngineRestarts",
        "twice",
        False,
        8,
        gauge("engine_restarts_total", "0 1 2x30", instance="a", model="m", mode="decode"),
    ),
    Case(
        "PdserveProcessRestarts",
        "three times",
        True,
        9,
        {'process_start_time_seconds{job="pdserve", instance="a"}': "1x2 2x2 3x2 4x20"},
    ),
    Case(
        "PdserveProcessRestarts",
        "an upgrade",
        False,
        9,
        {'process_start_time_seconds{job="pdserve", instance="a"}': "1x2 2x20"},
    ),
    Case(
        "PdserveEngineStalled",
        "no progress",
        True,
        5,
        gauge("engine_stalled_seconds", "0 0 8 68 128x20", instance="a", model="m"),
    ),
    Case(
        "PdserveEngineStalled",
        "was restarted between two scrapes",
        True,
        8,
        gauge("engine_stalls_total", "0x5 1x20", instance="a", model="m"),
    ),
    Case(
        "PdserveEngineStalled",
        "a long step",
        False,
        8,
        gauge("engine_stalled_seconds", "0 3 0 2 0x20", instance="a", model="m"),
    ),
    Case(
        "PdserveHeldWhileIdle",
        "one worker idles",
        True,
        5,
        gauge("num_requests_held", "3x20", model="m")
        | (ready("1x20") | load("0x20", "0x20"))
        | (ready("1x20", "b") | load("9x20", "2x20", "b")),
    ),
    Case(
        "PdserveHeldWhileIdle",
        "all work",
        False,
        9,
        gauge("num_requests_held", "3x20", model="m") | ready("1x20") | load("4x20", "0x20"),
    ),
    Case(
        "PdserveHeldWhileIdle",
        "the idle one is not ready",
        False,
        9,
        gauge("num_requests_held", "3x20", model="m")
        | (ready("0x20") | load("0x20", "0x20"))
        | (ready("1x20", "b") | load("9x20", "2x20", "b")),
    ),
    Case(
        "PdserveHeldWhileIdle",
        "another model's worker idles",
        False,
        9,
        gauge("num_requests_held", "3x20", model="m")
        | (ready("1x20", model="n") | load("0x20", "0x20"))
        | (ready("1x20", "b") | load("9x20", "2x20", "b")),
    ),
    Case(
        "PdserveHeldWhileIdle",
        "each finds a worker at once",
        False,
        9,
        gauge("num_requests_held", "0 1 0 2 0 1 0x20", model="m")
        | ready("1x20")
        | load("0x20", "0x20"),
    ),
    Case("PdservePrefillBacklog", "five seconds", True, 6, queue("50000x20", "0+600000x20")),
    Case("PdservePrefillBacklog", "nothing is computed", True, 6, queue("50000x20", "7x20")),
    Case("PdservePrefillBacklog", "one second", False, 9, queue("10000x20", "0+600000x20")),
    Case("PdservePrefillBacklog", "nothing waits", False, 9, queue("0x20", "7x20")),
    Case("PdserveKvPressure", "full, and preempts", True, 9, pressure("0.99x20", "0+20x20")),
    Case("PdserveKvPressure", "full", False, 9, pressure("0.99x20", "5x20")),
    Case("PdserveKvPressure", "preempts now and then", False, 9, pressure("0.9x20", "0+20x20")),
    Case(
        "PdserveHitRateFell",
        "a fifth of yesterday",
        True,
        YESTERDAY + 130,
        hits("0+50x1500 75000+10x200", "0+100x1800", "0+90x1800"),
    ),
    Case(
        "PdserveHitRateFell",
        "as yesterday",
        False,
        YESTERDAY + 130,
        hits("0+50x1800", "0+100x1800", "0+90x1800"),
    ),
    Case(
        "PdserveHitRateFell",
        "little traffic",
        False,
        YESTERDAY + 130,
        hits("0+50x1500 75000+10x200", "0+100x1800", "0+30x1800"),
    ),
    Case("PdserveKvTierTrouble", "a disk", True, 7, tier("trouble", "1x20")),
    Case("PdserveKvTierTrouble", "none", False, 9, tier("trouble", "0x20")),
    Case("PdserveKvTierTrouble", "for a minute", False, 5, tier("trouble", "1 1 0x20")),
    Case("PdserveKvTierFailures", "many", True, 10, tier("read_failures_total", "0+1x20")),
    Case("PdserveKvTierFailures", "one", False, 16, tier("read_failures_total", "0x5 1x20")),
    Case("PdserveKvTierTooSmall", "half a minute", True, 32, tier("retention_seconds", "30x60")),
    Case("PdserveKvTierTooSmall", "an hour", False, 40, tier("retention_seconds", "3600x60")),
    Case("PdserveKvTierTooSmall", "no evictions", False, 40, tier("retention_seconds", "0x60")),
    Case("PdservePlannerBelowLeast", "one of two", True, 25, least("2x5 1x30")),
    Case("PdservePlannerBelowLeast", "none is ready", True, 25, planned("least_workers", "2x30")),
    Case("PdservePlannerBelowLeast", "as many as must be", False, 25, least("2x30")),
    Case("PdservePlannerBelowLeast", "one restarts", False, 25, least("2x5 1x5 2x30")),
    Case("PdservePlannerBelowLeast", "nobody plans", False, 25, planned("workers", "0x30")),
    Case("PdservePlannerNoOwner", "it is gone", True, 25, planned("owner", "1x10 _x30")),
    Case("PdservePlannerNoOwner", "it lets go", True, 20, planned("owner", "1x10 0x30")),
    Case(
        "PdservePlannerNoOwner",
        "another one has taken over",
        False,
        25,
        planned("owner", "1x10 _x30") | planned("owner", "0x11 1x30", instance="q"),
    ),
    Case("PdservePlannerNoOwner", "it was never owned", False, 25, planned("owner", "0x30")),
    Case("PdservePlannerBlind", "blind", True, 7, planned("blind", "1x30")),
    Case("PdservePlannerBlind", "for a minute", False, 9, planned("blind", "0x2 1 0x30")),
    Case("PdservePlannerChangesFail", "starts", True, 20, ended("0x5 1 2 3x30", "start", "failed")),
    Case(
        "PdservePlannerChangesFail", "switches", True, 20, ended("0x5 1 2 3x30", "mode", "given_up")
    ),
    Case("PdservePlannerChangesFail", "one start", False, 20, ended("0x5 1x30", "start", "failed")),
    Case(
        "PdservePlannerChangesFail",
        "starts that were withdrawn",
        False,
        20,
        ended("0x5 1 2 3 4x30", "start", "given_up"),
    ),
    Case(
        "PdservePlannerStartStuck",
        "never ready",
        True,
        45,
        planned("oldest_change_seconds", "0+60x60", action="start"),
    ),
    Case(
        "PdservePlannerStartStuck",
        "a long load",
        False,
        45,
        planned("oldest_change_seconds", "0+60x20 _x40", action="start"),
    ),
    Case(
        "PdservePlannerStartStuck",
        "a drain",
        False,
        45,
        planned("oldest_change_seconds", "0+60x60", action="stop"),
    ),
    Case(
        "PdservePlannerUnreachable",
        "a tenth",
        True,
        32,
        planned("miss_share", "0.1x60", when="unreachable"),
    ),
    Case(
        "PdservePlannerUnreachable",
        "one of a thousand",
        False,
        50,
        planned("miss_share", "0.001x60", when="unreachable"),
    ),
    Case(
        "PdservePlannerUnreachable",
        "workers would help",
        False,
        50,
        planned("miss_share", "0.5x60", when="before"),
    ),
    Case("PdserveAgentWorkersFail", "three fail", True, 20, exits("0x5 1 2 3x30", "failed")),
    Case("PdserveAgentWorkersFail", "one fails", False, 20, exits("0x5 1x30", "failed")),
    Case("PdserveAgentWorkersFail", "as ordered", False, 20, exits("0x5 1 2 3 4x30", "ended")),
    Case("PdserveSplitView", "one sees fewer", True, 6, members("3x30", "3x30", "1x30")),
    Case("PdserveSplitView", "all see the same", False, 9, members("3x30", "3x30", "3x30")),
    Case("PdserveSplitView", "one comes", False, 9, members("3x6 4x20", "3x7 4x20")),
    Case("PdservePredictionPoor", "poor", True, 7, degraded("prediction_poor")),
    Case("PdservePredictionPoor", "for a minute", False, 4, degraded("prediction_poor", "1 0x20")),
    Case("PdserveTransferDegraded", "slower", True, 7, degraded("kv_transfer")),
    Case("PdserveTransferDegraded", "another reason", False, 9, degraded("prediction_poor")),
    Case("PdserveModelConflict", "conflict", True, 7, degraded("model_conflict")),
    Case("PdserveModelConflict", "another reason", False, 9, degraded("kv_transfer")),
    Case("PdserveHashSecrets", "differ", True, 7, degraded("hash_secrets_differ")),
    Case("PdserveHashSecrets", "missing", True, 7, degraded("hash_secret_missing")),
    Case("PdserveHashSecrets", "another reason", False, 9, degraded("kv_transfer")),
    Case("PdserveDegraded", "another reason", True, 32, degraded("kv_reduced")),
    Case("PdserveDegraded", "one with an alert of its own", False, 60, degraded("kv_transfer")),
    Case("PdserveDegraded", "of a pair", False, 60, degraded("decode_kv_tier_trouble")),
    Case("PdserveDegraded", "another of a pair", True, 32, degraded("decode_kv_tiers")),
    Case(
        "PdserveTopicDivergence",
        "one",
        True,
        7,
        gauge("node_topic_events_total", "0x5 1x20", role="router", event="divergences"),
    ),
    Case(
        "PdserveTopicDivergence",
        "gaps mend themselves",
        False,
        7,
        gauge("node_topic_events_total", "0x5 1x20", role="router", event="gaps"),
    ),
    Case("PdserveLoopLag", "3 of 100 are slow", True, 12, lag("0+97x60")),
    Case("PdserveLoopLag", "1 of 200 is slow", False, 30, lag("0+99.5x60")),
    Case("PdserveSpansDropped", "no collector", True, 25, spans("0x60", "0+5x60")),
    Case("PdserveSpansDropped", "one of ten", True, 25, spans("0+90x60", "0+10x60")),
    Case("PdserveSpansDropped", "one of a thousand", False, 40, spans("0+999x60", "0+1x60")),
    Case("PdserveSpansDropped", "at an end", False, 40, spans("0x60", "0+9x60", "shutdown")),
    Case("PdserveScrapeDown", "no answer", True, 12, {'up{job="pdserve", instance="a"}': "0x30"}),
    Case("PdserveScrapeDown", "answers", False, 12, {'up{job="pdserve", instance="a"}': "1x30"}),
    Case("PdserveScrapeDown", "another job", False, 12, {'up{job="node", instance="a"}': "0x30"}),
)


def suite(cases: Iterable[Case], rules: Path) -> dict[str, Any]:
    """promtool's tests: whether one of the alert fires."""
    return {
        "rule_files": [str(rules)],
        # A day of minutes takes long.
        "evaluation_interval": "10m" if any(case.minute > YESTERDAY for case in cases) else "1m",
        "tests": [
            {
                "name": f"{case.alert}: {case.title}",
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in case.series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{case.alert}", alertstate="firing"}})',
                        "eval_time": f"{case.minute}m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if case.fires else [],
                    }
                ],
            }
            for case in cases
        ],
    }


def failures(folder: Path, rules: Iterable[Alert]) -> str:
    """What promtool says of rules under their cases; empty if all is as it should be."""
    files = []
    for alert in rules:
        needed = [one for one in recordings(PROMISE) if one.name in alert.expr]
        own = folder / f"{alert.name}.rules.yml"
        own.write_text(render_rules(needed, [alert]))
        files.append(folder / f"{alert.name}.tests.yml")
        cases = [case for case in CASES if case.alert == alert.name]
        files[-1].write_text(json.dumps(suite(cases, own)))
    done = promtool("test", "rules", *files)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_rule_file_is_sound(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(render_rules(recordings(PROMISE), ALERTS.values()))
    done = promtool("check", "rules", rules)
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS) + len(recordings(PROMISE))} rules found" in done.stdout


def test_alerts_fire_when_they_must_and_only_then(tmp_path: Path) -> None:
    assert failures(tmp_path, ALERTS.values()) == ""


def test_every_alert_has_both_kinds_of_cases() -> None:
    kinds = Counter((case.alert, case.fires) for case in CASES)
    assert set(kinds) == {(name, fires) for name in ALERTS for fires in (True, False)}


@pytest.mark.parametrize("name", ["PdserveSloBurnFast", "PdserveKvPressure"])
def test_a_rule_without_its_last_condition_is_found(name: str, tmp_path: Path) -> None:
    """Few requests, or a full cache alone, must not fire."""
    expr = ALERTS[name].expr.rpartition("\nand ")[0]
    assert "FAILED" in failures(tmp_path, [dataclasses.replace(ALERTS[name], expr=expr)])


@pytest.mark.long
@pytest.mark.parametrize("always", [True, False])
def test_rules_that_always_or_never_fire_are_found(always: bool, tmp_path: Path) -> None:
    expr = f"vector(1) > {0 if always else 1}"
    for alert in ALERTS.values():
        planted = dataclasses.replace(alert, expr=expr, hold="0s")
        assert "FAILED" in failures(tmp_path, [planted]), alert.name


def test_every_metric_and_label_exists() -> None:
    exprs = [one.expr for one in ALERTS.values()] + [one.expr for one in recordings(PROMISE)]
    assert [problem for expr in exprs for problem in REGISTRY.problems(expr)] == []


def test_operands_are_parts_that_name_all_metrics() -> None:
    for alert in ALERTS.values():
        whole = " ".join(alert.expr.split())
        assert [one for one in alert.operands if " ".join(one.split()) not in whole] == []
        named = {one.metric for text in alert.operands for one in Reading(text).selectors}
        assert named == {one.metric for one in Reading(alert.expr).selectors}, alert.name


def test_every_alert_has_a_runbook() -> None:
    page = (ROOT / "docs/observability.md").read_text(encoding="utf-8")
    runbooks = re.findall(r"^### (Pdserve\w+)\n\n(.+?)(?=\n#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in runbooks] == list(ALERTS)
    short = [name for name, text in runbooks if len(text.split()) < 15]
    assert short == [], "say what to look at, and what to do"


def test_reasons_with_an_alert_exist() -> None:
    """Degradations are reported under exactly these names, and documented."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    tree = "\n".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "pdserve").rglob("*.py")
        if "dashboards" not in path.parts
    )
    for reason in table.OWN_ALERTS:
        assert f'"{reason}"' in tree
        assert f"| `{reason}` |" in page


@pytest.mark.parametrize(
    ("objective", "fast", "slow"),
    [(0.99, "0.144", "0.03"), (0.999, "0.0144", "0.003"), (0.9, "0.9", "0.3"), (0.5, "0.9", "0.9")],
)
def test_thresholds_follow_the_objective(objective: float, fast: str, slow: str) -> None:
    expr = {alert.name: alert.expr for alert in alerts(Promise(objective))}
    assert f"> {fast}\n" in expr["PdserveSloBurnFast"]
    assert f"> {slow}\n" in expr["PdserveSloBurnSlow"]
