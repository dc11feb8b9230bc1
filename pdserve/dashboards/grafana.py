"""Renders a board as the JSON that Grafana imports (schema 39, Grafana 10.4 and later). Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pdserve.dashboards.files import MARK, sealed
from pdserve.dashboards.table import selected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.dashboards.table import Board, Panel, Row

__all__ = ["COLUMNS", "render_board"]

COLUMNS: Final = 24
"""Of Grafana's grid."""
_HEIGHT: Final = 8
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_READY: Final = "pdserve_engine_ready"


def render_board(board: Board) -> str:
    """The file of one board."""
    return sealed(json.dumps(_board(board), indent=2, ensure_ascii=False) + "\n")


def _board(board: Board) -> dict[str, Any]:
    return {
        "__made_by": MARK,
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [_links()],
        "templating": {"list": _variables()},
        "panels": _panels(board.rows),
    }


def _links() -> dict[str, Any]:
    """A menu of the other boards, which keeps time and variables."""
    return {
        "type": "dashboards",
        "title": "pdserve",
        "tags": ["pdserve"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
    }


def _variables() -> list[dict[str, Any]]:
    chosen = 'cluster=~"$cluster"'
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    return [
        source,
        _variable("cluster", "Cluster", "label_values(pdserve_build_info, cluster)"),
        _variable("model", "Model", f"label_values({_READY}{{{chosen}}}, model)"),
        _variable(
            "worker", "Worker", f'label_values({_READY}{{{chosen}, model=~"$model"}}, instance)'
        ),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Also what has no such label.
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += 1
        for panel, x, y in _placed(row):
            place = {"x": x, "y": top + y, "w": panel.width, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += 1 + max(y for _, _, y in _placed(row)) + _HEIGHT
    return panels


def _placed(row: Row) -> Iterator[tuple[Panel, int, int]]:
    """Panels from left to right, in as many lines as they need."""
    x = y = 0
    for panel in row.panels:
        if x + panel.width > COLUMNS:
            x, y = 0, y + _HEIGHT
        yield panel, x, y
        x += panel.width


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _DATASOURCE,
                "expr": selected(query.expr),
                "legendFormat": query.legend,
                "editorMode": "code",
                "range": panel.kind == "timeseries",
                "instant": panel.kind == "stat",
            }
            for number, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
    }


def _field(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    field: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.most is not None:
        field["max"] = panel.most
    if panel.kind == "timeseries":
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.red is None else "line"},
        }
    return field


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
