"""All boards, in the order in which they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.dashboards.disaggregation_board import DISAGGREGATION
from pdserve.dashboards.planner_board import PLANNER
from pdserve.dashboards.routers_board import ROUTERS
from pdserve.dashboards.service_board import SERVICE
from pdserve.dashboards.workers_board import WORKERS

if TYPE_CHECKING:
    from pdserve.dashboards.table import Board

__all__ = ["BOARDS"]

BOARDS: Final[tuple[Board, ...]] = (SERVICE, WORKERS, DISAGGREGATION, ROUTERS, PLANNER)
