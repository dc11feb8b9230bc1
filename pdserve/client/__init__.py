"""A Python client for a pdserve server, or any other server of the OpenAI API.

    async with Client("http://127.0.0.1:8000") as client:
        async for text in client.chat_stream("Hello!").texts():
            print(text, end="", flush=True)

`client` has the methods that a program calls, `stream` the streamed answers, `errors` everything
that can go wrong, `policy` retries and timeouts.
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
