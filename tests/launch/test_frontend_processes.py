import json

import pytest

from pdserve.launch.config.resolve import resolve
from pdserve.launch.frontend_main import read_config
from pdserve.launch.frontend_processes import (
    child_environ,
    child_frontend_flags,
    is_child_frontend,
    with_shared_port,
)


def config(tmp_path, *, environ=None, **flags):
    given = {name.replace("_", "-"): text for name, text in flags.items()}
    return resolve(given, {"PDSERVE_CONFIG": "none", **(environ or {})}, tmp_path)


def test_without_frontends_nothing_changes(tmp_path):
    alone = config(tmp_path)
    assert with_shared_port(alone) is alone
    router = config(tmp_path, role="router", frontends="4")
    assert with_shared_port(router) is router


def test_a_process_that_was_alone_opens_a_free_port_on_this_machine(tmp_path):
    shared = with_shared_port(config(tmp_path, frontends="2"))
    assert shared.cluster.listen == "127.0.0.1:0"
    assert not shared.cluster.alone
    assert shared.frontend.reuse_port
    assert shared.frontend.group.startswith("frontends-")
    assert not is_child_frontend(shared)


def test_who_has_a_cluster_keeps_its_address(tmp_path):
    shared = with_shared_port(config(tmp_path, frontends="2", listen="10.0.0.1:7700"))
    assert shared.cluster.listen == "10.0.0.1:7700"
    front = with_shared_port(config(tmp_path, frontends="2", role="frontend", join="h:7700"))
    assert front.cluster.listen == ""


def test_every_group_has_a_name_of_its_own(tmp_path):
    given = config(tmp_path, frontends="2")
    assert with_shared_port(given).frontend.group != with_shared_port(given).frontend.group


def test_siblings_get_what_concerns_frontends_and_nothing_else(tmp_path):
    (tmp_path / "pdserve.toml").write_text('strict-api = true\nrequest-timeout = "5s"\n')
    given = {
        "frontends": "3",
        "metrics-port": "9100",
        "engine": "instant",
        "change": "7f.2",
        "policy": "round_robin",
        "cluster": "mine",
        "max-body": "1MiB",
    }
    environ = {"PDSERVE_LOG_FORMAT": "json"}
    flags = child_frontend_flags(
        with_shared_port(resolve(given, environ, tmp_path)), 8000, "127.0.0.1:4000", 2
    )
    assert flags == {
        "role": "frontend",
        "config": "none",
        "port": "8000",
        "join": "127.0.0.1:4000",
        "listen": "127.0.0.1:0",
        "log-format": "json",
        "cluster": "mine",
        "max-body": "1MiB",
        "strict-api": "true",
        "request-timeout": "5s",
    }


def test_siblings_with_routers_get_what_concerns_routers(tmp_path):
    given = config(
        tmp_path, role="frontend", frontends="2", with_router="true", policy="random", join="h:1"
    )
    flags = child_frontend_flags(with_shared_port(given), 8000, "127.0.0.1:4000", 2)
    assert (flags["with-router"], flags["policy"]) == ("true", "random")


def test_addresses_of_one_process_are_not_anothers(tmp_path):
    given = config(
        tmp_path,
        role="frontend",
        frontends="2",
        listen="0.0.0.0:7701",
        advertise="10.0.0.5:7701",
        join="10.0.0.1:7700,10.0.0.2:7700",
        node_name="front",
    )
    flags = child_frontend_flags(with_shared_port(given), 80, "10.0.0.1:7700", 3)
    assert flags["listen"] == "0.0.0.0:0"
    assert flags["advertise"] == "10.0.0.5"
    assert flags["join"] == "10.0.0.1:7700,10.0.0.2:7700"
    assert flags["node-name"] == "front-frontend-3"


def test_what_is_sent_makes_the_same_frontend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = with_shared_port(config(tmp_path, frontends="2", max_body="1MiB", cors_origins="*"))
    flags = child_frontend_flags(shared, 8000, "127.0.0.1:4000", 2)
    line = json.dumps({"flags": flags, "group": shared.frontend.group}).encode()
    sibling = read_config(line)
    assert sibling.frontend == shared.frontend
    assert is_child_frontend(sibling)
    assert sibling.process.role == "frontend"


@pytest.mark.parametrize(
    ("name", "kept"),
    [("PDSERVE_PORT", False), ("PDSERVE_PURE", True), ("PDSERVE_TEST_SEED", True), ("HOME", True)],
)
def test_variables_that_have_become_flags_are_not_inherited(name, kept):
    assert (name in child_environ({name: "1"})) is kept
