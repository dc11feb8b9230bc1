"""Runs `pdserve dashboards`: writes boards of Grafana, rules and a configuration of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.cli.parser import Parser, value_of
from pdserve.cli.slo_flags import parse_limit
from pdserve.dashboards.alerts import Promise, alerts, recordings
from pdserve.dashboards.boards import BOARDS
from pdserve.dashboards.files import make_folder, write_all
from pdserve.dashboards.grafana import render_board
from pdserve.dashboards.rules import RUNBOOKS, TARGETS, render_prometheus, render_rules
from pdserve.errors import ConfigError
from pdserve.launch import exit_codes
from pdserve.launch.config.units import parse_share

if TYPE_CHECKING:
    import argparse

    from pdserve.ids import Seconds

CONFIGURATION: Final = "prometheus.yml"
_LEAST, _MOST = 0.5, 0.99999
_TARGET: Final = "127.0.0.1:8000"
_PAGE: Final = re.compile(r"[!-z|~]+")
"""Without blanks and braces: Prometheus takes those for a template."""
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d{1,5}")


def run(arguments: list[str]) -> int:
    """Writes the files and says where they are."""
    parser = Parser(
        "pdserve dashboards",
        "Write four boards for Grafana, and for Prometheus recording rules, alerts and a "
        "configuration\n"
        "that scrapes pdserve. Files that you edited are never overwritten.",
    )
    _add_flags(parser)
    parsed = parser.parse(arguments)
    if parsed.out is None:
        raise ConfigError("--out DIR is missing: where to write the files")
    texts = _texts(parsed)
    write_all({Path(parsed.out) / name: text for name, text in texts.items()})
    if CONFIGURATION in texts:
        # Prometheus watches a folder only if it is there when the configuration is read.
        make_folder(Path(parsed.out) / TARGETS)
    print("\n".join(str(Path(parsed.out) / name) for name in texts))
    return exit_codes.OK


def _add_flags(parser: Parser) -> None:
    add = parser.own.add_argument
    add(
        "--out",
        metavar="DIR",
        help="Where to write; needed. The folder is made if it is missing.",
    )
    add("--boards-only", action="store_true", help="Only Grafana's boards.")
    add("--rules-only", action="store_true", help="Only the rules.")
    add(
        "--slo-objective",
        metavar="SHARE",
        default="99%",
        help="Share of requests that keep their objectives, such as 99%% or 0.995; the alerts on "
        "burn rates follow from it. [99%%]",
    )
    add(
        "--slo-ttft",
        metavar="TIME",
        default="2s",
        help="Limit of the time to first token, as in `pdserve --slo-ttft`: more work in the "
        "prefill queue is an alert. [2s]",
    )
    add(
        "--target",
        metavar="HOST:PORT",
        action="append",
        help="Where /metrics is, for Prometheus; may be repeated: the frontend's --port, and each "
        f"other process's --metrics-port. [{_TARGET}]",
    )
    add(
        "--cluster",
        metavar="NAME",
        default="pdserve",
        help="Value of the label `cluster` of these targets. [pdserve]",
    )
    add(
        "--runbooks",
        metavar="URL",
        default=RUNBOOKS,
        help=f"Page whose sections alerts link to. [{RUNBOOKS}]",
    )


def _texts(parsed: argparse.Namespace) -> dict[str, str]:
    """File names and texts that were asked for."""
    if parsed.boards_only and parsed.rules_only:
        raise ConfigError(
            "--boards-only and --rules-only exclude each other: give neither for both"
        )
    promise = Promise(_objective(parsed.slo_objective), _seconds(parsed.slo_ttft))
    targets = [_address(target) for target in parsed.target or [_TARGET]]
    boards = {
        f"boards/{board.uid.removeprefix('pdserve-')}.json": render_board(board) for board in BOARDS
    }
    runbooks = _page(parsed.runbooks)
    rules = {"rules.yml": render_rules(recordings(promise), alerts(promise), runbooks)}
    if parsed.boards_only:
        return boards
    if parsed.rules_only:
        return rules
    return boards | rules | {CONFIGURATION: render_prometheus(targets, _name(parsed.cluster))}


def _objective(text: str) -> float:
    share = value_of("--slo-objective", parse_share, text)
    if not _LEAST <= share <= _MOST:
        raise ConfigError(
            f"--slo-objective {text}: give a share from {_LEAST:.0%} to {_MOST:.3%}; nobody can "
            "promise all requests, and alerts need a promise"
        )
    return share


def _seconds(text: str) -> Seconds:
    limit = value_of("--slo-ttft", parse_limit, text)
    if limit.share is not None:
        raise ConfigError(f"--slo-ttft {text}: give the share of requests by --slo-objective")
    return limit.time


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ConfigError(f"--target {text}: give HOST:PORT, without http://")
    return text


def _page(text: str) -> str:
    if not _PAGE.fullmatch(text):
        raise ConfigError(f"--runbooks {text}: give a URL without blanks and braces")
    return text


def _name(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("--cluster: give a name of printable characters")
    return text
