import pytest

from pdserve.cli.conversation import Conversation, Reaction


def test_a_line_is_asked_with_everything_said_before():
    conversation = Conversation("be kind")
    assert conversation.on_line("hello\n") == Reaction("ask")
    conversation.answered("hi")
    conversation.on_line("and you?")
    assert conversation.to_send() == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and you?"},
    ]


def test_a_question_without_an_answer_is_taken_back():
    conversation = Conversation()
    conversation.on_line("hello")
    conversation.take_back()
    assert conversation.to_send() == []


def test_reset_forgets_all_but_the_system_message():
    conversation = Conversation("be kind")
    conversation.on_line("hello")
    assert conversation.on_line("/reset").action == "tell"
    assert conversation.to_send() == [{"role": "system", "content": "be kind"}]


def test_system_shows_and_sets():
    conversation = Conversation()
    assert conversation.on_line("/system").text == "(no system message)"
    conversation.on_line("hello")
    conversation.on_line("/system be brief ")
    assert conversation.to_send() == [{"role": "system", "content": "be brief"}]
    assert conversation.on_line("/system").text == "system message: be brief"


@pytest.mark.parametrize("line", ["/quit", "/exit"])
def test_quit_leaves(line):
    assert Conversation().on_line(line).action == "quit"


def test_help_names_every_command():
    text = Conversation().on_line("/help").text
    for command in ("/reset", "/system", "/help", "/quit"):
        assert command in text


def test_an_unknown_command_is_not_sent_to_the_model():
    conversation = Conversation()
    reaction = conversation.on_line("/rest")
    assert "/rest" in reaction.text
    assert not conversation.messages


@pytest.mark.parametrize("line", ["", "   ", "\n"])
def test_an_empty_line_is_nothing(line):
    conversation = Conversation()
    assert conversation.on_line(line).action == "nothing"
    assert not conversation.messages
