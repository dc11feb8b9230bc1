import dataclasses
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.frontend.config import FrontendConfig


def test_the_defaults_are_valid():
    FrontendConfig().validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_in_flight", 0),
        ("request_timeout", 0),
        ("write_buffer", -1),
        ("drain_timeout", float("nan")),
        ("cors_origins", ("example.com",)),
        ("allowed_hosts", ("http://example.com",)),
        ("allowed_hosts", ("example.com:8000",)),
    ],
)
def test_an_impossible_value_is_named(field, value):
    with pytest.raises(ConfigError) as caught:
        FrontendConfig(**{field: value}).validate()
    assert caught.value.param == field


def test_every_number_is_checked():
    for field in dataclasses.fields(FrontendConfig):
        if field.type in ("int", "Seconds", "Bytes") and field.name != "port":
            least = -1 if field.name == "poison_after" else 0
            change: dict[str, Any] = {field.name: least}
            with pytest.raises(ConfigError):
                FrontendConfig(**change).validate()
