import pytest

from pdserve.observe.instruments import OTHER, Counter, Family, Gauge, Histogram


def test_a_value_on_a_bound_counts_in_that_bucket():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.sum == 7.5


def test_observing_several_times_weighs_count_and_sum():
    histogram = Histogram([1.0])
    histogram.observe(0.5, times=4)
    assert (histogram.counts, histogram.sum) == ([4, 0], 2.0)


def test_bounds_must_ascend():
    with pytest.raises(ValueError, match="ascend"):
        Histogram([2.0, 1.0])


def test_a_gauge_can_be_read_from_its_owner():
    gauge = Gauge()
    gauge.value = 3
    assert gauge.value == 3
    gauge.read_from(lambda: 7)
    assert gauge.value == 7


def test_a_family_returns_the_same_member_for_the_same_labels():
    family = Family(Counter, 1, bound=4)
    family.labels("a").inc()
    family.labels("a").value += 2
    assert [(labels, member.value) for labels, member in family] == [(("a",), 3)]


def test_a_family_folds_what_is_beyond_its_bound_into_other():
    family = Family(Counter, 2, bound=2)
    for index in range(100):
        family.labels(f"route{index}", "200").inc()
    assert len(family) == 3
    assert family.labels(OTHER, OTHER).value == 98


def test_a_family_refuses_a_wrong_number_of_labels():
    with pytest.raises(ValueError, match="expected 2"):
        Family(Counter, 2, bound=2).labels("one")


def test_a_removed_member_is_gone():
    family = Family(Gauge, 1, bound=2)
    family.labels("a").value = 1
    family.remove("a")
    family.remove("never there")
    assert len(family) == 0
