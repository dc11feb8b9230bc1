"""The JSON of boards: a grid without overlaps, units, variables, data sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.dashboards.boards import BOARDS
from pdserve.dashboards.files import untouched
from pdserve.dashboards.grafana import COLUMNS, render_board
from pdserve.dashboards.table import Board, Panel, Query, Row

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


def test_a_line_of_panels_breaks_where_it_is_full() -> None:
    query = (Query("up", ""),)
    wide = tuple(Panel(str(width), "d", "s", query, width=width) for width in (12, 12, 10, 16, 24))
    board = json.loads(render_board(Board("u", "t", "d", (Row("r", wide), Row("s", wide[:1])))))
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert places == [(0, 0), (0, 1), (12, 1), (0, 9), (0, 17), (0, 25), (0, 34), (0, 35)]


def test_a_board_is_sealed() -> None:
    assert untouched(render_board(BOARDS[0]))
