# mypy: ignore-errors
"""LlamaIndex: an agent with a tool, a prompt that is too long, and a stream that is stopped."""

import asyncio

from connect import llm
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from scenes import CHUNKS, LONG, STORY, WEATHER, play, told

called = []
loop = asyncio.new_event_loop()


def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append({"city": city})
    return "sunny"


def use_a_tool():
    async def run():
        return str(await FunctionAgent(tools=[get_weather], llm=llm).run(user_msg=WEATHER))

    return {"answer": loop.run_until_complete(run()), "called": called}


def fill_the_context():
    try:
        llm.complete(LONG)
    except Exception as error:
        return told(error)


def hang_up():
    async def read():
        run = FunctionAgent(tools=[get_weather], llm=llm).run(user_msg=STORY)
        texts = []
        async for event in run.stream_events():
            texts += [event.delta] if isinstance(event, AgentStream) else []
            if len(texts) == CHUNKS:
                break
        await run.cancel_run()
        return {"read": "".join(texts)}

    return loop.run_until_complete(read())


play(tool=use_a_tool, full=fill_the_context, abort=hang_up)
