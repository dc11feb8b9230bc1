"""The files of examples/observability fit each other, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pdserve.cli.main import main
from tests.support.prometheus import promtool

FOLDER = Path(__file__).parents[2] / "examples/observability"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def words(service: str) -> list[str]:
    command = SERVICES[service]["command"]
    return command.split() if isinstance(command, str) else list(command)


def flag(service: str, name: str) -> str:
    (value,) = (word.partition("=")[2] for word in words(service) if word.startswith(f"{name}="))
    return str(value)


def mounts(service: str) -> dict[str, str]:
    """Places in a container, and what is there."""
    found = {}
    for volume in SERVICES[service].get("volumes", []):
        source, place, *_ = volume.split(":")
        found[place] = source
    return found


def provisioned(kind: str) -> dict[str, Any]:
    (path,) = (FOLDER / "grafana/provisioning" / kind).iterdir()
    return dict(yaml.safe_load(path.read_text()))


def test_services_are_made_of_files_that_exist():
    for service in SERVICES.values():
        assert ("build" in service) != ("image" in service)
        if "build" in service:
            context = (FOLDER / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).is_file()
    text = (FOLDER / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M)
    copied = [word for line in lines for word in line.split()]
    assert len(copied) >= 7
    assert [name for name in copied if not (FOLDER / "../.." / name).exists()] == []


def test_mounts_and_dependencies_exist():
    for name, service in SERVICES.items():
        for source in mounts(name).values():
            assert source in COMPOSE["volumes"] or (FOLDER / source).is_dir(), source
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def test_ports_are_of_this_machine_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:8000:8000", "127.0.0.1:9090:9090"]


def test_serving_flags_are_known():
    program, *flags = words("pdserve")
    assert program == "pdserve"
    assert main(["config", *flags]) == 0


def test_the_command_writes_what_the_others_read(tmp_path):
    program, *arguments = words("dashboards")
    assert program == "pdserve"
    out = flag("dashboards", "--out")
    assert out in mounts("dashboards")
    folder = tmp_path / "monitoring"
    assert main([word.replace(out, str(folder)) for word in arguments]) == 0

    config = Path(flag("prometheus", "--config.file"))
    assert mounts("prometheus")[str(config.parent)] == mounts("dashboards")[out]
    assert promtool("check", "config", folder / config.name).returncode == 0
    (scrape,) = yaml.safe_load((folder / config.name).read_text())["scrape_configs"]
    ((target,),) = (static["targets"] for static in scrape["static_configs"])
    host, _, port = target.partition(":")
    assert port in SERVICES[host]["ports"][0].split(":")
    # A server without API keys answers under no other names.
    assert host in flag(host, "--allowed-hosts").split(",")

    (provider,) = provisioned("dashboards")["providers"]
    boards = Path(provider["options"]["path"])
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    for path in (boards, home):
        assert mounts("grafana")[out] == mounts("dashboards")[out]
        assert (folder / path.relative_to(out)).exists()


def test_grafana_asks_prometheus():
    (source,) = provisioned("datasources")["datasources"]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert port in SERVICES[host]["ports"][0].split(":")


def test_prometheus_takes_the_configuration_for_kubernetes(tmp_path):
    text = (FOLDER / "prometheus-kubernetes.yml").read_text()
    (discovery,) = re.findall(r"kubernetes_sd_configs:\n      - role: pod\n", text)
    # Debian builds Prometheus without Kubernetes.
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace(discovery, 'static_configs:\n      - targets: ["a:1"]\n'))
    assert main(["dashboards", "--rules-only", "--out", str(tmp_path)]) == 0
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
