"""A conversation in which the model calls tools, with OpenAI's client.

    pdserve --model Qwen/Qwen2.5-7B-Instruct
    python examples/tools.py "Is it warmer in Rome or in Oslo?"

    pdserve --tool-parser hermes                # the bundled model calls tools only if it must
    python examples/tools.py --first required

Asks, runs what the model calls, sends the results back, until it answers in words. Needs
`pip install openai` and a model that calls tools: `GET /v1/models` names its `tool_parser`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import openai

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_TURNS = 5
"""A model that never stops calling is left alone after so many."""


def temperature(city: str) -> str:
    """What a weather service would say."""
    return {"Rome": "24 °C", "Oslo": "11 °C"}.get(city, "not known")


FUNCTIONS: dict[str, Callable[..., str]] = {"temperature": temperature}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def main() -> None:
    arguments = _arguments()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.key, max_retries=0)
    with client:
        model = arguments.model or next(iter(client.models.list())).id
        messages: list[Any] = [{"role": "user", "content": arguments.question}]
        for turn in range(MOST_TURNS):
            choice: Any = arguments.first if turn == 0 else "auto"
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,  # one by one, with the last result in view
                max_tokens=arguments.max_tokens,
                extra_body={"thinking_token_budget": arguments.thoughts},
            )
            message = answer.choices[0].message
            if message.content:
                print(message.content)
            if not message.tool_calls:
                return
            messages.append(message.model_dump(exclude_none=True))
            messages += [_result(call) for call in message.tool_calls]


def _result(call: Any) -> dict[str, str]:
    """The message that tells the model what came of its call."""
    given = json.loads(call.function.arguments)
    result = FUNCTIONS[call.function.name](**given)
    print(f"{call.function.name}({', '.join(f'{k}={v!r}' for k, v in given.items())}): {result}")
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Is it warmer in Rome or in Oslo?")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--key", default="none", help="API key")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each answer")
    parser.add_argument("--thoughts", type=int, help="tokens of reasoning at most, if it reasons")
    parser.add_argument("--model", help="without it, the first one served")
    parser.add_argument(
        "--first",
        default="auto",
        choices=["auto", "required"],
        help="tool_choice of the first turn",
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except openai.OpenAIError as error:
        raise SystemExit(f"{sys.argv[0]}: {error}") from None
