"""What users and other releases see: flags, settings, HTTP, metrics, outputs, names, the client.

All of it is collected from the live tree and compared with the files in `surface/`. An item is a
name with facts about it. What is new is allowed; an item or a fact that is gone is not:

    python -m tests.compat.surface --write

makes the files anew, when the change is wanted. How names are spelled inside of the tree is not
known here. Records that travel between nodes are compared by `test_records.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import logging
import os
import pkgutil
import re
import sys
import tempfile
import textwrap
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from unittest.mock import MagicMock, patch

import msgspec

import pdserve
import pdserve.client
import pdserve.errors
from pdserve.cli.bench import command as bench
from pdserve.cli.bench.record import BenchRecord
from pdserve.cli.bench.runner import BenchRun
from pdserve.cli.bench.summary import GeneratorStats, summarise
from pdserve.cli.main import COMMANDS, main
from pdserve.client import fields as client_fields
from pdserve.engine_core import main as host
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.kv_transfer.remote_prefill import RemotePrefillState
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.errors import PdserveError
from pdserve.frontend.access import api_keys
from pdserve.frontend.api.adapters import anthropic_output, responses_output
from pdserve.frontend.api.app import Api, ApiRoute
from pdserve.frontend.dispatch.migration import migration_state
from pdserve.frontend.http import cors
from pdserve.frontend.http.connection import ClientConnection
from pdserve.frontend.placement import HEADER_NAMES
from pdserve.launch import exit_codes, metrics_samples, process
from pdserve.launch.config.options import BY_NAME, OPTIONS, ROLES, Option
from pdserve.launch.config.resolve import RESERVED, RESERVED_PREFIXES, resolve
from pdserve.launch.machine import FactState, MachineFact
from pdserve.launch.roles.router import _sampled
from pdserve.launch.roles.worker import WorkerRole
from pdserve.messages.handoff import ClaimOutcome
from pdserve.messages.status import ClusterStatus
from pdserve.messages.worker_stream import MigrationHintReason
from pdserve.observe import logs, slo
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics, Outcome
from pdserve.observe.node_metrics import NODE_METRICS
from pdserve.protocols import unsupported_fields as known_fields
from pdserve.protocols.fields_page import ENDPOINTS
from pdserve.protocols.openapi import document
from pdserve.router import bookings
from pdserve.router.prefill_queue.queue import PrefillQueue
from pdserve.router.service import RouterService
from pdserve.worker.config import TRANSFERS
from pdserve.worker.disagg import remote_prefill, state_table
from pdserve.worker.disagg.decode_handler import DecodeHandler
from pdserve.worker.disagg.policy import DisaggPolicy
from pdserve.worker.disagg.queue.client import PrefillQueueClient as AskingQueue
from pdserve.worker.disagg.stats import DisaggCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).with_name("frozen")
REMEDY = (
    "what users and other releases see must not change unnoticed; if this is wanted, run "
    "`python -m tests.compat.surface --write` and tell users in CHANGELOG.md"
)

Items = dict[str, list[str]]
"""Facts by name."""
Part = dict[str, Items]
"""By section; one file."""

# ---------------------------------------------------------------- reading sources

_WORD = re.compile(r"[a-z][a-z0-9_]*( [a-z]+){0,2}")


class Call(NamedTuple):
    """A call that passes texts."""

    path: Path
    owner: str
    """What stands before the dot."""
    name: str
    texts: tuple[str, ...]


@cache
def calls() -> tuple[Call, ...]:
    """All of the tree."""
    paths = sorted(Path(pdserve.__file__).parent.rglob("*.py"))
    return tuple(call for path in paths for call in _calls_in(path))


def _calls_in(path: Path) -> Iterator[Call]:
    tree = parsed(path)
    known = _assigned(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = (*node.args, *(keyword.value for keyword in node.keywords))
            texts = tuple(text for one in given for text in _texts(one, known))
            owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if texts:
                yield Call(path, owner, _name(node.func), texts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def source_of(thing: Any) -> ast.Module:
    """Of a module, class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def constants(tree: ast.AST) -> Iterator[str | bytes]:
    """Strings and bytes, but for docstrings."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documents:
            continue
        if isinstance(node.value, str | bytes):
            yield node.value


def words(*things: Any) -> set[str]:
    """Words that stand as strings in functions or modules."""
    texts = {text for thing in things for text in constants(source_of(thing))}
    return {text for text in texts if isinstance(text, str) and _WORD.fullmatch(text)}


def passed(*functions: Any) -> set[str]:
    """Words that calls of these functions pass; of a private one, in its own module only."""
    found: set[str] = set()
    for function in functions:
        home = Path(inspect.getfile(function)) if function.__name__.startswith("_") else None
        for call in calls():
            if call.name == function.__name__ and home in (None, call.path):
                found |= {text for text in call.texts if _WORD.fullmatch(text)}
    return found


def _assigned(tree: ast.Module) -> dict[str, str]:
    """Texts that a module gives names."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                found[target.id] = node.value.value
    return found


def _texts(node: ast.expr, known: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name) and node.id in known:
        yield known[node.id]
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body, known), *_texts(node.orelse, known))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def keys_of_dicts(*things: Any) -> set[str]:
    """Keys that stand in functions or modules, in displays and assignments."""
    nodes = [node for thing in things for node in ast.walk(source_of(thing))]
    keys: list[ast.expr | None] = []
    for node in nodes:
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    return {text for key in keys if key is not None for text in _texts(key, {})}


def _values(kind: Any) -> set[str]:
    """Of a `Literal` or an enumeration."""
    return {str(getattr(one, "value", one)) for one in get_args(kind) or kind}


# ---------------------------------------------------------------- the command line


class _Met(BaseException):
    """A parser that was about to parse."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def command_line() -> Part:
    """By sub-command; facts of flags that are settings, too, stand there."""
    return {f"pdserve {name}": _flags(_parser(name)) for name in COMMANDS}


def _parser(command: str) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Met(self)

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop), bare():
        try:
            main([command])
        except _Met as met:
            return met.parser
    raise AssertionError(f"{command} parses nothing")


def _flags(parser: argparse.ArgumentParser) -> Items:
    return {_flag(action): list(_flag_facts(action)) for action in parser._actions}


def _flag(action: argparse.Action) -> str:
    return max(action.option_strings, key=len, default=str(action.metavar or action.dest))


def _flag_facts(action: argparse.Action) -> Iterator[str]:
    flag = _flag(action)
    yield from (f"also {other}" for other in action.option_strings if other != flag)
    if flag.removeprefix("--") in BY_NAME and action.default is argparse.SUPPRESS:
        yield "a setting"
        return
    if action.nargs != 0:
        yield f"takes {action.metavar or action.dest.upper()}"
    if action.type in (int, float):
        yield f"is of type {getattr(action.type, '__name__', '')}"
    if type(action).__name__ == "_AppendAction":
        yield "may be repeated"
    yield from (f"choice {choice}" for choice in action.choices or ())
    if action.default not in (None, argparse.SUPPRESS, False, []):
        yield f"default {action.default}"


# ---------------------------------------------------------------- settings


def settings() -> Part:
    """Keys of the file, and variables."""
    variables = {option.variable: [f"sets {option.name}"] for option in OPTIONS}
    variables |= {name: ["has a reader of its own"] for name in RESERVED}
    variables |= {f"{prefix}*": ["has a reader of its own"] for prefix in RESERVED_PREFIXES}
    key_file: Items = {name: [] for name in (*api_keys._ENTRY, *api_keys._LIMITS)}
    return {
        "pdserve.toml": {option.name: list(_option_facts(option)) for option in OPTIONS},
        "variables": variables,
        "key file": key_file,
    }


def _option_facts(option: Option) -> Iterator[str]:
    default = option.text(resolve({}, {"PDSERVE_CONFIG": "none"}).value(option))
    yield f"default {default}"
    yield "a switch" if option.switch else f"takes {option.metavar}"
    if option.many:
        yield "may be repeated"
    yield from (f"choice {choice}" for choice in _choices(option))


def _choices(option: Option) -> list[str]:
    """As the error names them: an option's parser is a closure."""
    try:
        option.parse("\0")
    except (ValueError, PdserveError) as error:
        _, found, choices = str(error).partition("use one of ")
        return choices.split(", ") if found else []
    return []


# ---------------------------------------------------------------- HTTP


def http() -> Part:
    """Routes, fields and headers."""
    described = document("")
    return {
        "routes": _routes(),
        "operations": _operations(described),
        "fields": _fields(described["components"]["schemas"]),
        "fields by themselves": dict(_outside()),
        "words of events": {name: [] for name in _event_words(described)},
        "headers sent": _headers_sent(),
        "headers read": {name: [] for name in _headers_read()},
        "values of x-pdserve-prefill": {
            "place": ["local", "moved", "remote"],
            "reason": sorted(_prefill_reasons()),
        },
    }


def _routes() -> Items:
    api = Api(*[MagicMock() for _ in inspect.signature(Api).parameters])
    held = [one if isinstance(one, dict) else {"": one} for one in vars(api).values()]
    targets = [one for group in held for one in group.values() if isinstance(one, ApiRoute)]
    return {
        one.route: [*one.methods, "needs no key" if one.open else "needs a key"] for one in targets
    }


def _operations(described: dict[str, Any]) -> Items:
    return {
        f"{method.upper()} {path}": list(_operation_facts(described, operation))
        for path, item in described["paths"].items()
        for method, operation in item.items()
        if method != "parameters"
    }


def _operation_facts(described: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    yield from (f"takes {one}" for one in _content(operation.get("requestBody", {})))
    for status, answer in operation["responses"].items():
        if "$ref" in answer:
            answer = described["components"]["responses"][answer["$ref"].rpartition("/")[2]]
        yield from (f"{status}: {one}" for one in _content(answer))
        yield from (f"{status}: header {name}" for name in answer.get("headers", ()))


def _content(message: dict[str, Any]) -> Iterator[str]:
    for kind, one in message.get("content", {}).items():
        for schema in one.get("schema", {}).get("anyOf", [one.get("schema", {})]):
            yield f"{kind} {schema.get('$ref', '').rpartition('/')[2]}".strip()


def _fields(schemas: dict[str, Any]) -> Items:
    found: Items = {}
    for record, schema in schemas.items():
        for name, one in schema.get("properties", {}).items():
            need = "required" if name in schema.get("required", ()) else "optional"
            found[f"{record}.{name}"] = [need, *_alternatives(one)]
        if not schema.get("properties"):
            found[record] = list(_alternatives(schema))
    return found


def _alternatives(schema: dict[str, Any]) -> Iterator[str]:
    """What a value may be, one by one, so that another may come without a change to the others."""
    if "default" in schema:
        yield f"default {json.dumps(schema['default'])}"
    for one in schema.get("anyOf", [schema]):
        if "enum" in one:
            yield from (f"value {value}" for value in one["enum"])
        else:
            yield _in_words(one)


def _in_words(schema: Any) -> str:
    """A type with its bounds, on one line."""
    if not isinstance(schema, dict):
        return str(schema)
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema or "enum" in schema:
        return " or ".join(sorted(_alternatives(schema)))
    said = [str(schema.get("type", "anything"))]
    if inner := schema.get("items") or schema.get("additionalProperties"):
        said.append(f"of {_in_words(inner)}")
    known = ("type", "items", "additionalProperties", "description", "title", "default")
    said += [f"{name}={_in_words(schema[name])}" for name in sorted(schema.keys() - {*known})]
    return " ".join(said)


def _outside() -> Iterator[tuple[str, list[str]]]:
    """Fields that no record has, and what is done about them."""
    for path, decoder in ENDPOINTS.items():
        for name, refusal in decoder.refused.items():
            neutral = [f"allowed: {json.dumps(value)}" for value in refusal.neutral]
            yield f"{path} {name}", ["refused", *neutral]
    for name in known_fields.WITHOUT_EFFECT | known_fields.NESTED_WITHOUT_EFFECT:
        yield name, ["without effect"]


_EVENT = re.compile(r"[a-z]+(_[a-z]+)*(\.[a-z_]+)*")


def _event_words(described: dict[str, Any]) -> set[str]:
    """Names and fields of both APIs' events, and of records that the document does not have."""
    streamed = (responses_output, anthropic_output)
    texts = {text for module in streamed for text in constants(source_of(module))}
    named = {text for text in texts if isinstance(text, str) and _EVENT.fullmatch(text)}
    known = described["components"]["schemas"]
    records = [record for record in _api_records() if record.__name__ not in known]
    return named | {name for record in records for name in _encoded(record)}


def _api_records() -> Iterator[type[msgspec.Struct]]:
    for module in _modules("protocols"):
        for kind in vars(module).values():
            is_record = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
            if is_record and kind.__module__ == module.__name__:
                yield kind


def _encoded(record: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(record)]


def _modules(package: str) -> list[Any]:
    root = importlib.import_module(f"pdserve.{package}")
    inner = pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
    return [root, *(importlib.import_module(one.name) for one in inner)]


_LINE = re.compile(rb"(?:^|\n)([A-Za-z][A-Za-z-]+): ")


def _headers_sent() -> Items:
    folder = Path(inspect.getfile(cors)).parents[1]
    texts = [text for path in folder.rglob("*.py") for text in constants(parsed(path))]
    lines = [text for text in texts if isinstance(text, bytes) and b": " in text]
    found = {name for text in lines if b"{" not in text for name in _LINE.findall(text)}
    exposed = cors._EXPOSED.split(b", ")
    sent = {name.decode() for name in {*found, *HEADER_NAMES} - {b"event", b"data"}}
    sent |= {name.decode() for name in exposed if name.lower() not in {*map(bytes.lower, found)}}
    readable = {name.decode().lower() for name in exposed}
    return {name: ["readable by pages"] if name.lower() in readable else [] for name in sent}


def _headers_read() -> set[str]:
    """What is looked up in something called headers."""
    asked = [call for call in calls() if call.owner == "headers" and call.name in ("get", "getall")]
    return {call.texts[0].lower() for call in asked} | {"anthropic-version"}


# ---------------------------------------------------------------- metrics


def metrics() -> Part:
    """Names with labels; values where they can be listed."""
    names = {
        one.name: [one.kind, *(f"label {label}" for label in one.labels)]
        for one in Metrics.definitions()
    }
    unknown = {name.partition("{")[0] for name in _label_values()} - names.keys()
    assert not unknown, unknown
    return {"names": names, "labels": {k: sorted(v) for k, v in _label_values().items()}}


def _label_values() -> dict[str, set[str]]:
    return {
        "pdserve_requests_total{outcome}": _values(Outcome),
        "pdserve_slo_total{objective}": _values(slo.SloObjective),
        "pdserve_slo_total{result}": _values(slo.SloResult),
        "pdserve_slo_total{cause}": _values(slo.SloCause),
        "pdserve_migrations_total{reason}": _values(migration_state.MigrationReason),
        "pdserve_migrations_total{outcome}": _values(migration_state.MigrationOutcome),
        "pdserve_router_failures_total{reason}": _labelled("router_failures"),
        "pdserve_api_keys_refused_total{reason}": _values(api_keys.KeyRefusalReason),
        "pdserve_connections_cut_total{reason}": passed(ClientConnection.cut),
        "pdserve_moves_asked_total{reason}": _values(MigrationHintReason),
        "pdserve_prefill_decisions_total{where}": {"local", "remote"}
        & words(DisaggCounters.decided),
        "pdserve_prefill_decisions_total{reason}": _prefill_reasons(),
        "pdserve_handoff_attempts_total{outcome}": passed(DisaggCounters.attempt)
        | {"unwanted", *remote_prefill._OUTCOMES.values()},
        "pdserve_handoff_claims_total{outcome}": _values(ClaimOutcome),
        "pdserve_handoff_seconds{phase}": passed(
            DisaggCounters.phase, remote_prefill.RemotePrefillRequest._phase
        ),
        "pdserve_handoffs{state}": _values(state_table.DecodeState)
        | _values(state_table.PrefillState),
        "pdserve_cancel_seconds{stage}": words(
            Scheduler.phase, RemotePrefillState.phase, EngineCore._abort
        ),
        "pdserve_transfer_bytes_total{direction}": _labelled("transfer_bytes"),
        "pdserve_transfer_bytes_total{backend}": {*TRANSFERS} - {"auto"},
        "pdserve_degraded{reason}": _degradations(),
        "pdserve_node_members{member}": {*ROLES} - {"all-in-one"},
        "pdserve_node_handshakes_refused_total{error}": _refused_handshakes(),
        "pdserve_node_topic_events_total{event}": {*metrics_samples._TOPIC_EVENTS},
        "pdserve_router_bookings_ended_total{reason}": _values(bookings.BookingEnd),
        "pdserve_router_decisions_total{policy}": {*_entry_points()["pdserve.policies"]},
        "pdserve_prefill_queue_events_total{event}": _queue_events(),
        **_sampled_labels(),
    }


def _labelled(family: str) -> set[str]:
    """Words that become labels of a family, which is an attribute of the metrics."""
    assert hasattr(Metrics(), family), family
    labels = [call for call in calls() if call.owner == family and call.name == "labels"]
    return {text for call in labels for text in call.texts}


def _prefill_reasons() -> set[str]:
    """Why a prompt is prefilled where it is: for metric, log and header."""
    decided = words(DisaggPolicy._decide, DecodeHandler._obstacle, DecodeHandler._obstacle_to) - {
        "predict"
    }
    request = remote_prefill.RemotePrefillRequest
    given_up = words(request._impatient, request._prefill_here)
    refused = passed(PrefillQueue._refuse, PrefillQueue._tell_refused, request.on_refused)
    unasked = passed(AskingQueue._refuse, AskingQueue._tell_refused)
    return decided | given_up | refused | unasked | passed(DecodeHandler._submit_here)


def _degradations() -> set[str]:
    noted = words(RouterService._note_degraded) | words(WorkerRole._note_reduced)
    down = {f"{mode}engine_down" for mode in ("", "prefill_", "decode_")}
    reduced = {f"{mode}kv_reduced" for mode in ("", "prefill_", "decode_")}
    tiers = {
        f"{mode}{word}"
        for mode in ("", "prefill_", "decode_")
        for word in passed(WorkerRole._note_reason)
    }
    named = {word for word in noted | passed(Degradations.add) if "_" in word}
    return named | down | reduced | tiers


def _refused_handshakes() -> set[str]:
    root = pdserve.errors.HandshakeRefused
    return {root.__name__, *(one.__name__ for one in _errors() if issubclass(one, root))}


def _queue_events() -> set[str]:
    refused = passed(PrefillQueue._refuse, PrefillQueue._tell_refused)
    ended = {f"ended_{word}" for word in _values(ClaimOutcome)}
    return {
        *_counted(source_of(PrefillQueue)),
        *ended,
        *(f"refused_{word}" for word in refused),
        *passed(PrefillQueue._end),
    }


def _counted(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            yield from _texts(node.target.slice, {})


def _sampled_labels() -> dict[str, set[str]]:
    """A router's sample is built in one call, a mapping for each metric with labels."""
    metric = {one.field: one for one in NODE_METRICS}
    found = {}
    for node in ast.walk(source_of(_sampled)):
        if isinstance(node, ast.keyword) and node.arg in metric:
            one = metric[node.arg]
            inside = [inner for inner in ast.walk(node.value) if isinstance(inner, ast.Dict)]
            texts = {
                text for inner in inside for key in inner.keys if key for text in _texts(key, {})
            }
            if texts:
                found[f"pdserve_{one.name}{{{one.label}}}"] = texts
    return found


# ---------------------------------------------------------------- outputs


def outputs() -> Part:
    """Keys of what commands write for programs, and of a log in JSON."""
    return {
        "status --json": {path: [] for path in _typed(ClusterStatus)},
        "config --json": {name: [] for row in _config().values() for name in row},
        "doctor --json": {
            **{field.name: [] for field in dataclasses.fields(MachineFact)},
            "state": sorted(_values(FactState)),
        },
        "bench --json": {path: [] for path in _paths(_bench())},
        "simulate --json": {path: [] for path in _paths(_simulated())},
        "log": {name: [] for name in _log_keys()},
    }


def _typed(kind: Any, before: str = "") -> Iterator[str]:
    """The fields of a record and of those within it."""
    for field in msgspec.structs.fields(kind):
        yield (path := f"{before}{field.name}")
        for inner in _records_in(field.type):
            yield from _typed(inner, f"{path}.")


def _records_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _records_in(inner)


def _paths(value: Any, before: str = "") -> Iterator[str]:
    """The keys of a JSON value, joined by dots; a list is as its first element."""
    if isinstance(value, list):
        value = value[0] if value and isinstance(value[0], dict) else None
    for name, one in value.items() if isinstance(value, dict) else ():
        yield f"{before}{name}"
        yield from _paths(one, f"{before}{name}.")


def _bench() -> Any:
    record = BenchRecord(
        0, 0.0, sent=0.0, first=1.0, last=2.0, ended=2.0, output_tokens=2, gaps=[1.0]
    )
    numbers = summarise([record], GeneratorStats(lags=[0.0]), None)
    parsed = bench._parser().parse([])
    return json.loads(bench._as_json(parsed, {}, numbers, BenchRun(records=[record])))


def _config() -> Any:
    return json.loads(_printed("config", "--json", "--config", "none"))


def _simulated() -> Any:
    """Of a replay that takes a moment."""
    small = ("--generate", "shared-prefix", "--generate-option", "requests=3", "--workers", "2")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        _printed("simulate", *small, "--json", str(path))
        return json.loads(path.read_text())


def _printed(*arguments: str) -> str:
    """By a command that ends well."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()), bare():
        status = main(arguments)
    assert status == exit_codes.OK, f"pdserve {' '.join(arguments)}: {status}"
    return text.getvalue()


def bare() -> contextlib.AbstractContextManager[object]:
    """An environment without variables of pdserve."""
    rest = {name: text for name, text in os.environ.items() if not name.startswith("PDSERVE_")}
    return patch.dict(os.environ, rest, clear=True)


def _log_keys() -> set[str]:
    """Of one record, and of who says it: a node's process, an engine's."""
    said = keys_of_dicts(process.serve, process.ServerProcess, host)
    formatter = logs.JsonFormatter()
    token = logs.request_id.set("one")
    try:
        raise ValueError
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, "", 0, "", None, sys.exc_info())
        line = json.loads(formatter.format(record))
    finally:
        logs.request_id.reset(token)
    return {*line, *said & {"role", "pid", "node", "parent"}}


# ---------------------------------------------------------------- names


def names() -> Part:
    """Of what is chosen by name, and of what travels by name or number."""
    points = _entry_points()
    return {
        "entry points": {group: list(found) for group, found in points.items()},
        "engines": {name: [] for name in points["pdserve.engines"]},
        "policies": {name: [] for name in points["pdserve.policies"]},
        "exit codes": {k: [str(v)] for k, v in vars(exit_codes).items() if k.isupper()},
        "errors": {kind.__name__: list(_error_facts(kind)) for kind in _errors()},
        "topics": {name: [] for name in _topics()},
        "wire numbers": _numbers(),
    }


def _entry_points() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = {"scripts": sorted(project["scripts"])}
    return scripts | {group: sorted(found) for group, found in project["entry-points"].items()}


def _errors() -> list[type[PdserveError]]:
    kinds = [kind for kind in vars(pdserve.errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, PdserveError)]


def _error_facts(kind: type[PdserveError]) -> Iterator[str]:
    yield from (f"status {kind.http_status}", f"code {kind.code}", f"type {kind.error_type}")
    yield "a retry helps" if kind.retryable else "no retry helps"


def _topics() -> set[str]:
    """Their names are the only texts among the constants of messages."""
    found = [text for module in _modules("messages") for text in _assigned_in(module)]
    return {text for text in found if _WORD.fullmatch(text)}


def _assigned_in(module: Any) -> list[str]:
    return [
        text for name, text in _assigned(parsed(Path(module.__file__))).items() if name.isupper()
    ]


_NUMBER = re.compile(
    r"^[A-Z_]+(?:: Final)? = (?:(?:Method|Notice)\(\s*)?(0x0[0-9a-f]{3})(?:, \"([^\"]+)\")?", re.M
)


def _numbers() -> Items:
    """Of questions, messages and streams between nodes; a question's name stands in errors."""
    folder = Path(pdserve.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    found = [match for text in texts for match in _NUMBER.findall(text)]
    return {number: [name] if name else [] for number, name in found}


# ---------------------------------------------------------------- the client


def client() -> Part:
    """Public names of `pdserve.client`, with what they take and have."""
    found: Part = {}
    for name in pdserve.client.__all__:
        kind = getattr(pdserve.client, name)
        found[name] = {name: _signature(kind), **_members(kind)}
    return found


def _members(kind: type) -> Items:
    found: Items = {}
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") or hasattr(Exception, name):
            continue
        found[name] = _signature(member) if callable(member) else []
    return found


def _signature(function: Any) -> list[str]:
    """Parameters with their defaults, and the fields that `**fields` stands for."""
    facts = []
    for one in inspect.signature(function).parameters.values():
        if one.name == "self":
            continue
        bare = one.replace(annotation=inspect.Parameter.empty)
        facts.append(f"{one.kind.description}: {_stable(str(bare))}")
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation))
        if unpacked:
            fields = getattr(client_fields, unpacked[1]).__annotations__
            facts += [f"field {name}" for name in fields]
    return facts


def _stable(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+|<factory>", "", text)


# ---------------------------------------------------------------- files

PARTS: dict[str, Callable[[], Part]] = {
    "command_line": command_line,
    "settings": settings,
    "http": http,
    "metrics": metrics,
    "outputs": outputs,
    "names": names,
    "client": client,
}
"""Each is a file."""


def text_of(part: Part) -> str:
    """As TOML, sorted, a line for each item, or for each fact where they are many."""
    lines = ["# Made by `python -m tests.compat.surface --write`."]
    for section in sorted(part):
        lines += ["", f"[{_quoted(section)}]"]
        lines += [_line(item, part[section][item]) for item in sorted(part[section])]
    return "\n".join(lines) + "\n"


def _line(item: str, facts: Sequence[str]) -> str:
    said = [_quoted(fact) for fact in sorted(set(facts))]
    line = f"{_quoted(item)} = [{', '.join(said)}]"
    if len(line) <= 100:
        return line
    return "\n".join([f"{_quoted(item)} = [", *(f"    {fact}," for fact in said), "]"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def committed(name: str) -> Part:
    """What the file says."""
    found: Part = tomllib.loads((FILES / f"{name}.toml").read_text(encoding="utf-8"))
    return found


def lost(name: str, before: Part, now: Part) -> list[str]:
    """A sentence for each item and each fact that is gone."""
    sentences = []
    for section, items in before.items():
        for item, facts in items.items():
            if item not in now.get(section, {}):
                sentences.append(f"{name}.toml, [{section}]: {item!r} is gone")
                continue
            left = now[section][item]
            sentences += [
                f"{name}.toml, [{section}]: {item!r} was {fact!r} and is now {_told(left)}"
                for fact in facts
                if fact not in left
            ]
    return sentences


def _told(facts: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(facts))) or "without facts"


def write() -> None:
    """Make all files anew."""
    FILES.mkdir(exist_ok=True)
    for name, collect in PARTS.items():
        (FILES / f"{name}.toml").write_text(text_of(collect()), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.exit(__doc__)
