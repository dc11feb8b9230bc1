from pdserve.frontend.api.unknown_fields import MAX_NAMES, UnknownFields
from pdserve.observe.metrics import Metrics


def test_a_name_is_logged_once_and_counted_always(caplog):
    metrics = Metrics()
    unknown = UnknownFields(metrics)
    for _ in range(3):
        unknown.report(["temprature"])
    assert caplog.text.count("temprature") == 1
    assert metrics.unknown_fields.labels("temprature").value == 3


def test_a_client_that_invents_names_grows_nothing(caplog):
    metrics = Metrics()
    unknown = UnknownFields(metrics)
    for number in range(5000):
        unknown.report([f"field{number}"])
    unknown.report(f"other{number}" for number in range(10**9))
    assert len(caplog.records) == MAX_NAMES
    assert len(metrics.unknown_fields) <= MAX_NAMES + 1
