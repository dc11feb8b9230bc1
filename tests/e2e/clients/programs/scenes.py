# mypy: ignore-errors
"""What every Python client's program does: play its scenes, and say what it saw as JSON lines.

Runs in the client's own environment, without pdserve.
"""

import json
import sys

WEATHER = "WEATHER in Paris, please"
STORY = "STORY, please"
LONG = "much " * 20_000
"""More than the model's context."""
CHUNKS = 3
"""A stream is stopped after so many."""


def play(**scenes):
    """Each scene returns what is to be told. The program lives until its input ends, so that what
    the last scene leaves open stays open."""
    for name, scene in scenes.items():
        print(json.dumps({name: scene()}), flush=True)
    sys.stdin.read()


def told(error):
    """What a client knows of an error: its own classes, and the server's code and sentence."""
    return {
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "status": getattr(error, "status_code", None),
        "code": getattr(error, "code", None),
        "message": str(error),
    }
