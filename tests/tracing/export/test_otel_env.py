"""OpenTelemetry's variables: precedence, forms, and wrong values, which never stop the server."""

import pytest

from pdserve.tracing.export.otel_env import (
    looks_like_grpc,
    read_otel_environment,
    traces_url,
    without_password,
)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def read(**variables):
    return read_otel_environment(variables)


def test_without_variables_nothing_is_exported():
    settings = read(PATH="/bin", OTEL_SERVICE_NAME="", **{ENDPOINT: "  "})
    assert settings.endpoint == ""
    assert (settings.timeout, settings.compression, settings.disabled) == (10.0, True, False)
    assert (settings.sample, settings.parent, settings.warnings) == (None, None, ())


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/api/otel", "https://c/api/otel/v1/traces"),
        ("https://c/api/otel/", "https://c/api/otel/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_the_general_endpoint_is_a_base(given, url):
    settings = read(**{ENDPOINT: given})
    assert (settings.endpoint, settings.endpoint_variable) == (url, ENDPOINT)
    assert traces_url(given) == url


def test_the_endpoint_for_traces_is_used_as_it_is_and_wins():
    settings = read(**{ENDPOINT: "http://a:1", TRACES: "http://b:2/in"})
    assert (settings.endpoint, settings.endpoint_variable) == ("http://b:2/in", TRACES)
    assert read(**{TRACES: "http://b:2"}).endpoint == "http://b:2/"


def test_a_flag_may_be_either():
    assert traces_url(" http://c:4318/v1/traces ") == "http://c:4318/v1/traces"


WRONG_URLS = [
    *("c:4318", "grpc://c:4317", "http://", "http://c:99999", "http://c:0", "http://c/a?b=1"),
    *("http://[::1", "http://c/a#b", "http://c /a", "http://c\x7f/"),
]


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_wrong_endpoint_is_ignored_with_a_warning(url):
    settings = read(**{TRACES: url, ENDPOINT: "http://good:1"})
    assert settings.endpoint == "http://good:1/v1/traces"
    (line,) = settings.warnings
    assert line.startswith(f"{TRACES} is ignored: ")
    assert "http://HOST:4318" in line
    with pytest.raises(ValueError, match="http://HOST:4318"):
        traces_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:hunter2@c:99999", "ftp://me:hunter2@c", "http://me:hunter2@c /a"),
        *("http://me:hunter2@c?a=b", "http://me:hunter2@[::1", "me:hunter2@c:4318"),
        *(
            "http://me:hun/ter2@c:0",
            "http://me:x@hunter2@c:0",
            "http://me:hunter2/@c",
            "//m:ter2@c",
        ),
    ],
)
def test_the_password_of_a_wrong_endpoint_is_not_told(url):
    (line,) = read(**{ENDPOINT: url}).warnings
    assert "hunter2" not in line
    assert "ter2" not in line


def test_an_endpoint_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="is no URL: write http://HOST:4318"):
        traces_url("http://c\udcff")


@pytest.mark.parametrize(
    "name",
    [
        *("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPORTER_OTLP_HEADERS"),
        *("OTEL_TRACES_SAMPLER", ENDPOINT),
    ],
)
def test_bytes_that_are_no_text_are_ignored_with_a_warning(name):
    settings = read(**{name: "a=b\udcff"})
    assert (settings.service_name, settings.resource, settings.headers) == ("", {}, {})
    assert settings.warnings == (f"{name} is ignored: it is no UTF-8",)


def test_headers_are_decoded_and_never_shown():
    settings = read(
        OTEL_EXPORTER_OTLP_HEADERS="authorization=Basic%20c2VjcmV0==, x-scope = a b ,",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://c",
    )
    assert settings.headers == {"authorization": "Basic c2VjcmV0==", "x-scope": "a b"}
    assert "c2VjcmV0" not in repr(settings)


def test_headers_for_traces_win():
    settings = read(OTEL_EXPORTER_OTLP_HEADERS="a=1", OTEL_EXPORTER_OTLP_TRACES_HEADERS="b=2")
    assert settings.headers == {"b": "2"}


@pytest.mark.parametrize(
    "text", ["novalue", "a=1,=2", "bad name=1", "x=a%0d%0ab", "Content-Length=5", "ü=1"]
)
def test_wrong_headers_are_ignored_whole_and_not_quoted(text):
    settings = read(OTEL_EXPORTER_OTLP_HEADERS=f"key=topsecret,{text}")
    assert settings.headers == {}
    assert len(settings.warnings) == 1
    assert "topsecret" not in settings.warnings[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("2500", 2.5), ("0", 30.0), ("999999", 30.0), ("1", 0.001)]
)
def test_the_timeout_is_in_milliseconds_and_bounded(text, seconds):
    assert read(OTEL_EXPORTER_OTLP_TRACES_TIMEOUT=text).timeout == seconds


@pytest.mark.parametrize("text", ["-1", "10s", "1.5", "²"])
def test_a_wrong_timeout_falls_back(text):
    settings = read(OTEL_EXPORTER_OTLP_TRACES_TIMEOUT=text, OTEL_EXPORTER_OTLP_TIMEOUT="3000")
    assert settings.timeout == 3.0
    assert "milliseconds" in settings.warnings[0]


def test_compression():
    assert not read(OTEL_EXPORTER_OTLP_COMPRESSION="none").compression
    assert read(
        OTEL_EXPORTER_OTLP_COMPRESSION="none", OTEL_EXPORTER_OTLP_TRACES_COMPRESSION="GZIP"
    ).compression
    settings = read(OTEL_EXPORTER_OTLP_COMPRESSION="zstd")
    assert settings.compression
    assert "gzip or none" in settings.warnings[0]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf", "carrier pigeon"])
def test_another_protocol_is_ignored_with_the_remedy(protocol):
    (line,) = read(OTEL_EXPORTER_OTLP_PROTOCOL=protocol).warnings
    assert "http/json" in line
    assert "4318" in line
    assert read(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/json").warnings == ()


@pytest.mark.parametrize(
    ("variables", "off"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, True),
        ({"OTEL_SDK_DISABLED": "TRUE"}, True),
        ({"OTEL_SDK_DISABLED": "false"}, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, True),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, False),
    ],
)
def test_export_can_be_switched_off(variables, off):
    settings = read(**variables)
    assert settings.disabled is off
    assert settings.warnings == ()


@pytest.mark.parametrize(
    "variables", [{"OTEL_SDK_DISABLED": "yes"}, {"OTEL_TRACES_EXPORTER": "zipkin"}]
)
def test_a_wrong_switch_is_no_switch(variables):
    settings = read(**variables)
    assert not settings.disabled
    assert len(settings.warnings) == 1


@pytest.mark.parametrize(
    ("name", "argument", "sample", "parent"),
    [
        ("always_on", "", 1.0, "ignore"),
        ("always_off", "", 0.0, "ignore"),
        ("traceidratio", "0.25", 0.25, "ignore"),
        ("parentbased_always_on", "", 1.0, "limit"),
        ("parentbased_always_off", "0.5", 0.0, "limit"),
        ("parentbased_traceidratio", "0.01", 0.01, "limit"),
        ("parentbased_traceidratio", "", 1.0, "limit"),
    ],
)
def test_samplers(name, argument, sample, parent):
    settings = read(OTEL_TRACES_SAMPLER=name, OTEL_TRACES_SAMPLER_ARG=argument)
    assert (settings.sample, settings.parent, settings.warnings) == (sample, parent, ())


@pytest.mark.parametrize("argument", ["2", "-0.1", "nan", "often"])
def test_a_wrong_ratio_is_all(argument):
    settings = read(OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG=argument)
    assert settings.sample == 1.0
    assert "from 0 to 1" in settings.warnings[0]


def test_an_unknown_sampler_says_nothing():
    settings = read(OTEL_TRACES_SAMPLER="xray")
    assert (settings.sample, settings.parent) == (None, None)
    assert "always_on" in settings.warnings[0]


def test_the_resource():
    settings = read(
        OTEL_SERVICE_NAME="chat", OTEL_RESOURCE_ATTRIBUTES="service.name=other,team=a%2Cb"
    )
    assert settings.service_name == "chat"
    assert settings.resource == {"service.name": "other", "team": "a,b"}
    assert read(OTEL_RESOURCE_ATTRIBUTES="a=1,b").resource == {}


def test_files_must_exist(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("x")
    assert read(OTEL_EXPORTER_OTLP_CERTIFICATE=str(file)).certificate == file
    settings = read(OTEL_EXPORTER_OTLP_CERTIFICATE=str(tmp_path / "none.pem"))
    assert settings.certificate is None
    assert "there is no file" in settings.warnings[0]


def test_the_port_of_grpc_is_known():
    assert looks_like_grpc("http://c:4317/v1/traces")
    assert not looks_like_grpc("http://c:4318/v1/traces")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://c:4318/v1/traces", "https://c:4318/v1/traces"),
        ("https://me:secret@c:4318/v1/traces", "https://me:***@c:4318/v1/traces"),
        ("https://me:@c/", "https://me:***@c/"),
        ("https://key@c:4318/v1/traces", "https://***@c:4318/v1/traces"),
        ("https://a@b:c@d/", "https://a@b:***@d/"),
    ],
)
def test_what_may_be_a_key_is_not_shown(url, shown):
    assert without_password(url) == shown
