"""Numbers of a page: labels that the caller does not name are summed over."""

from tests.support.metrics_page import find

PAGE = """# HELP pdserve_a_total Of a.
pdserve_a_total{model="m",outcome="x"} 2.0
pdserve_a_total{model="n",outcome="x"} 3.0
pdserve_a_total{model="n",outcome="y \\"z\\""} 4.0
pdserve_ab_total 8.0
"""


def test_samples_with_the_labels_are_summed() -> None:
    assert find(PAGE, "pdserve_a_total") == 9
    assert find(PAGE, 'pdserve_a_total{outcome="x"}') == 5
    assert find(PAGE, 'pdserve_a_total{outcome="x",model="n"}') == 3
    assert find(PAGE, "pdserve_ab_total") == 8


def test_what_is_not_there_is_none() -> None:
    assert find(PAGE, "pdserve_a") is None
    assert find(PAGE, 'pdserve_a_total{outcome="y"}') is None
