"""The board *Planner and agents*: how many workers a model needs, has and gets, and why."""

from __future__ import annotations

from typing import Final

from pdserve.dashboards.table import Board, Panel, Query, Row

__all__ = ["PLANNER"]

_DEMAND: Final = Row(
    "Demand",
    (
        Panel(
            "Work, observed and forecast",
            "Prefill seconds of a worker of speed 1, per second. The forecast is for the time when "
            "a worker that is started now would serve; p90 is planned for.",
            "short",
            (
                Query(
                    'max by (model) (pdserve_planner_work{MODEL, value="observed"})',
                    "{{model}} observed",
                ),
                Query(
                    'max by (model, value) (pdserve_planner_work{MODEL, value!="observed"})',
                    "{{model}} {{value}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "Requests that arrive",
            "Per second, at routers: held and refused ones count.",
            "reqps",
            (
                Query(
                    "sum by (model) (rate(pdserve_router_arrivals_total{MODEL}[RATE]))", "{{model}}"
                ),
            ),
            width=6,
        ),
        Panel(
            "Demand unknown",
            "1: the planner is blind and removes nothing. `pdserve planner` names the router that "
            "is silent.",
            "short",
            (Query("max by (model) (pdserve_planner_blind{MODEL})", "{{model}}"),),
            width=6,
            most=1,
            red=1,
        ),
    ),
)

_WORKERS: Final = Row(
    "Workers",
    (
        Panel(
            "Workers wanted and ready",
            "By mode. Below the least: min or a floor of the planner's file is not kept.",
            "short",
            (
                Query(
                    "sum by (model, mode) (pdserve_planner_target_workers{MODEL})",
                    "{{model}} {{mode}} wanted",
                ),
                Query(
                    'sum by (model, mode) (pdserve_planner_workers{MODEL, state="ready"})',
                    "{{model}} {{mode}} ready",
                ),
                Query(
                    "max by (model) (pdserve_planner_least_workers{MODEL})",
                    "{{model}} least",
                ),
            ),
            width=12,
        ),
        Panel(
            "Workers by state",
            "pending: asked for, and no host runs it. booting and loading: it starts. draining and "
            "leaving: it hands its streams over.",
            "short",
            (Query("sum by (state) (pdserve_planner_workers{MODEL})", "{{state}}"),),
            stacked=True,
            width=6,
        ),
        Panel(
            "Cost",
            "Of all workers, for an hour, in the unit of the prices in the planner's file.",
            "short",
            (
                Query(
                    "3600 * sum by (model) (rate(pdserve_planner_cost_total{MODEL}[RATE]))",
                    "{{model}}",
                ),
            ),
            width=6,
        ),
        Panel(
            "Worker-hours of the last hour",
            "By state. Ready workers serve; all others are paid for, too, except pending ones in "
            "most environments.",
            "short",
            (
                Query(
                    "sum by (model, state) "
                    "(increase(pdserve_planner_worker_seconds_total{MODEL}[1h])) / 3600",
                    "{{model}} {{state}}",
                ),
            ),
            stacked=True,
            width=12,
        ),
        Panel(
            "Planners",
            "Planner processes that decide for the model: one. None: nothing is started or "
            "stopped.",
            "short",
            (Query("sum by (model) (pdserve_planner_owner{MODEL})", "{{model}}"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Time of a decision, p99",
            "With its what-ifs. It is made in a thread.",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(pdserve_planner_tick_seconds_bucket{CLUSTER}[RATE])))",
                    "p99",
                ),
            ),
            width=6,
        ),
    ),
)

_OBJECTIVES: Final = Row(
    "Objectives",
    (
        Panel(
            "Requests that keep their objectives",
            "Of those that frontends judge (--slo-ttft, --slo-itl).",
            "percentunit",
            (
                Query(
                    "sum by (model) (rate(pdserve_slo_total"
                    '{MODEL, objective="both", result="good"}[RATE])) / sum by (model) '
                    '(rate(pdserve_slo_total{MODEL, objective="both", result=~"good|bad"}[RATE]))',
                    "{{model}}",
                    rare=True,
                ),
            ),
            most=1,
        ),
        Panel(
            "Predicted misses",
            "before: if nothing changes; after: with the plan; unreachable: the prompt alone takes "
            "longer than the objective, so no number of workers helps.",
            "percentunit",
            (
                Query(
                    "max by (model, when) (pdserve_planner_miss_share{MODEL})", "{{model}} {{when}}"
                ),
            ),
        ),
        Panel(
            "What binds",
            "What keeps the plan from being cheaper or better. `pdserve planner` says it with "
            "its figures; panic: the load has left the forecast, and nothing is removed.",
            "short",
            (
                Query(
                    "max by (model, binding) (pdserve_planner_binding{MODEL})",
                    "{{model}} {{binding}}",
                ),
            ),
            stacked=True,
            most=1,
        ),
    ),
)

_CHANGES: Final = Row(
    "Changes",
    (
        Panel(
            "Under way",
            "By action and state.",
            "short",
            (
                Query(
                    "sum by (action, state) (pdserve_planner_changes{CLUSTER})",
                    "{{action}} {{state}}",
                    rare=True,
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Ended, by result",
            "done, failed (a start became no worker) or given_up (refused, timed out, or no longer "
            "wanted).",
            "short",
            (
                Query(
                    "sum by (action, result) "
                    "(increase(pdserve_planner_changes_ended_total{MODEL}[RATE]))",
                    "{{action}} {{result}}",
                ),
            ),
        ),
        Panel(
            "Orders that were not obeyed",
            "vetoed: the worker refused, for example since no other does its job; denied, "
            "exhausted, transient: the actuator's words; stale: a later planner has ordered.",
            "short",
            (
                Query(
                    "sum by (action, outcome) "
                    '(increase(pdserve_planner_orders_total{CLUSTER, outcome!="done"}[RATE]))',
                    "{{action}} {{outcome}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Oldest change",
            "For how long it has been under way.",
            "s",
            (
                Query(
                    "max by (model, action) (pdserve_planner_oldest_change_seconds{MODEL})",
                    "{{model}} {{action}}",
                ),
            ),
        ),
        Panel(
            "Time of a change, p90",
            "From its decision to its end, done or not.",
            "s",
            (
                Query(
                    "histogram_quantile(0.9, sum by (action, le) "
                    "(rate(pdserve_planner_change_seconds_bucket{CLUSTER}[RATE])))",
                    "{{action}}",
                    rare=True,
                ),
            ),
        ),
        Panel(
            "Mode switches of workers",
            "Orders to change the mode, by outcome, operators' orders included.",
            "short",
            (
                Query(
                    "sum by (outcome) (increase(pdserve_mode_switches_total{CLUSTER}[RATE]))",
                    "{{outcome}}",
                    rare=True,
                ),
            ),
        ),
    ),
)

_AGENTS: Final = Row(
    "Agents",
    (
        Panel(
            "Slots",
            "Of all agents, by group, and those that no worker has.",
            "short",
            (
                Query("sum by (group) (pdserve_agent_slots{CLUSTER})", "{{group}} slots"),
                Query(
                    "sum by (group) (pdserve_agent_free_slots{CLUSTER})",
                    "{{group}} free",
                ),
            ),
        ),
        Panel(
            "Workers of agents",
            "By kind and state.",
            "short",
            (
                Query(
                    "sum by (kind, state) (pdserve_agent_workers{CLUSTER})",
                    "{{kind}} {{state}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Starts and exits",
            "Starts by outcome; exits by how. failed: the worker ended by itself, or could not be "
            "started.",
            "short",
            (
                Query(
                    "sum by (outcome) (increase(pdserve_agent_starts_total{CLUSTER}[RATE]))",
                    "start {{outcome}}",
                ),
                Query(
                    "sum by (how) (increase(pdserve_agent_exits_total{CLUSTER}[RATE]))",
                    "exit {{how}}",
                ),
            ),
        ),
    ),
)

PLANNER: Final = Board(
    "pdserve-planner",
    "pdserve: Planner and agents",
    "How many workers each model needs, has and gets, what keeps it from having more, and what "
    "agents start.",
    (_DEMAND, _WORKERS, _OBJECTIVES, _CHANGES, _AGENTS),
)
