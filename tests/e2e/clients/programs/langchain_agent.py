# mypy: ignore-errors
"""LangChain: an agent with a tool, a prompt that is too long, and a stream that is stopped."""

from connect import model
from langchain.agents import create_agent
from langchain_core.tools import tool
from scenes import CHUNKS, LONG, STORY, WEATHER, play, told

called = []


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append({"city": city})
    return "sunny"


def use_a_tool():
    agent = create_agent(model, [get_weather])
    answer = agent.invoke({"messages": [{"role": "user", "content": WEATHER}]})
    return {"called": called, "answer": answer["messages"][-1].content}


def fill_the_context():
    try:
        model.invoke(LONG)
    except Exception as error:
        return told(error)


def hang_up():
    stream = model.stream(STORY)
    texts = [next(stream).content for _ in range(CHUNKS)]
    stream.close()
    return {"read": "".join(texts)}


play(tool=use_a_tool, full=fill_the_context, abort=hang_up)
