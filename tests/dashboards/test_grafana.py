"""The JSON of boards: a grid without overlaps, units, variables, data sources."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from pdserve.dashboards.boards import BOARDS
from pdserve.dashboards.files import untouched
from pdserve.dashboards.grafana import COLUMNS, render_board
from pdserve.dashboards.table import Board, Panel, Query, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = {"/__made_by", "/templating/list/definition"}
"""Our mark, and what Grafana's pages write beside a variable's query."""
RENDERED = [pytest.param(json.loads(render_board(board)), id=board.uid) for board in BOARDS]


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    grid = panel["gridPos"]
    return {
        (x, y)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    }


@pytest.mark.parametrize("board", RENDERED)
def test_panels_do_not_overlap_and_fit_the_grid(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        own = cells(panel)
        assert not own & taken, panel["title"]
        assert all(0 <= x < COLUMNS for x, _ in own), panel["title"]
        taken |= own
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("board", RENDERED)
def test_panels_have_what_grafana_shows(board: dict[str, Any]) -> None:
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
        assert all(target["expr"] and "{MODEL" not in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("board", RENDERED)
def test_boards_have_the_same_variables(board: dict[str, Any]) -> None:
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "cluster", "model", "worker"]
    assert board["schemaVersion"] == 39


@pytest.mark.parametrize("board", RENDERED)
def test_grafanas_own_types_know_every_field(board: dict[str, Any]) -> None:
    """What they read and write again has lost nothing that is meant for Grafana."""
    plugins.register_default_plugins()
    read = dashboard.Dashboard.from_json(board)
    assert set(lost(board, json.loads(JSONEncoder().encode(read)))) <= OURS


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Fields and values of `before` that `after` does not have."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            inside = f"{path}/{name}"
            yield from lost(value, after[name], inside) if name in after else [inside]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from lost(one, other, path)
    elif before != after:
        yield path


def test_a_field_that_grafana_does_not_know_is_found() -> None:
    board = json.loads(render_board(BOARDS[0]))
    board["panels"][1]["fieldConfig"]["defaults"]["unti"] = "s"
    read = json.loads(JSONEncoder().encode(dashboard.Dashboard.from_json(board)))
    assert set(lost(board, read)) - OURS == {"/panels/fieldConfig/defaults/unti"}


def test_a_line_of_panels_breaks_where_it_is_full() -> None:
    query = (Query("up", ""),)
    wide = tuple(Panel(str(width), "d", "s", query, width=width) for width in (12, 12, 10, 16, 24))
    board = json.loads(render_board(Board("u", "t", "d", (Row("r", wide), Row("s", wide[:1])))))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert places == [(0, 0), (0, 1), (12, 1), (0, 9), (0, 17), (0, 25), (0, 34), (0, 35)]


def test_a_board_is_sealed() -> None:
    assert untouched(render_board(BOARDS[0]))
