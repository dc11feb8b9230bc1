"""Takes the request id from the client if it is usable, and makes one otherwise."""

from __future__ import annotations

import re

from pdserve.errors import InvalidRequest
from pdserve.ids import RequestId, new_request_id

_USABLE = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
"""1 to 128 printable ASCII characters that neither begin nor end with a blank."""


def request_id_from(asked: str | None) -> RequestId:
    """The client's id if it is usable in headers and log lines, else a new one."""
    if asked is not None and _USABLE.fullmatch(asked):
        return RequestId(asked)
    return new_request_id()


def check_request_id(asked: str) -> RequestId:
    """Returns the id that a request's body names. Errors: `InvalidRequest`."""
    if not _USABLE.fullmatch(asked):
        raise InvalidRequest(
            "'request_id' must be 1 to 128 printable ASCII characters", param="request_id"
        )
    return RequestId(asked)
