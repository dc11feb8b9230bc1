"""Formats the cluster's status as text and JSON for `pdserve status` and `pdserve top`. Pure.

Names and reasons come from other machines, so control characters are removed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.cli.console.agent_rows import agent_table
from pdserve.cli.console.head import head_lines, milliseconds, percent, rate
from pdserve.cli.console.layout import Table, lines_of
from pdserve.cli.console.overview import Overview, Traffic, alone, latency, overview
from pdserve.cli.console.planner_rows import planner_table
from pdserve.cli.console.rank_rows import rank_table
from pdserve.cli.console.tier_rows import tier_table
from pdserve.cli.outputs import printable
from pdserve.launch.config.units import approximate_size
from pdserve.messages.status import EngineWindow
from pdserve.runtime.orders.drain import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.ids import Seconds
    from pdserve.messages.engine import PathState
    from pdserve.messages.status import ClusterStatus, MemberStatus, NodeReport

__all__ = ["age", "as_json", "notes", "render", "tables"]

_WIDE: Final = 100_000
"""Text for files and pipes is as wide as it is."""

_Rows = list[tuple[str, ...]]


def render(status: ClusterStatus, width: int = 100) -> str:
    """The overview over the last minute, what calls for attention, and tables of everything."""
    seen = overview(status, minute=True)
    sections = [
        "\n".join([f"{_title(status)}; rates of the last minute", *head_lines(seen, width)[1:]]),
        "\n".join(_notes("degraded", seen.degraded)),
        "\n".join(notes(status)),
        *("\n".join(lines_of(table, _WIDE)) for table in tables(status, minute=True)),
    ]
    return "\n\n".join(section for section in sections if section)


def tables(
    status: ClusterStatus, before: ClusterStatus | None = None, *, minute: bool = False
) -> list[Table]:
    """Tables of everything. Args: `before` is an earlier status of the same node, for rates of what
    has no window; `minute`: rates over 60 s, not 10."""
    found = (
        Table(*_split(_members(status)), ("PID", "VERSION", "HOST", "ADDRESS"), "NOTE"),
        Table(
            *_split(_models(status, overview(status, minute=minute))),
            (
                *("ALIASES", "ADAPTERS", "TOKENS", "CONTEXT", "ENGINE", "CACHED", "IN/S"),
                *("WORKERS", "ITL P99", "TTFT P50", "ERR/S"),
            ),
        ),
        Table(
            *_split(_workers(status, minute=minute)),
            ("TOKENS", "BLOCKS", "CACHED", "SERVES", "HIT", "READY", "IN/S", "MODE", "WAITING"),
        ),
        rank_table(status),
        tier_table(status, before),
        Table(*_split(_handoffs(status)), ("BY", "ENDED", "UNDER WAY"), "WHY"),
        Table(*_split(_paths(status, before)), ("FAILURES", "RECEIVED", "SENT"), "NOTE"),
        Table(
            *_split(_routers(status, before)),
            ("INDEXED", "BOOKINGS", "POLICY", "REFUSED", "CACHED", "TTFT/PREDICTED"),
        ),
        Table(*_split(_frontends(status, minute=minute)), ("GROUP", "REROUTED", "CONNECTIONS")),
        planner_table(status),
        agent_table(status),
    )
    return [table for table in found if table.rows]


def _split(rows: _Rows) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    return rows[0], rows[1:]


def notes(status: ClusterStatus) -> list[str]:
    """Nodes that get no requests or did not answer, with the reasons."""
    return [
        *_notes("gets no requests", sorted(status.conflicts.items())),
        *_notes("did not answer", _silent(status)),
    ]


def as_json(value: Any) -> Any:
    """Records as objects with their fields' names, for `json.dumps`."""
    if isinstance(value, msgspec.Struct):
        return {name: as_json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(one) for one in value]
    return value


def age(seconds: Seconds) -> str:
    """An approximate duration: `9s`, `3m12s`, `2h05m`, `4d03h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


# ---------------------------------------------------------------------- sections


def _title(status: ClusterStatus) -> str:
    name = alone(status) or f"cluster {status.cluster}"
    members, models = len(status.members), len(status.models)
    when = time.strftime("%H:%M:%S", time.localtime(status.now))
    return (
        f"{_clean(name)} as {_clean(status.asked)} sees it at {when}: "
        f"{_count(members, 'member')}, {_count(models, 'model')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _members(status: ClusterStatus) -> _Rows:
    rows: _Rows = [("NODE", "ROLE", "STATE", "AGE", "VERSION", "HOST", "PID", "ADDRESS", "NOTE")]
    for m in status.members:
        rows.append(
            (
                m.node,
                m.role,
                _state(m),
                age(status.now - m.epoch / 1000),
                m.version,
                m.host,
                str(m.pid or ""),
                m.address,
                _why(m),
            )
        )
    return rows


def _state(member: MemberStatus) -> str:
    if not member.draining or member.state != "alive":
        return member.state
    drain = None if member.report is None else member.report.drain
    return "drained" if drain is not None and drain.drained else "draining"


def _why(member: MemberStatus) -> str:
    if member.report is not None and member.report.drain is not None:
        return describe(member.report.drain)
    if member.report is not None and member.report.reason:
        return member.report.reason
    return member.reason


def _models(status: ClusterStatus, seen: Overview) -> _Rows:
    rates = (
        "REQ/S",
        "ERR/S",
        "IN/S",
        "OUT/S",
        "CACHED",
        "TTFT P50",
        "TTFT P99",
        "ITL P50",
        "ITL P99",
    )
    slo = ("SLO KEPT",) if seen.all.slo else ()
    rows: _Rows = [
        (
            *("MODEL", "WORKERS", *rates, *slo, "ENGINE", "CONTEXT", "TOKENS", "ALIASES"),
            "ADAPTERS",
        )
    ]
    for model in status.models:
        engine = " ".join(word for word in (model.engine, model.dtype) if word not in ("", "none"))
        workers, context = str(len(model.workers)), str(model.max_model_len)
        aliases = ", ".join(model.aliases)
        adapters = ", ".join(model.adapters)
        traffic = seen.models.get(model.name, Traffic())
        kept = (percent(traffic.kept("both"), 1),) if slo else ()
        rows.append(
            (
                *(model.name, workers, *_traffic(traffic), *kept, engine, context),
                *(model.tokens or "-", aliases, adapters),
            )
        )
    return rows


def _traffic(traffic: Traffic) -> tuple[str, ...]:
    """Rates and latencies of one model."""
    return (
        *map(rate, (traffic.requests, traffic.errors, traffic.input, traffic.output)),
        percent(traffic.cached),
        *(milliseconds(latency(traffic.ttft, share)) for share in (0.5, 0.99)),
        *(milliseconds(latency(traffic.itl, share)) for share in (0.5, 0.99)),
    )


def _workers(status: ClusterStatus, *, minute: bool) -> _Rows:
    rows: _Rows = [
        (
            *("WORKER", "READY", "MODE", "RUNNING", "WAITING", "IN/S", "OUT/S", "ITL", "HIT"),
            *("KV USED", "CACHED", "BLOCKS", "SERVES", "TOKENS"),
        )
    ]
    for member in status.members:
        load = None if member.report is None else member.report.worker
        if load is None:
            continue
        assert member.report is not None
        used = f"{load.blocks_used / load.blocks_total:.0%}" if load.blocks_total else "-"
        window = (member.report.minute if minute else member.report.recent) or EngineWindow()
        seconds = window.seconds or 1.0
        prompts = window.prompt_tokens
        rows.append(
            (
                member.node,
                "yes" if load.ready else "no",
                _mode(member.report),
                str(load.running),
                str(load.waiting),
                rate(prompts / seconds),
                rate(window.output_tokens / seconds),
                milliseconds(load.itl or None) if load.running else "-",
                percent(window.cached_tokens / prompts if prompts else None),
                used,
                str(load.blocks_cached),
                str(load.blocks_total),
                ", ".join(member.models) or "-",
                ", ".join(dict.fromkeys(member.tokens)) or "-",
            )
        )
    return rows


def _mode(report: NodeReport) -> str:
    """A worker's mode, and the one that it changes to."""
    if report.mode is not None:
        mode, target = report.mode.mode, report.mode.target
        return f"{mode}>{target}" if target not in ("", mode) else mode
    return "" if report.handoffs is None else report.handoffs.mode


def _handoffs(status: ClusterStatus) -> _Rows:
    """Handoff statistics of workers."""
    rows: _Rows = [("WORKER", "MODE", "BY", "REMOTE", "LOCAL", "UNDER WAY", "ENDED", "WHY")]
    for member in status.members:
        numbers = None if member.report is None else member.report.handoffs
        if numbers is None:
            continue
        decodes = numbers.mode != "prefill"
        rows.append(
            (
                member.node,
                numbers.mode,
                numbers.disagg or "-",
                str(sum(numbers.remote.values())) if decodes else "-",
                str(sum(numbers.local.values())) if decodes else "-",
                _counts(numbers.states) or "0",
                _counts(numbers.ended) or "0",
                _counts({**numbers.remote, **numbers.local}) or "-",
            )
        )
    return rows


def _counts(numbers: dict[str, int]) -> str:
    """Counts, the largest first."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {word}" for word, count in ordered if count)


def _paths(status: ClusterStatus, before: ClusterStatus | None) -> _Rows:
    """The transfer paths: backend and bytes moved."""
    rows: _Rows = [
        (
            *("KV BETWEEN", "AND", "BY", "SENT", "RECEIVED"),
            *(("PER SECOND",) if before else ()),
            *("FAILURES", "NOTE"),
        )
    ]
    for member in status.members:
        for path in () if member.report is None else member.report.paths:
            moved = (approximate_size(path.sent_bytes), approximate_size(path.received_bytes))
            rate = (_path_rate(status, before, member, path),) if before else ()
            note = f"down: {path.down}" if path.down else path.degraded or path.why
            rows.append(
                (member.node, path.node, path.backend, *moved, *rate, str(path.failures), note)
            )
    return rows


def _path_rate(
    status: ClusterStatus, before: ClusterStatus, member: MemberStatus, path: PathState
) -> str:
    """Bytes per second in both directions since `before`, on the same path."""
    elapsed = status.now - before.now
    for old in before.members:
        if (old.node, old.epoch) != (member.node, member.epoch) or old.report is None:
            continue
        for then in old.report.paths:
            same = (then.node, then.epoch, then.backend) == (path.node, path.epoch, path.backend)
            if same and elapsed > 0:
                moved = path.sent_bytes + path.received_bytes
                moved -= then.sent_bytes + then.received_bytes
                return approximate_size(max(0, int(moved / elapsed)))
    return "-"


def _routers(status: ClusterStatus, before: ClusterStatus | None) -> _Rows:
    rows: _Rows = [
        (
            *("ROUTER", "ROUTED", "REFUSED", "BOOKINGS"),
            *(("PER SECOND",) if before else ()),
            *("HELD", "CACHED", "POLICY", "TTFT/PREDICTED", "INDEXED"),
        )
    ]
    for member in status.members:
        numbers = None if member.report is None else member.report.router
        if numbers is None:
            continue
        tokens = numbers.prompt_tokens
        rows.append(
            (
                member.node,
                *map(str, (numbers.routed, numbers.refused, numbers.bookings)),
                *((_rate(status, before, member),) if before else ()),
                str(numbers.held),
                f"{numbers.cached_tokens / tokens:.0%}" if tokens else "-",
                numbers.policy or "-",
                f"{numbers.prediction:.2f}" if numbers.prediction else "-",
                str(numbers.index_blocks),
            )
        )
    return rows


def _rate(status: ClusterStatus, before: ClusterStatus, member: MemberStatus) -> str:
    """Requests routed per second since `before`, by the same life of the router."""
    elapsed = status.now - before.now
    for old in before.members:
        same = (old.node, old.epoch) == (member.node, member.epoch)
        if same and old.report is not None and member.report is not None and elapsed > 0:
            now, then = member.report.router, old.report.router
            if now is not None and then is not None:
                return f"{(now.routed - then.routed) / elapsed:.1f}"
    return "-"


def _frontends(status: ClusterStatus, *, minute: bool) -> _Rows:
    heads = ("FRONTEND", "ACTIVE", "REQ/S", "ERR/S", "CONNECTIONS", "REROUTED", "HTTP", "GROUP")
    rows: _Rows = [heads]
    for member in status.members:
        numbers = None if member.report is None else member.report.frontend
        if numbers is None:
            continue
        traffic = Traffic()
        for window in numbers.minute if minute else numbers.recent:
            traffic.add(window)
        rates = (rate(traffic.requests), rate(traffic.errors))
        row = (str(numbers.active), *rates, str(numbers.connections), str(numbers.rerouted))
        rows.append((member.node, *row, member.http, member.group))
    return rows


def _silent(status: ClusterStatus) -> Iterator[tuple[str, str]]:
    for member in status.members:
        if member.silence:
            yield member.node, member.silence


# ---------------------------------------------------------------------- notes


def _notes(title: str, notes: Iterable[tuple[str, str]]) -> list[str]:
    lines = [f"  {_clean(node)}: {_clean(text)}" for node, text in notes]
    return [title.upper(), *lines] if lines else []


def _clean(text: str) -> str:
    return " ".join(printable(text).split())
