# mypy: ignore-errors
"""Ollama's client for Python: tools, a prompt that is too long, and a stream that is stopped; and
what only its API has."""

from connect import client
from scenes import CHUNKS, LONG, STORY, WEATHER, play, told

MODEL = client.list().models[0].model
called = []


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    called.append({"city": city})
    return "sunny"


def use_a_tool():
    messages = [{"role": "user", "content": WEATHER}]
    first = client.chat(MODEL, messages, tools=[get_weather])
    messages.append(first.message)
    for call in first.message.tool_calls:
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    answer = client.chat(MODEL, messages, tools=[get_weather])
    return {"answer": answer.message.content, "called": called}


def fill_the_context():
    try:
        client.generate(MODEL, LONG)
    except Exception as error:
        return told(error)


def ask_about_the_model():
    shown = client.show(MODEL)
    generated = client.generate(MODEL, "hello")
    parts = list(client.chat(MODEL, [{"role": "user", "content": WEATHER}], stream=True))
    return {
        "capabilities": shown.capabilities,
        "context": [n for name, n in shown.modelinfo.items() if name.endswith("context_length")],
        "running": [model.context_length for model in client.ps().models],
        "generated": generated.response,
        "total": generated.total_duration,
        "times": [
            generated.load_duration,
            generated.prompt_eval_duration,
            generated.eval_duration,
        ],
        "counts": [generated.prompt_eval_count, generated.eval_count],
        "streamed": "".join([part.message.content for part in parts]),
        "reason": parts[-1].done_reason,
        "loaded": client.generate(MODEL).done_reason,
    }


def hang_up():
    stream = client.chat(MODEL, [{"role": "user", "content": STORY}], stream=True)
    texts = [next(stream).message.content for _ in range(CHUNKS)]
    stream.close()
    return {"read": "".join(texts)}


play(tool=use_a_tool, full=fill_the_context, own=ask_about_the_model, abort=hang_up)
