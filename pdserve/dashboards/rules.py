"""Renders recorded expressions and alerts as a rule file of Prometheus, and its configuration.

Pure: tables to text.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Final

from pdserve.dashboards.files import MARK, sealed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.dashboards.table import Alert, Recording

__all__ = ["RUNBOOKS", "TARGETS", "render_prometheus", "render_rules"]

RUNBOOKS: Final = "docs/observability.md"
"""Where the runbooks are, unless a deployment has them elsewhere."""
TARGETS: Final = "targets"
"""The folder beside the configuration whose files name further processes."""


def render_rules(
    recordings: Iterable[Recording], alerts: Iterable[Alert], runbooks: str = RUNBOOKS
) -> str:
    """The rule file; `runbooks` is the page whose sections the alerts name."""
    # Rules of one group are computed in their order: alerts see what was recorded just before.
    lines = [f"# {MARK}", "groups:", "  - name: pdserve", "    rules:"]
    for recording in recordings:
        lines += _recording(recording)
    for alert in alerts:
        lines += _alert(alert, runbooks)
    return sealed("\n".join(lines) + "\n")


def render_prometheus(targets: Sequence[str], cluster: str) -> str:
    """A configuration of Prometheus that reads the rules beside it, scrapes `targets`, and those of
    the files in `targets/`."""
    quoted = ", ".join(map(_quoted, targets))
    return sealed(
        textwrap.dedent(
            f"""\
            # {MARK}
            global:
              scrape_interval: 15s
              evaluation_interval: 15s
            rule_files:
              - rules.yml
            scrape_configs:
              - job_name: pdserve
                static_configs:
                  - targets: [{quoted}]
                    labels:
                      cluster: {_quoted(cluster)}
                # Processes that come and go: each file is a list of {{"targets": [...], "labels":
                # {{"cluster": ...}}}}, and is read again when it changes.
                file_sd_configs:
                  - files:
                      - {TARGETS}/*.json
            """
        )
    )


def _quoted(text: str) -> str:
    """A YAML scalar; JSON's strings are YAML's double-quoted ones."""
    return json.dumps(text, ensure_ascii=False)


def _expr(expr: str) -> list[str]:
    return ["        expr: |", *(f"          {line}" for line in expr.splitlines())]


def _recording(recording: Recording) -> list[str]:
    return [f"      - record: {recording.name}", *_expr(recording.expr)]


def _alert(alert: Alert, runbooks: str) -> list[str]:
    return [
        f"      - alert: {alert.name}",
        *_expr(alert.expr),
        f"        for: {alert.hold}",
        "        labels:",
        f"          severity: {alert.severity}",
        "        annotations:",
        f"          summary: {_quoted(alert.summary)}",
        f"          description: {_quoted(alert.description)}",
        f"          runbook_url: {_quoted(f'{runbooks}#{alert.name.lower()}')}",
    ]
