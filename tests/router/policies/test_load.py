"""Names to policies, and what a person reads when that fails."""

from __future__ import annotations

import sys
import types

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config import RouterConfig
from pdserve.router.policies import least_loaded
from pdserve.router.policies.load import installed_policies, load_policy

BUILT_IN = {"least_loaded", "power_of_two", "round_robin"}


def test_the_policies_of_this_installation_are_listed():
    assert set(installed_policies()) >= BUILT_IN


def test_the_default_is_found():
    assert load_policy(RouterConfig().policy) is least_loaded.choose


def test_one_of_your_own_is_named_by_module_and_attribute(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("made_up_policies")
    module.mine = types.SimpleNamespace(choose=least_loaded.choose)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_policies", module)
    assert load_policy("made_up_policies:mine.choose") is least_loaded.choose


def test_an_unknown_name_suggests_the_nearest_and_lists_all():
    with pytest.raises(ConfigError, match="no policy 'least-load'; did you mean 'least_loaded'"):
        load_policy("least-load")
    with pytest.raises(ConfigError, match=r"no policy 'zzz'\. Installed: least_loaded, power_of"):
        load_policy("zzz")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:choose", "cannot be imported.*no_such_module"),
        ("pdserve.ids:choose", "module pdserve.ids has no 'choose'"),
        ("pdserve.ids:", "module pdserve.ids has no ''"),
        ("pdserve.router.policies.load:GROUP", "cannot be called"),
    ],
)
def test_what_cannot_be_used_says_why(name: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_policy(name)
