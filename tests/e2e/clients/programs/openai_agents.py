# mypy: ignore-errors
"""OpenAI's Agents SDK: an agent with a tool, a prompt that is too long, and a stream that is
stopped."""

import asyncio

from agents import Agent, Runner, function_tool
from connect import model
from scenes import CHUNKS, LONG, STORY, WEATHER, play, told

called = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append({"city": city})
    return "sunny"


agent = Agent(name="assistant", model=model, tools=[get_weather])
loop = asyncio.new_event_loop()


def use_a_tool():
    answer = loop.run_until_complete(Runner.run(agent, WEATHER))
    return {"answer": answer.final_output, "called": called}


def fill_the_context():
    try:
        loop.run_until_complete(Runner.run(agent, LONG))
    except Exception as error:
        return told(error)


def hang_up():
    async def read():
        run = Runner.run_streamed(agent, STORY)
        texts = []
        async for event in run.stream_events():
            delta = getattr(getattr(event, "data", None), "delta", None)
            texts += [delta] if isinstance(delta, str) else []
            if len(texts) == CHUNKS:
                run.cancel()
        return {"read": "".join(texts)}

    return loop.run_until_complete(read())


play(tool=use_a_tool, full=fill_the_context, abort=hang_up)
