import logging
import os

import msgspec

from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics


def test_a_reason_is_logged_once_counted_and_shown(caplog):
    metrics = Metrics()
    degradations = Degradations(metrics)
    with caplog.at_level(logging.WARNING, logger="pdserve"):
        degradations.add("pure_twins", "the extension was not built; run `make native`")
        degradations.add("pure_twins", "again")
    assert [record.getMessage() for record in caplog.records] == [
        "degraded (pure_twins): the extension was not built; run `make native`"
    ]
    assert metrics.degraded.labels("pure_twins").value == 1
    assert dict(degradations.reasons()) == {
        "pure_twins": "the extension was not built; run `make native`"
    }


def test_a_cleared_reason_leaves_no_trace():
    metrics = Metrics()
    degradations = Degradations(metrics)
    degradations.add("no_memfd", "slow")
    degradations.clear("no_memfd")
    degradations.clear("never there")
    assert not degradations.reasons()
    assert len(metrics.degraded) == 0


def test_a_path_that_is_no_text_can_be_sent():
    degradations = Degradations(Metrics())
    degradations.add("no_socket", os.fsdecode(b"/tmp/\xff cannot be made"))
    assert msgspec.json.decode(msgspec.json.encode(dict(degradations.reasons()))) == {
        "no_socket": "/tmp/\\udcff cannot be made"
    }
