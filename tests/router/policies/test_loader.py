"""Names to policies, and what a person reads when that fails."""

from __future__ import annotations

import sys
import types

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config import RouterConfig
from pdserve.router.policies import least_loaded
from pdserve.router.policies.kv_load import KvLoad
from pdserve.router.policies.loader import load_policy
from pdserve.router.policies.prefix_hash import PrefixHash
from pdserve.router.policies.ttft import Ttft


def test_the_default_is_found():
    assert load_policy(RouterConfig().policy) == Ttft()


def test_one_of_your_own_is_named_by_module_and_attribute(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("made_up_policies")
    module.mine = types.SimpleNamespace(choose=least_loaded.choose)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_policies", module)
    assert load_policy("made_up_policies:mine.choose") is least_loaded.choose


def test_an_unknown_name_suggests_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match="no policy 'least-load'; did you mean 'least_loaded'"):
        load_policy("least-load")
    with pytest.raises(ConfigError, match=r"no policy 'zzz'\. Installed: approx_prefix, kv_load, "):
        load_policy("zzz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:choose", "cannot be imported.*no_such_module"),
        ("pdserve.ids:choose", "module pdserve.ids has no 'choose'"),
        ("pdserve.ids:", "module pdserve.ids has no ''"),
        ("pdserve.router.policies.loader:GROUP", "cannot be called"),
        ("json:dumps", r"does not take \(request, state, random\)"),
    ],
)
def test_what_cannot_be_used_says_why(name: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_policy(name)


def test_options_are_read_by_the_type_of_their_defaults():
    policy = load_policy("kv_load", {"overlap-credit": "1.5", "temperature": "0.1"})
    assert policy == KvLoad(overlap_credit=1.5, temperature=0.1)
    assert load_policy("prefix_hash", {"prefix_tokens": "64"}) == PrefixHash(prefix_tokens=64)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("kv_load", {"credit": "1"}, "no option 'credit'. Options: credit_decay, disk_weight"),
        ("kv_load", {"temperature": "warm"}, "option temperature='warm' is no number"),
        ("kv_load", {"temperature": "-1"}, "options must be numbers of at least 0"),
        ("round_robin", {"speed": "1"}, "'round_robin' has no options, speed was given"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(name: str, options: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        load_policy(name, options)
