from pdserve.frontend.http.cors import Cors


def test_nothing_is_said_unless_origins_are_configured():
    assert Cors(()).lines("https://a.example") == b""
    assert Cors(()).preflight_lines("https://a.example") == b""


def test_a_listed_origin_is_named_and_others_are_not():
    cors = Cors(("https://a.example",))
    assert b"Allow-Origin: https://a.example\r\nVary: Origin" in cors.lines("https://a.example")
    assert cors.lines("https://b.example") == b""
    assert cors.lines(None) == b""


def test_a_star_allows_all_and_preflights_say_what_may_be_sent():
    lines = Cors(("*",)).preflight_lines("https://any.example")
    assert b"Access-Control-Allow-Origin: *\r\n" in lines
    assert b"Access-Control-Allow-Headers: authorization, *\r\n" in lines


def test_both_names_of_a_requests_id_can_be_read():
    exposed = Cors(("*",)).lines("https://any.example").partition(b"Expose-Headers: ")[2]
    assert {b"x-request-id", b"request-id"} <= set(exposed.split(b"\r\n")[0].split(b", "))
