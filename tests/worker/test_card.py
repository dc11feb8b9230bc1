import json

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.card import GenerationDefaults
from pdserve.messages.engine import EngineCapabilities
from pdserve.text.chat.chat_template import ChatTemplates
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.worker.card import read_card, read_template, shows_tools
from tests.text.builders import tekken_file
from tests.text.templates import QWEN

CAPABILITIES = EngineCapabilities(
    engine="instant",
    model_type="llama",
    dtype="float32",
    device="cpu",
    max_model_len=512,
    vocab_size=100,
    block_size=32,
    num_blocks=10,
    block_bytes=1,
    max_batch_tokens=64,
    max_sequences=4,
    eos_token_ids=(7,),
    compat_hash="c0ffee",
)


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint's small files: None leaves one out."""

    def write(**files):
        contents = {"config": {}, "tokenizer": {"added_tokens": []}} | files
        for name, content in contents.items():
            if content is not None:
                text = content if isinstance(content, str) else json.dumps(content)
                (tmp_path / f"{name}.json").write_text(text)
        return tmp_path

    return write


def card(path):
    return read_card(path, ("main", "alias"), CAPABILITIES, created=1)


def test_a_card_carries_names_limits_and_files(checkpoint):
    path = checkpoint(tokenizer_config={"bos_token": "<s>"})
    result = card(path)
    assert (result.name, result.aliases) == ("main", ("alias",))
    assert (result.max_model_len, result.vocab_size, result.block_size) == (512, 100, 32)
    assert result.tokenizer_json == (path / "tokenizer.json").read_bytes()
    assert result.tokenizer_config_json == (path / "tokenizer_config.json").read_bytes()
    assert (result.engine, result.dtype, result.compat_hash) == ("instant", "float32", "c0ffee")
    assert result.chat_template is None


def test_the_operators_template_replaces_the_models(checkpoint, tmp_path):
    path = checkpoint(tokenizer_config={"chat_template": "the model's"})
    file = tmp_path / "mine.jinja"
    file.write_text("mine: " + QWEN)
    mine = read_card(path, ("m",), CAPABILITIES, chat_template=str(file))
    assert mine.chat_template == file.read_text()
    assert mine.tool_parser == "hermes", "formats are read from it, too"
    assert card(path).chat_template == "the model's"
    file.write_bytes(b" \n")
    for name, words in ((file, "is empty"), (tmp_path / "gone", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_card(path, ("m",), CAPABILITIES, chat_template=str(name))
    with pytest.raises(ConfigError, match="more than 1048576 characters"):
        read_card(path, ("m",), CAPABILITIES, chat_template="/dev/zero")
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(file))


def test_end_tokens_are_gathered_from_every_file(checkpoint):
    path = checkpoint(
        config={"text_config": {"eos_token_id": 9}},
        generation_config={"eos_token_id": [5, 7]},
        tokenizer={"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 4, "content": "<x>"}]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
    )
    assert card(path).eos_token_ids == (5, 7, 9, 3)


def test_end_tokens_outside_the_vocabulary_do_not_exist(checkpoint):
    path = checkpoint(generation_config={"eos_token_id": [100, -1]})
    assert card(path).eos_token_ids == (7,)


def test_recommended_sampling_becomes_the_defaults(checkpoint):
    path = checkpoint(
        generation_config={"temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 64}
    )
    assert card(path).defaults == GenerationDefaults(
        temperature=0.6, top_k=20, top_p=0.9, max_tokens=64
    )


def test_impossible_recommendations_are_ignored(checkpoint):
    path = checkpoint(
        generation_config={"top_k": -1, "top_p": 0.0, "repetition_penalty": 0, "max_new_tokens": 0}
    )
    assert card(path).defaults == GenerationDefaults()


@pytest.mark.parametrize(
    "recommended",
    [
        {"temperature": -1.0},
        {"temperature": 50},
        {"top_p": 7},
        {"top_k": 2**40},
        {"min_p": -0.1},
        {"repetition_penalty": -1},
        {"repetition_penalty": 1e9},
        {"max_new_tokens": -5},
    ],
)
def test_what_a_request_may_not_ask_for_is_not_recommended(checkpoint, recommended):
    assert card(checkpoint(generation_config=recommended)).defaults == GenerationDefaults()


def test_a_template_file_wins_over_the_entry(checkpoint):
    path = checkpoint(tokenizer_config={"chat_template": "entry"})
    assert card(path).chat_template == "entry"
    (path / "chat_template.jinja").write_text("file")
    assert card(path).chat_template == "file"


def test_an_older_template_file_wins_over_the_entry_too(checkpoint):
    path = checkpoint(
        tokenizer_config={"chat_template": "entry"}, chat_template={"chat_template": "older"}
    )
    assert card(path).chat_template == "older"
    (path / "chat_template.jinja").write_text("file")
    assert card(path).chat_template == "file"


def rendered(path):
    """What each named template of the card writes."""
    templates = ChatTemplates.from_card(card(path))
    user = [{"role": "user", "content": "x"}]
    return {name: templates.select(name).render(user) for name in templates.names}


def test_named_template_files_win_over_the_entries(checkpoint):
    own = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "old"}]
    path = checkpoint(tokenizer_config={"chat_template": own})
    assert rendered(path) == {"default": "d", "tool_use": "old"}
    (path / "chat_template.jinja").write_text("file")
    assert rendered(path) == {"default": "file"}
    folder = path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text("documents")
    assert rendered(path) == {"default": "file", "rag": "documents"}
    (path / "chat_template.jinja").unlink()
    assert rendered(path) == {"default": "d", "rag": "documents"}
    for number in range(40):
        (folder / f"{number}.jinja").write_text("x")
    with pytest.raises(ConfigError, match="more than 32 templates"):
        card(path)


def test_a_template_file_that_is_not_text_is_named(checkpoint):
    path = checkpoint()
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8"):
        card(path)


def test_special_tokens_may_be_in_a_file_of_their_own(checkpoint):
    path = checkpoint(
        special_tokens_map={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 3, "content": "<end>"}]},
    )
    assert card(path).eos_token_ids == (7, 3)


def test_a_tekken_file_becomes_the_tokenizer(checkpoint):
    words = [bytes([value]) for value in range(256)] + [b"th", b"the"]
    tekken = tekken_file(words, {1: "<s>", 2: "</s>"}, specials=10)
    path = checkpoint(tokenizer=None, tekken=json.loads(tekken), config={"eos_token_id": 2})
    found = card(path)
    tokenizer = Tokenizer.from_card(found)
    assert tokenizer.encode("the").tolist() == [1, 10 + 257]
    assert found.eos_token_ids == (7, 2)
    assert (tokenizer.special_tokens["bos_token"], tokenizer.eos_token_id) == ("<s>", 2)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<SPECIAL_4>"}')
    renamed = Tokenizer.from_card(card(path))
    assert renamed.token_to_id(renamed.special_tokens["bos_token"]) == 4


def test_a_tokenizer_of_the_usual_form_wins_over_tekken(checkpoint):
    path = checkpoint(tekken="not read")
    assert card(path).tokenizer_json == (path / "tokenizer.json").read_bytes()


def test_the_default_among_named_templates_is_taken(checkpoint):
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = checkpoint(tokenizer_config={"chat_template": templates})
    assert card(path).chat_template == "d"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config": "{"}, r"config\.json is not valid JSON"),
        ({"config": "[]"}, r"config\.json does not hold"),
        ({"config": None}, r"has no config\.json"),
        ({"tokenizer": None}, r"has no tokenizer\.json"),
        ({"tokenizer": "[]"}, r"tokenizer\.json is not valid"),
        ({"tokenizer": None, "tekken": "{}"}, r"tekken\.json is malformed"),
        ({"chat_template": []}, r"chat_template\.json is not valid"),
        ({"generation_config": {"temperature": "hot"}}, r"generation_config\.json is not valid"),
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json is not a JSON object"),
    ],
)
def test_a_broken_file_is_named(checkpoint, files, says):
    with pytest.raises(ConfigError, match=says):
        card(checkpoint(**files))


HERMES = "{% if tools %}write <tool_call>{'name': ..., 'arguments': ...}</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (None, "", ""),
        ("{{ messages }}", "", ""),
        (HERMES, "hermes", ""),
        ("{{ content.split('</think>')[-1] }}" + HERMES, "hermes", "think"),
    ],
)
def test_the_template_tells_how_markup_is_read(checkpoint, template, tools, reasoning):
    found = card(checkpoint(tokenizer_config={"chat_template": template} if template else {}))
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)


def test_a_template_for_tools_tells_of_tools(checkpoint):
    templates = [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": HERMES},
    ]
    assert card(checkpoint(tokenizer_config={"chat_template": templates})).tool_parser == "hermes"


def test_the_operator_knows_better(checkpoint):
    path = checkpoint(tokenizer_config={"chat_template": HERMES})
    found = read_card(path, ("main",), CAPABILITIES, tool_parser="none", reasoning_parser="think")
    assert (found.tool_parser, found.reasoning_parser) == ("", "think")


@pytest.mark.parametrize(
    ("template", "shows"), [("{% if tools %}{{ tools }}", True), ("{{ messages }}", False)]
)
def test_a_template_may_hide_tools_from_the_model(checkpoint, template, shows):
    assert shows_tools(card(checkpoint(tokenizer_config={"chat_template": template}))) is shows
