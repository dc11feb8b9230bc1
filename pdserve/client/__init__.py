"""The Python client of a pdserve server, or of any other that speaks the OpenAI API.

    async with Client("http://127.0.0.1:8000") as client:
        async for text in client.chat_stream("Hello!").texts():
            print(text, end="", flush=True)

`client.py` is what a program calls, `stream.py` an answer that comes in pieces, `errors.py` all
that can go wrong, `policy.py` when it is tried again and how long anything may take.
"""

from pdserve.client.client import Client
from pdserve.client.errors import (
    APIError,
    BadAnswer,
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    ServerError,
    StreamBroken,
    Timeout,
    Unauthorized,
    Unavailable,
)
from pdserve.client.policy import Attempt, Retries, Timeouts
from pdserve.client.stream import ChatStream, CompletionStream, Stream

__all__ = [
    "APIError",
    "Attempt",
    "BadAnswer",
    "ChatStream",
    "Client",
    "ClientError",
    "CompletionStream",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Forbidden",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "RateLimited",
    "Retries",
    "ServerError",
    "Stream",
    "StreamBroken",
    "Timeout",
    "Timeouts",
    "Unauthorized",
    "Unavailable",
]
