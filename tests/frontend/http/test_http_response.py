from pdserve.errors import EngineDied, InvalidRequest, NotReady, Overloaded, Unauthorized
from pdserve.frontend.http.http_response import HttpResponse, error_response, request_id_line


def test_a_reply_is_its_head_and_its_body():
    raw = HttpResponse(200, b"{}", headers=request_id_line("a b")).to_bytes(b"")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == b"{}"
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 200 OK"
    assert {b"Content-Type: application/json", b"Content-Length: 2", b"x-request-id: a b"} <= set(
        lines
    )
    assert any(line.startswith(b"Date: ") and line.endswith(b" GMT") for line in lines)


def test_a_head_alone_tells_the_bodys_length():
    raw = HttpResponse(200, b"abc").to_bytes(b"", head_only=True)
    assert raw.endswith(b"\r\n\r\n")
    assert b"Content-Length: 3\r\n" in raw


def test_an_answer_without_content_has_no_length():
    raw = HttpResponse(204, b"", b"").to_bytes(b"")
    assert b"Content-" not in raw


def test_errors_say_when_to_come_back_where_that_helps():
    def wait(error):
        raw = error_response(error, b"").to_bytes(b"")
        return raw.partition(b"Retry-After: ")[2].partition(b"\r\n")[0]

    assert wait(Overloaded("x", retry_after=2.2)) == b"3"
    assert wait(Overloaded("x")) == b"1"
    assert wait(NotReady("x")) == b"1"
    assert wait(EngineDied("x")) == b"1"
    assert wait(InvalidRequest("x")) == b""


def test_a_missing_key_names_the_scheme():
    assert b"WWW-Authenticate: Bearer" in error_response(Unauthorized("x"), b"").to_bytes(b"")
