"""Runs chat templates in a sandbox: Jinja as Hugging Face extends it, with a step budget.

jinja2's immutable sandbox keeps a template from touching anything outside. `TemplateMeter` keeps it
from running or growing without end: it counts every loop iteration, call and operator and the
characters they make, and checks the clock. So a template's own loops, recursion and repetition end.
What the meter cannot see is the inside of one built-in operation. So an untrusted template also
needs a process that can be killed: `template_process.py`.

It knows the language only; `chat_template.py` knows messages and what they mean.
"""

from __future__ import annotations

import functools
import json
import re
import time
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from pdserve.text.chat.template_limits import TemplateLimits


class TemplateTooCostly(jinja2.TemplateError):
    """The template has exceeded one of its `TemplateLimits`; the message names it."""


class TemplateMeter:
    """Counts the cost of one rendering."""

    __slots__ = ("_clock", "_deadline", "_limits", "_steps", "_work")

    def __init__(self, limits: TemplateLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.seconds
        self._steps = 0
        self._work = 0

    def step(self) -> None:
        """Count one iteration, call or operator. Raises `TemplateTooCostly`."""
        self._steps += 1
        if self._steps > self._limits.steps:
            raise TemplateTooCostly(f"the chat template takes more than {self._limits.steps} steps")
        if self._clock() > self._deadline:
            raise TemplateTooCostly(f"the chat template takes over {self._limits.seconds:g} s")

    def make(self, chars: int) -> None:
        """Count `chars` characters or items before they are made. Raises `TemplateTooCostly`."""
        self._work += chars
        if self._work > self._limits.work_chars:
            raise TemplateTooCostly(
                f"the chat template makes more than {self._limits.work_chars} characters"
            )


_meter: ContextVar[TemplateMeter] = ContextVar("pdserve_template_meter")


@contextmanager
def metered(limits: TemplateLimits, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Count all work of sandboxed templates inside this context against `limits`."""
    token = _meter.set(TemplateMeter(limits, clock))
    try:
        yield
    finally:
        _meter.reset(token)


# -------------------------------------------------------------------- additions to Jinja2


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks an assistant's text for training; it has no effect
    here."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _PlainNamespace(Namespace):
    """A `namespace()` whose attributes cannot shadow Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's escapes of `<`, `>`, `&` and `'`, which models have not seen in
    training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """jinja2's filter, with bounded widths."""
    if args and kwargs:
        raise jinja2.TemplateError("format takes positional or named values, not both")
    form = str(value)
    _check_widths(form, _WIDE_CONVERSION)
    return form % (kwargs or args)


# -------------------------------------------------------------------- metered environment

_MAX_NUMBER_BITS = 4096
_MAX_ARGUMENT = 2**24
"""Largest number accepted as a width, count or precision."""
_WIDE_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-+ #]*\d*\.?(?:\*|\d{5})")
"""A width or precision of five digits, or one taken from the values, after `%` ..."""
_WIDE_FIELD = re.compile(r"\{(?:[^{}]*+\{|[^{}:]*+:[^{}]*?\d{5})")
"""... and in a field of `str.format`. Looks at each character once."""
_SIZED_FILTERS = {"batch", "center", "indent", "round", "slice", "tojson", "wordwrap"}
"""Filters whose arguments after the first set the size of the result."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates whose loops, calls and operators are all counted by the meter."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        """`now` returns the time for `strftime_now`."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters.update(tojson=_tojson, format=_format)
        self.filters = {
            name: _metered(function, sized=name in _SIZED_FILTERS)
            for name, function in self.filters.items()
        }
        self.filters.update(pdserve_step=_step, pdserve_concat=_concat)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
            namespace=_PlainNamespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _instrument(template)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a template's call of a macro, a method or a global, and count its cost."""
        meter = _meter.get()
        meter.step()
        _check_arguments(__obj, args, kwargs, meter)
        result = super().call(__context, __obj, *args, **kwargs)
        meter.make(_size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap a string's `format`, which jinja2 would run itself; None if `value` is something
        else."""
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None
        form = value.__self__

        def format_metered(*args: Any, **kwargs: Any) -> str:
            _check_widths(form, _WIDE_FIELD)
            _check_numbers((*args, *kwargs.values()))
            return format_safely(*args, **kwargs)

        return format_metered

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        meter.step()
        meter.make(_BINOP_COST[operator](left, right))
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _sum_cost(left: Any, right: Any) -> int:
    return _size(left) + _size(right)


def _product_cost(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _number_cost(left.bit_length() + right.bit_length())
    if isinstance(right, int):
        return _size(left) * max(right, 0)
    return _size(right) * max(left, 0) if isinstance(left, int) else 0


def _power_cost(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _number_cost(left.bit_length() * max(right, 0))
    return 0


def _number_cost(bits: int) -> int:
    if bits > _MAX_NUMBER_BITS:
        raise TemplateTooCostly(f"the chat template makes a number of {bits} bits")
    return 0


def _format_cost(left: Any, right: Any) -> int:
    """Characters made by the operator `%`: `'%9999999d' % 1` makes a large string."""
    if not isinstance(left, str):
        return 0
    _check_widths(left, _WIDE_CONVERSION)
    return len(left) + len(str(right))


def _check_widths(form: str, wide: re.Pattern[str]) -> None:
    if wide.search(form):
        raise TemplateTooCostly("the chat template formats with too large a width")


_BINOP_COST: dict[str, Callable[[Any, Any], int]] = {
    "+": _sum_cost,
    "*": _product_cost,
    "**": _power_cost,
    "%": _format_cost,
}


def _metered(function: Callable[..., Any], *, sized: bool) -> Callable[..., Any]:
    """Wrap a filter: count its result, and check the arguments that are sizes."""

    # `wraps` keeps the attributes by which jinja2 decides to pass a context.
    @functools.wraps(function)
    def metered_filter(*args: Any, **kwargs: Any) -> Any:
        if sized:
            _check_numbers((*args[1:], *kwargs.values()))
        result = function(*args, **kwargs)
        # There is no meter while jinja2 compiles a template and evaluates its constant operands.
        meter = _meter.get(None)
        if meter is not None:
            meter.make(_size(result))
        return result

    return metered_filter


def _check_numbers(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, int) and value > _MAX_ARGUMENT for value in values):
        raise TemplateTooCostly(f"the chat template asks for over {_MAX_ARGUMENT} of something")


def _check_arguments(
    called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meter: TemplateMeter
) -> None:
    """Check the calls of string methods that make long strings from short ones."""
    owner = getattr(called, "__self__", None)
    if not isinstance(owner, str):
        return
    _check_numbers((*args, *kwargs.values()))
    name = called.__name__
    if name == "replace" and len(args) > 1:
        meter.make((owner.count(args[0]) if isinstance(args[0], str) else 0) * _size(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        meter.make(len(owner) * len(args[0]))


def _finalize(value: Any) -> Any:
    """Count everything that a template writes, except its own literal text."""
    if not isinstance(value, str):
        value = str(value)
    meter = _meter.get(None)
    # There is no meter while jinja2 compiles a template and writes its constants.
    if meter is not None:
        meter.make(len(value))
    return value


@pass_context
def _step(context: Context, literal_chars: int) -> str:
    """Count one loop iteration; stands at the head of every loop body and gets the length of the
    text written there."""
    meter = _meter.get()
    meter.step()
    meter.make(literal_chars)
    return ""


@pass_context
def _concat(context: Context, *values: Any) -> str:
    """The operator `~`, counted."""
    meter = _meter.get()
    meter.step()
    text = "".join(map(str, values))
    meter.make(len(text))
    return text


def _instrument(template: nodes.Template) -> None:
    """Insert the meter into loops and concatenations, for which jinja2 has no hook."""
    for loop in list(template.find_all(nodes.For)):
        literal = sum(
            len(data.data) for part in loop.body for data in part.find_all(nodes.TemplateData)
        )
        tick = nodes.Filter(nodes.Const(literal), "pdserve_step", [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
    _replace_concats(template)


def _replace_concats(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_metered_concat(item) for item in value]
        else:
            setattr(node, name, _metered_concat(value))
    for child in node.iter_child_nodes():
        _replace_concats(child)


def _metered_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Concat):
        return value
    first, *rest = value.nodes
    return nodes.Filter(first, "pdserve_concat", rest, [], None, None, lineno=value.lineno)
