import pytest

from pdserve.errors import InvalidRequest
from pdserve.frontend.http.request_id import check_request_id, request_id_from


@pytest.mark.parametrize("asked", ["a", "req-1", "with blank inside", "x" * 128])
def test_a_usable_id_is_kept(asked):
    assert request_id_from(asked) == asked
    assert check_request_id(asked) == asked


@pytest.mark.parametrize(
    "asked", [None, "", " ", " a", "a ", "x" * 129, "a\nb", "a\tb", "ü", "\x7f"]
)
def test_any_other_is_replaced(asked):
    made = request_id_from(asked)
    assert made.startswith("req-")
    assert made != request_id_from(asked)


@pytest.mark.parametrize("asked", ["", " a", "x" * 129, "a\r\nSet-Cookie: b", "ü"])
def test_a_body_that_names_an_unusable_one_is_refused(asked):
    with pytest.raises(InvalidRequest):
        check_request_id(asked)
