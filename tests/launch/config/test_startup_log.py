"""What the log says of settings at the start."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.launch.config.resolve import resolve
from pdserve.launch.config.startup_log import (
    log_config_sources,
    log_listening,
    warn_about_config,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_file_that_was_found_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "pdserve.toml"
    file.write_text("backlog = 7")
    log_config_sources(resolve({}, {"HOME": str(tmp_path)}, tmp_path))
    assert f"settings are read from {file}, which was found: --config none skips" in caplog.text
    caplog.clear()
    log_config_sources(resolve({"config": str(file)}, {}, tmp_path))
    assert caplog.messages == [f"settings are read from {file}"]
    caplog.clear()
    log_config_sources(resolve({"config": "none"}, {}, tmp_path))
    assert not caplog.messages


def test_variables_of_kubernetes_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"PDSERVE_PORT": "tcp://10.0.0.1:80", "PDSERVE_SERVICE_HOST": "10.0.0.1"}
    log_config_sources(resolve({"config": "none"}, environ, tmp_path))
    (message,) = caplog.messages
    assert "PDSERVE_PORT, PDSERVE_SERVICE_HOST; enableServiceLinks: false" in message


def test_http_beside_encrypted_links_is_said_to_be_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"role": "frontend", "config": "none", "tls-cert": "c", "tls-key": "k"}
    log_listening(resolve(flags | {"host": "127.0.0.1"}, {}, tmp_path), 8000)
    assert "not encrypted" not in caplog.text
    log_listening(resolve(flags | {"host": "0.0.0.0"}, {}, tmp_path), 8000)
    assert "HTTP is not encrypted" in caplog.text


def test_variables_of_opentelemetry_that_are_ignored_are_said_where_traces_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_SAMPLER": "xray"}
    log_config_sources(resolve({"config": "none", "role": "worker"}, environ, tmp_path))
    assert not caplog.messages
    log_config_sources(resolve({"config": "none"}, environ, tmp_path))
    assert [message.split()[0] for message in caplog.messages] == list(environ)


def test_the_port_of_grpc_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = {"config": "none", "otlp-endpoint": "http://c:4317"}
    log_config_sources(resolve(flags, {}, tmp_path))
    (message,) = caplog.messages
    assert "4317" in message
    assert "4318" in message


def test_settings_without_what_they_belong_to_get_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"config": "none", "metrics-host": "0.0.0.0", "trace-rate": "0"}
    warn_about_config(resolve(flags | {"otlp-endpoint": "http://c:4318"}, {}, tmp_path), "a:1")
    assert caplog.messages == [
        "--metrics-host has no effect without --metrics-port",
        "no traces go to --otlp-endpoint: --trace-rate 0 switches them off",
    ]
    caplog.clear()
    warn_about_config(resolve(flags | {"metrics-port": "9000"}, {}, tmp_path), "a:1")
    assert not caplog.messages
