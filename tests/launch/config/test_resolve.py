import dataclasses
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.config.options import BY_NAME, GROUPS, METRIC_NAMES, OPTIONS
from pdserve.launch.config.resolve import (
    Config,
    OptionRow,
    has_worker_pair,
    option_rows,
    resolve,
    roles_of,
    unused_flags,
)
from pdserve.observe import scrapes
from pdserve.worker.config import DiskKv

INTERNAL = {
    *("frontend.reuse_port", "frontend.group"),  # for several frontends on one port
    "frontend.parser_modules",  # of the options of parsers
    "frontend.otel",  # variables of OpenTelemetry
    "frontend.retry_after",  # a measured constant
    *("router.booking_ttl", "router.max_bookings", "router.sweep_interval"),  # guards
    *("router.gone_model_memory", "router.gone_models", "router.retry_after"),
    *("router.assumed_max_sequences", "router.hold_bytes"),
    *("router.index_max_blocks", "router.predict_ttl"),
    *("worker.kv_share", "worker.transfer", "worker.tiers"),  # follow from others
    *("router.approximate_ttl", "router.approximate_blocks"),
}


@pytest.fixture
def compose(tmp_path):
    """Resolve with a TOML file, environment and flags of the test's own."""

    def run(toml: str | None = None, environ=None, **flags) -> Config:
        if toml is not None:
            (tmp_path / "pdserve.toml").write_text(toml)
        environ = {"HOME": str(tmp_path / "home")} | (environ or {})
        named = {name.replace("_", "-"): text for name, text in flags.items()}
        return resolve(named, environ, tmp_path)

    return run


def test_without_anything_the_defaults_hold(compose):
    config = compose()
    assert (config.frontend.host, config.frontend.port) == ("127.0.0.1", 8000)
    assert config.worker.model == ""
    assert config.process.role == "all-in-one"
    assert not config.sources


def test_a_flag_wins_over_environment_over_file(compose):
    toml = 'port = 1\nhost = "file"\nkv-memory = "1MiB"'
    environ = {"PDSERVE_PORT": "2", "PDSERVE_HOST": "env"}
    config = compose(toml, environ, port="3")
    assert config.frontend.port == 3
    assert config.frontend.host == "env"
    assert config.worker.kv_memory == 2**20
    assert config.source(BY_NAME["port"]) == "--port"
    assert config.source(BY_NAME["host"]) == "PDSERVE_HOST"
    assert config.source(BY_NAME["kv-memory"]).endswith("pdserve.toml: kv-memory")
    assert config.source(BY_NAME["dtype"]) == "default"


def test_every_option_can_come_from_every_place(compose, tmp_path):
    for option in OPTIONS:
        if option.name == "config":
            continue
        text = option.show(sample(option))
        assert compose(None, {option.variable: text}).value(option) == option.parse(text)
        assert compose(**{option.name: text}).value(option) == option.parse(text)
        (tmp_path / "pdserve.toml").write_text(f'{option.name} = "{text}"')
        assert compose().value(option) == option.parse(text)
        (tmp_path / "pdserve.toml").unlink()


def sample(option):
    """A value that every validation accepts and that is not the default."""
    named = {
        "role": "all-in-one",
        "dtype": "float32",
        "gpu-memory-utilization": 0.45,
        "mode": "decode",
        "disagg": "predict",
        "transfer": "tcp",
        "verify-kv": "all",
        "tool-parser": "none",
        "pooling": "mean",
        "reasoning-parser": "think",
        "log-format": "json",
        "trace-sample": 0.5,
        "trace-rate": 5.0,
        "trace-parent": "trust",
        "log-level": "debug",
        "engine-option": {"a": "b"},
        "policy-option": {"gamma": "1"},
        "lora": {"poet": "/adapters/poet"},
        "agent-slots": {"gpu": ("0", "1"), "cpu": ("", "")},
        "agent-worker": {"gpu": ("--model", "a b")},
        "slo-ttft": {"": 0.5, "org/name": 2.0},
        "slo-itl": {"org/name": 0.05},
        "metrics-names": "vllm",
        "queue-order": "fifo",
        "served-model-name": ("one", "two"),
        "cors-origins": ("https://example.org",),
        "allowed-hosts": ("llm.example.org", "*.lan"),
        "api-keys-file": Path("/keys.toml"),
        "block-size": 64,
        "max-batch-tokens": 512,
        "model": "org/name",
        "otlp-endpoint": "http://c:4318/v1/traces",
        "listen": "10.0.0.1:7",
        "advertise": "10.0.0.2:8",
        "join": ("10.0.0.3:9", "10.0.0.4:9"),
        "cluster-key-file": Path("/cluster.key"),
        "tls-cert": Path("/cert.pem"),
        "tls-key": Path("/key.pem"),
        "tls-ca": Path("/ca.pem"),
        "host-kv": 2**30,
        "disk-kv": DiskKv("/kv", 2**40),
        "kv-fetch": "always",
        "planner": "advise",
        "host-kv-admission": "reused",
        "disk-kv-admission": "all",
    }
    if option.name in named:
        return named[option.name]
    if option.switch:
        return True
    return {"TIME": 7.0, "SIZE": 2**20, "N": 9, "PORT": 1234}.get(option.metavar, "word")


def test_toml_takes_native_values_tables_and_lists(compose):
    config = compose(
        'port = 9000\nstrict_api = true\nrequest-timeout = 2.5\nserved-model-name = ["a", "b"]\n'
        '[engine-option]\ndelay = 3\nname = "x,y"\n[policy-option]\ngamma = 0.5\n'
        '[lora]\npoet = "/adapters/poet"'
    )
    assert config.frontend.port == 9000
    assert config.frontend.strict_api is True
    assert config.frontend.request_timeout == 2.5
    assert config.worker.served_model_name == ("a", "b")
    assert config.worker.engine_options == {"delay": "3", "name": "x,y"}
    assert config.router.policy_options == {"gamma": "0.5"}
    assert config.worker.loras == {"poet": "/adapters/poet"}


def test_the_file_in_the_home_directory_is_the_second_choice(compose, tmp_path):
    home = tmp_path / "home/.config/pdserve"
    home.mkdir(parents=True)
    (home / "pdserve.toml").write_text("port = 7")
    assert compose().frontend.port == 7
    assert compose("port = 8").frontend.port == 8


def test_a_named_file_is_the_only_one_read(compose, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("port = 5")
    config = compose('host = "ignored"', config=str(other))
    assert (config.frontend.port, config.frontend.host) == (5, "127.0.0.1")


def test_config_none_reads_no_file_and_says_so(compose):
    config = compose("port = 5", config="none")
    assert config.frontend.port == 8000
    assert OptionRow("config", "none", "--config") in option_rows(config)


def test_a_file_is_utf_8_whatever_the_locale_says(compose, monkeypatch):
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    assert compose('model = "größe"').worker.model == "größe"


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "says"),
    [
        ("prot = 1", {}, {}, r"key 'prot' is unknown, did you mean 'port'\?"),
        (None, {"PDSERVE_PROT": "1"}, {}, r"PDSERVE_PROT is unknown, did you mean PDSERVE_PORT\?"),
        (None, {"PDSERVE_ZZZZZZ": "1"}, {}, r"PDSERVE_ZZZZZZ is unknown$"),
        (None, {"PDSERVE_MODE": "x"}, {}, "PDSERVE_MODE: 'x' is unknown: use one of aggregated"),
        ("mode = 'x'", {}, {}, "mode: 'x' is unknown"),
        (None, {}, {"port": "70000"}, "--port: 70000 is out of range: must be between 0 and 65535"),
        (None, {"PDSERVE_KV_MEMORY": "4G"}, {}, "PDSERVE_KV_MEMORY: '4G' is ambiguous"),
        (
            "request-timeout = 'soon'",
            {},
            {},
            r"pdserve\.toml: request-timeout: 'soon' is not a dur",
        ),
        ("port = [1]", {}, {}, "a list is not possible here"),
        ("port = ", {}, {}, "not valid TOML"),
        (None, {}, {"config": "/nowhere.toml"}, "there is no file '/nowhere.toml'"),
        (None, {}, {"role": "planer"}, "'planer' is unknown: use one of all-in-one"),
        (None, {}, {"dtype": "fp8"}, "'fp8' is unknown: use one of auto, float32, bfloat16"),
        (None, {}, {"block-size": "33"}, "use a power of two"),
        (None, {}, {"request-timeout": "0"}, "must be greater than 0"),
        (None, {}, {"kv-memory": "0"}, "--kv-memory: '0' must be greater than 0"),
        (None, {}, {"threads": "100000"}, "--threads: 100000 .* must be between 1 and 1024"),
        (None, {}, {"cors-origins": "x"}, "--cors-origins: 'x' is not an origin"),
        (
            None,
            {},
            {"max-batch-tokens": "48"},
            "max-batch-tokens 48 is less than max-sequences 256: .* raise the one or lower the oth",
        ),
        ("config = 'x'", {}, {}, "'config' cannot be set in the file: use --config or PDSERVE_CON"),
        ("[server]\nport = 1", {}, {}, "'server' is a table; settings stand at the top of the"),
        ("max-model-len = 5\nmax_model_len = 6", {}, {}, "key 'max_model_len' is there twice"),
        # An empty address would be every address, an unset shell variable the bundled model.
        (None, {}, {"host": ""}, "--host: must not be empty"),
        (None, {"PDSERVE_HOST": " "}, {}, "PDSERVE_HOST: must not be empty"),
        ("model = ''", {}, {}, "model: must not be empty"),
        (None, {}, {"served-model-name": ","}, "--served-model-name: must not be empty"),
    ],
)
def test_a_mistake_names_its_place_and_the_remedy(compose, toml, environ, flags, says):
    with pytest.raises(ConfigError, match=says):
        compose(toml, environ, **flags)


def test_variables_with_readers_of_their_own_are_left_alone(compose):
    compose(None, {"PDSERVE_PURE": "1", "PDSERVE_TEST_SEED": "7", "PDSERVE_URL": "x"})


def test_every_field_is_an_option_or_deliberately_not(compose):
    config = compose()
    fields = {
        f"{component}.{field.name}"
        for component in ("process", "frontend", "worker", "router", "cluster", "agent")
        for field in dataclasses.fields(getattr(config, component))
    }
    bound = {option.target for option in OPTIONS}
    assert fields - bound == INTERNAL
    assert bound <= fields


def test_options_are_unique_grouped_and_none_is_unbuilt():
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    assert {option.group for option in OPTIONS} == set(GROUPS)
    for option in OPTIONS:
        assert option.help.endswith(".")


def test_the_table_shows_values_as_a_person_writes_them(compose):
    rows = {row.name: (row.value, row.source) for row in option_rows(compose(kv_memory="4GiB"))}
    assert rows["kv-memory"] == ("4GiB", "--kv-memory")
    assert rows["threads"] == ("auto", "default")
    assert rows["model"] == ("bundled", "default")
    assert rows["strict-api"] == ("false", "default")
    assert rows["api-keys-file"] == ("none", "default")


def test_a_printed_value_parses_back(compose):
    config = compose()
    for option in OPTIONS:
        if value := config.value(option):
            assert option.parse(option.text(value)) == value


def test_flags_that_a_role_has_no_use_for_are_named():
    flags = {"model": "m", "port": "1", "drain-timeout": "1s", "join": "a:1", "frontends": "2"}
    flags |= {"aggregated": "true"}

    def idle(role, environ=()):
        return unused_flags(resolve(flags | {"role": role}, dict(environ)))

    assert idle("router") == ["--aggregated", "--frontends", "--model", "--port"]
    assert idle("worker") == ["--aggregated", "--frontends", "--port"]
    assert idle("frontend") == ["--aggregated", "--model"]
    assert idle("all-in-one") == []
    flags |= {"with-router": "true", "policy": "random"}
    assert idle("frontend") == ["--aggregated", "--model"]
    assert "--with-router" in idle("router")
    assert {"--with-router", "--policy"} <= set(idle("worker"))
    shared = resolve({"role": "router"}, {"PDSERVE_MODEL": "m"})
    assert unused_flags(shared) == []


@pytest.mark.parametrize(
    ("role", "roles"),
    [
        ("frontend", ("router", "frontend")),
        ("router", ("router",)),
        ("worker", ("worker",)),
        ("all-in-one", ("router", "worker", "frontend")),
    ],
)
def test_a_frontend_may_have_a_router(compose, role, roles):
    assert roles_of(compose(role=role, with_router="true")) == roles
    assert roles_of(compose(role=role)) == (roles if role == "all-in-one" else (role,))


@pytest.mark.parametrize(
    ("flags", "two"),
    [
        ({}, True),
        ({"aggregated": "true"}, False),
        ({"engine": "sim", "engine-option": "content=on"}, True),
        ({"engine": "sim"}, False),
        ({"engine": "instant"}, False),
        ({"role": "worker"}, False),
    ],
)
def test_all_in_one_has_two_workers_where_kv_can_move(flags, two):
    assert has_worker_pair(resolve({**flags, "config": "none"}, {})) is two


KUBERNETES = {
    "PDSERVE_SERVICE_HOST": "10.96.0.7",
    "PDSERVE_SERVICE_PORT": "8000",
    "PDSERVE_SERVICE_PORT_HTTP": "8000",
    "PDSERVE_PORT": "tcp://10.96.0.7:8000",
    "PDSERVE_PORT_8000_TCP": "tcp://10.96.0.7:8000",
    "PDSERVE_PORT_8000_TCP_PROTO": "tcp",
    "PDSERVE_PORT_8000_TCP_PORT": "8000",
    "PDSERVE_PORT_8000_TCP_ADDR": "fd00::7",
    "PDSERVE_METRICS_PORT": "tcp://10.96.0.8:9101",
    "PDSERVE_ROUTER_SERVICE_HOST": "10.96.0.9",
}


def test_what_kubernetes_sets_for_services_named_like_us_is_passed_over(compose):
    config = compose(None, KUBERNETES | {"PDSERVE_BACKLOG": "77"})
    assert set(config.ignored) == set(KUBERNETES)
    assert (config.frontend.port, config.process.metrics_port) == (8000, None)
    assert config.frontend.backlog == 77


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("PDSERVE_PROT", "8000", "did you mean PDSERVE_PORT"),
        ("PDSERVE_PORT_8000", "x", "PDSERVE_PORT_8000 is unknown"),
        ("PDSERVE_SERVICE_HOST", "not an address", "is unknown"),
        ("PDSERVE_PORT", "80000", "out of range"),
        ("PDSERVE_PORT", "http://10.0.0.1:80", "not a whole number"),
    ],
)
def test_a_misspelt_variable_of_ours_is_still_refused(compose, name, text, says):
    with pytest.raises(ConfigError, match=says):
        compose(None, {name: text})


@pytest.mark.parametrize("key", ["policy", "engine"])
def test_a_file_that_was_found_names_no_code_to_import(compose, tmp_path, key):
    with pytest.raises(ConfigError, match=f"pdserve.toml: {key}: 'evil:pick' names code.*--config"):
        compose(f'{key} = "evil:pick"')
    given = compose(f'{key} = "mine:pick"', config=str(tmp_path / "pdserve.toml"))
    assert given.value(BY_NAME[key]) == "mine:pick"
    assert compose(f'{key} = "ttft"').value(BY_NAME[key]) == "ttft"
    (tmp_path / "pdserve.toml").unlink()
    home = tmp_path / "home" / ".config" / "pdserve"
    home.mkdir(parents=True)
    (home / "pdserve.toml").write_text(f'{key} = "mine:pick"')
    assert compose().value(BY_NAME[key]) == "mine:pick"


def test_every_option_that_imports_code_is_known_as_one():
    for option in OPTIONS:
        assert option.imports == ("module:attribute" in option.help)


def test_what_is_shown_as_a_value_can_be_written(compose):
    for row in option_rows(compose()):
        assert row.value or row.meaning
        assert not (row.value and row.meaning)
        if row.value not in ("", "none"):
            BY_NAME[row.name].parse(row.value)


@pytest.mark.parametrize(
    ("flags", "meaning"),
    [
        ({}, "all in one: a prefill and a decode worker"),
        ({"aggregated": "true"}, "all in one: one aggregated worker"),
        ({"engine": "sim"}, "all in one: one aggregated worker"),
    ],
)
def test_the_mode_of_all_in_one_is_what_runs(compose, flags, meaning):
    rows = {row.name: row for row in option_rows(compose(**flags))}
    assert (rows["mode"].value, rows["mode"].meaning) == ("", meaning)
    rows = {row.name: row for row in option_rows(compose(role="worker", mode="decode"))}
    assert rows["mode"].value == "decode"


def test_the_names_of_metrics_are_those_that_scrapes_know():
    assert METRIC_NAMES == scrapes.METRIC_NAMES


# ---------------------------------------------------------------- OpenTelemetry's variables

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def endpoint(config):
    return config.frontend.otlp_endpoint, config.source(BY_NAME["otlp-endpoint"])


def test_the_endpoint_for_traces_is_taken_in_this_order(compose):
    """Flag, pdserve's variable, file, OpenTelemetry's variable for traces, that for all."""
    general = {ENDPOINT: "http://general:1"}
    traces = general | {TRACES: "http://traces:2/in"}
    own = traces | {"PDSERVE_OTLP_ENDPOINT": "http://own:3"}
    file = 'otlp-endpoint = "http://file:4"'
    assert endpoint(compose()) == ("", "default")
    assert endpoint(compose(environ=general)) == ("http://general:1/v1/traces", ENDPOINT)
    assert endpoint(compose(environ=traces)) == ("http://traces:2/in", TRACES)
    assert endpoint(compose(file, environ=traces))[0] == "http://file:4/v1/traces"
    assert endpoint(compose(environ=own))[0] == "http://own:3/v1/traces"
    flag = compose(environ=own, otlp_endpoint="http://flag:5")
    assert endpoint(flag) == ("http://flag:5/v1/traces", "--otlp-endpoint")


def test_an_endpoint_can_be_switched_off(compose):
    assert endpoint(compose(environ={ENDPOINT: "http://c:1"}, otlp_endpoint="none"))[0] == ""


def test_a_wrong_endpoint_by_flag_is_an_error_and_by_opentelemetrys_variable_is_not(compose):
    with pytest.raises(ConfigError, match="--otlp-endpoint: 'c:4318' is no http or https URL"):
        compose(otlp_endpoint="c:4318")
    config = compose(environ={ENDPOINT: "c:4318"})
    assert endpoint(config) == ("", "default")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is ignored" in config.frontend.otel.warnings[0]


def test_a_password_in_the_endpoint_is_not_shown(compose):
    config = compose(otlp_endpoint="https://user:hunter2@c:4318")
    (row,) = (row for row in option_rows(config) if row.name == "otlp-endpoint")
    assert row.value == "https://user:***@c:4318/v1/traces"
    assert "hunter2" in config.frontend.otlp_endpoint


def test_the_sampler_of_opentelemetry_stands_behind_our_options(compose):
    environ = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    config = compose(environ=environ)
    assert (config.frontend.trace_sample, config.frontend.trace_parent) == (0.5, "ignore")
    assert config.source(BY_NAME["trace-sample"]) == "OTEL_TRACES_SAMPLER"
    config = compose(environ=environ, trace_sample="0.02", trace_parent="trust")
    assert (config.frontend.trace_sample, config.frontend.trace_parent) == (0.02, "trust")


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [("8GiB", 8 << 30, "8GiB"), ("auto", None, "auto"), ("off", 0, "off"), ("0", 0, "off")],
)
def test_host_memory_for_kv_is_a_size_or_auto_or_off(compose, text, size, shown):
    config = compose(host_kv=text)
    assert config.worker.host_kv == size
    assert BY_NAME["host-kv"].text(size) == shown
    assert config.worker.wants_tiers == (size != 0)


def test_a_disk_for_kv_is_a_directory_and_a_size(compose):
    config = compose(disk_kv="/data/with:colon:200GiB")
    assert config.worker.disk_kv == DiskKv("/data/with:colon", 200 << 30)
    assert BY_NAME["disk-kv"].text(config.worker.disk_kv) == "/data/with:colon:200GiB"
    assert compose(disk_kv="off").worker.disk_kv is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("/data", "'/data' is not of the form DIR:SIZE, such as /var/lib/pdserve:200GiB"),
        (":5GiB", "':5GiB' is not of the form DIR:SIZE"),
        ("/data:", "write DIR:SIZE, such as /data:200GiB"),
        ("/data:5G", "'5G' is ambiguous: write 5GiB or 5GB; write DIR:SIZE"),
        ("/data:0GiB", "'0GiB' must be greater than 0"),
    ],
)
def test_a_disk_that_is_written_wrongly_is_explained(compose, text, says):
    with pytest.raises(ConfigError, match=r"^--disk-kv: ") as caught:
        compose(disk_kv=text)
    assert says in caught.value.message
