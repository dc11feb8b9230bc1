"""A template's own loops, calls and operators end; nothing outside can be reached."""

from __future__ import annotations

import pytest

from pdserve.clock import ManualClock
from pdserve.errors import InvalidRequest
from pdserve.text.chat.chat_template import ChatTemplate
from pdserve.text.chat.template_limits import TemplateLimits

LIMITS = TemplateLimits(steps=20_000, work_chars=2**20, seconds=30.0)
MESSAGES = [{"role": "user", "content": "hello"}]


def rendered(source: str, limits: TemplateLimits = LIMITS) -> str:
    return ChatTemplate(source, limits=limits).render(MESSAGES)


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(100) }}",
    "large range": "{% for i in range(10**9) %}{% endfor %}",
    "a call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% for i in range(99999) %}{% call m() %}x{% endcall %}{% endfor %}",
}
LARGE = {
    "repetition": "{{ 'x' * 10**10 }}",
    "repetition of a list": "{{ ([1] * 10**10)|length }}",
    "repetition, count first": "{{ 10**10 * 'x' }}",
    "doubling by ~": "{% set n = namespace(x='abcd') %}{% for i in range(99) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='abcd') %}{% for i in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by a macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = "
    "namespace(x='abcd') %}{% for i in range(99) %}{% set n.x = d(n.x) %}{% endfor %}",
    "doubling by a block": "{% set n = namespace(x='abcd') %}{% for i in range(99) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "doubling by join": "{% set n = namespace(x='abcd') %}{% for i in range(99) %}"
    "{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='abcd') %}{% for i in range(99) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "literal text in a loop": "{% set y %}{% for i in range(19000) %}" + "x" * 200 + "{% endfor %}"
    "{% endset %}",
    "output in a loop": "{% for i in range(19000) %}{{ messages[0].content * 40 }}{% endfor %}",
    "a large power": "{{ 9 ** 99999999 }}",
    "powers of powers": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "product of numbers": "{% set n = namespace(x=3) %}{% for i in range(99) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "padding": "{{ 'x'.ljust(10**10) }}",
    "padding by a filter": "{{ 'x'|center(10000000000) }}",
    "padding by a format filter": "{{ '%9999999999d'|format(1) }}",
    "padding by a format": "{{ '%9999999999d' % 1 }}",
    "padding by a format's argument": "{{ '%*d' % (9999999999, 1) }}",
    "padding by a method's format": "{{ '{:>9999999999}'.format(1) }}",
    "padding by a format's field": "{{ '{:>{w}}'.format(1, w=9999999) }}",
    "padding by a precision": "{{ '%.99999999f' % 1 }}",
    "padding by a named value": "{{ '%(x)-99999999d' % {'x': 1} }}",
    "padding by a mapped format": "{{ '{x:>9999999}'.format_map({'x': 1}) }}",
    "indentation": "{{ [1]|tojson(indent=9999999999) }}",
    "filled batches": "{{ [1]|batch(9999999999, 'x')|list }}",
}


@pytest.mark.parametrize("name", ENDLESS | LARGE)
def test_a_template_without_end_is_ended(name):
    with pytest.raises(InvalidRequest, match="chat template"):
        rendered((ENDLESS | LARGE)[name])


def test_time_is_a_limit_of_its_own():
    clock = ManualClock()

    def passing() -> float:
        clock.advance(0.01)
        return clock.now()

    source = "{% for i in range(1000) %}{% endfor %}done"
    with pytest.raises(InvalidRequest, match=r"takes over 5 s"):
        ChatTemplate(source, clock=passing).render(MESSAGES)
    assert ChatTemplate(source, clock=clock.now).render(MESSAGES) == "done"


def test_ordinary_operators_work_under_the_meter():
    source = (
        "{{ 'a' ~ 1 ~ none ~ x }}|{{ 2 * 3 + 1 }}|{{ 2 ** 10 }}|{{ 7 % 4 }}"
        "|{{ '%s-%05.2f' % ('a', 1.5) }}"
        "|{{ 'ab' * 2 }}|{{ [1] + [2] }}|{{ '{:>4}'.format('x') }}|{{ ' x '|trim|center(3) }}"
        "|{{ 'aXb'.replace('X', '--') }}|{{ ','.join(['a', 'b']) }}|{{ 3.5 * 2 }}"
        "|{{ '**%s** 20240726 {%%}' % 1 }}|{{ '* {} 20240726 * {:.2f}'.format(1, 2) }}"
        "|{{ true }}|{{ none }}|{{ 1721952000|tojson }}|{{ '%d'|format(10**12) }}"
    )
    expected = "a1None|7|1024|3|a-01.50|abab|[1, 2]|   x| x |a--b|a,b|7.0"
    expected += "|**1** 20240726 {%}|* 1 20240726 * 2.00"
    expected += "|True|None|1721952000|1000000000000"
    assert rendered(source) == expected


def test_loops_keep_their_helpers_under_the_meter():
    source = (
        "{% for x in 'abc' if x != 'b' %}{{ loop.index }}/{{ loop.length }}{{ x }}"
        "{% if not loop.last %},{% endif %}{{ loop.previtem }}{% else %}none{% endfor %}"
        "{% for x in [] %}{% else %}empty{% endfor %}"
        "{% for a, b in {'k': 1}.items() %}{{ a }}{{ b }}{% endfor %}"
    )
    assert rendered(source) == "1/2a,2/2caemptyk1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ messages|attr('__class__') }}",
        "{{ (messages|map(attribute='__class__'))|list|first }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ lipsum }}",
    ],
)
def test_nothing_outside_can_be_reached(source):
    try:
        text = rendered(source)
    except InvalidRequest:
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ messages.clear() }}",
        "{% import 'os' as os %}",
    ],
)
def test_what_would_change_or_load_something_is_refused(source):
    with pytest.raises(InvalidRequest, match="chat template refused"):
        rendered(source)


def test_the_generation_tag_marks_nothing_but_keeps_its_scope():
    source = "{% set x = 1 %}{% generation %}a{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert rendered(source) == "a21"


def test_json_is_written_as_models_know_it():
    assert rendered("{{ {'b': '<é>&', 'a': [1]}|tojson }}") == '{"b": "<é>&", "a": [1]}'
    assert rendered("{{ {'b': 1, 'a': 'é'}|tojson(sort_keys=true, ensure_ascii=true) }}") == (
        '{"a": "\\u00e9", "b": 1}'
    )
    assert rendered("{{ [1]|tojson(indent=1, separators=(',', ':')) }}") == "[\n 1\n]"
