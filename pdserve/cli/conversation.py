"""Keeps the state of one chat and interprets typed lines; no terminal, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HELP = """\
/reset           forget the conversation, keep the system message
/system TEXT     set the system message (without TEXT: show it) and forget the conversation
/help            this text
/quit            leave; so does Ctrl-D
Ctrl-C stops an answer. End a line with \\ to go on in the next one."""

Action = Literal["ask", "tell", "quit", "nothing"]


@dataclass(frozen=True, slots=True)
class Reaction:
    """What the terminal should do after a line."""

    action: Action
    text: str = ""
    """For `tell`: what to print."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, oldest first."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def on_line(self, line: str) -> Reaction:
        """Interprets a line that a person typed."""
        text = line.strip()
        if not text:
            return Reaction("nothing")
        if text.startswith("/"):
            return self._command(text)
        self.say(text)
        return Reaction("ask")

    def say(self, text: str) -> None:
        """Adds a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Adds the answer, which may be incomplete."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Removes the last message, which got no answer."""
        self.messages.pop()

    def to_send(self) -> list[dict[str, str]]:
        """The messages to send to the model."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.messages

    def _command(self, text: str) -> Reaction:
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return Reaction("quit")
        if name == "/help":
            return Reaction("tell", HELP)
        if name == "/reset":
            self.messages.clear()
            return Reaction("tell", "(a new conversation)")
        if name == "/system":
            return Reaction("tell", self._set_system(rest.strip()))
        return Reaction("tell", f"unknown command {name}; /help lists them")

    def _set_system(self, text: str) -> str:
        if not text:
            return f"system message: {self.system}" if self.system else "(no system message)"
        self.system = text
        self.messages.clear()
        return "(system message set, a new conversation)"
