# mypy: ignore-errors
"""Pydantic-AI: an agent with a tool, a prompt that is too long, and a stream that is stopped."""

import asyncio

from connect import model
from pydantic_ai import Agent
from scenes import CHUNKS, LONG, STORY, WEATHER, play, told

called = []
agent = Agent(model)


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append({"city": city})
    return "sunny"


def use_a_tool():
    return {"answer": agent.run_sync(WEATHER).output, "called": called}


def fill_the_context():
    try:
        agent.run_sync(LONG)
    except Exception as error:
        return told(error)


def hang_up():
    async def read():
        async with agent.run_stream(STORY) as answer:
            texts = answer.stream_text(delta=True, debounce_by=None)
            return {"read": "".join([await anext(texts) for _ in range(CHUNKS)])}

    return asyncio.run(read())


play(tool=use_a_tool, full=fill_the_context, abort=hang_up)
