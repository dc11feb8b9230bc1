import asyncio
import threading
import traceback

import pytest

from pdserve.errors import (
    ConfigError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    NoWorker,
    Overloaded,
)
from pdserve.frontend.access.api_keys import ApiKey
from pdserve.frontend.model_registry import ModelRegistry, PreparedModel, fingerprint
from pdserve.messages.lora import LoraSummary
from pdserve.text.text_pool import TextPool
from tests.frontend.support import card
from tests.support.fake_backend import FakeBackend


@pytest.fixture
async def pool():
    pool = TextPool()
    yield pool
    await pool.close()


def directory(pool, *cards, unready=None):
    backend = FakeBackend({card.name: card for card in cards}, unready=unready)
    return backend, ModelRegistry(backend, pool)


async def test_a_model_is_made_once_however_many_ask(pool, monkeypatch):
    made = []
    real = PreparedModel.from_card

    def from_card(card, modules):
        made.append(card)
        return real(card, modules)

    monkeypatch.setattr(PreparedModel, "from_card", from_card)
    tiny = card()
    _, models = directory(pool, tiny)
    assert models.get_nowait(tiny) is None
    first, *others = await asyncio.gather(*(models.get(tiny) for _ in range(5)))
    assert all(other is first for other in others)
    assert models.get_nowait(tiny) is first
    assert made == [tiny]


async def test_one_who_stops_waiting_does_not_stop_the_others(pool):
    tiny = card()
    _, models = directory(pool, tiny)
    impatient = asyncio.ensure_future(models.get(tiny))
    patient = asyncio.ensure_future(models.get(tiny))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).card is tiny
    assert impatient.cancelled()


async def test_a_new_card_of_the_same_name_is_a_new_model(pool):
    backend, models = directory(pool, card())
    await models.prepare()
    old = models.get_nowait(models.card("tiny"))
    backend.models = {"tiny": card(max_model_len=7)}
    assert models.get_nowait(models.card("tiny")) is None
    await models.prepare()
    new = models.get_nowait(models.card("tiny"))
    assert old is not None
    assert new is not None
    assert new.card.max_model_len == 7
    assert models.get_nowait(old.card) is None


async def test_a_card_that_cannot_be_made_fails_once_and_is_remembered(pool, caplog):
    broken = card(name="broken", tokenizer_json=b"{}")
    _, models = directory(pool, broken, card())
    for _ in range(3):
        await models.prepare()
    assert caplog.text.count("model broken cannot be served") == 1
    with pytest.raises(ConfigError):
        await models.get(broken)
    assert models.get_nowait(models.card("tiny")) is not None


async def test_asking_for_a_failed_model_again_and_again_leaves_nothing_behind(pool):
    broken = card(name="broken", tokenizer_json=b"{}")
    _, models = directory(pool, broken)
    for _ in range(3):
        with pytest.raises(ConfigError) as caught:
            await models.get(broken)
        # An exception that is raised again keeps the frames of every time before.
        frames = len(traceback.extract_tb(caught.value.__traceback__))
    assert frames == 2


async def test_a_fault_in_making_a_model_is_its_end_and_no_one_elses(pool, monkeypatch, caplog):
    def from_card(card, modules):
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(PreparedModel, "from_card", from_card)
    tiny = card()
    _, models = directory(pool, tiny)
    for _ in range(3):
        await models.prepare()
    assert caplog.text.count("Traceback") == 1
    with pytest.raises(ConfigError, match="RuntimeError: not foreseen"):
        await models.get(tiny)


async def test_a_model_is_made_however_many_texts_wait(pool):
    tiny = card()
    _, models = directory(pool, tiny)
    release = threading.Event()
    busy = [asyncio.ensure_future(pool.run(1 << 20, release.wait, 10)) for _ in range(256)]
    await asyncio.sleep(0)
    assert (await models.get(tiny)).card is tiny
    release.set()
    outcomes = await asyncio.gather(*busy, return_exceptions=True)
    assert sum(isinstance(each, Overloaded) for each in outcomes) == 1  # it made room


async def test_a_model_whose_making_found_no_place_is_made_later(pool, monkeypatch):
    tiny = card()
    _, models = directory(pool, tiny)
    monkeypatch.setattr(pool.texts, "_max_jobs", 0)
    with pytest.raises(Overloaded):
        await models.get(tiny)
    monkeypatch.undo()
    assert (await models.get(tiny)).card is tiny


async def test_closing_cancels_what_is_being_made(pool):
    tiny = card()
    _, models = directory(pool, tiny)
    waiting = asyncio.ensure_future(models.get(tiny))
    await asyncio.sleep(0)
    await models.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_key_sees_its_models_only_by_any_of_their_names(pool):
    served = card(aliases=("default", "tiny-v1"))
    backend, models = directory(pool, served, card(name="secret"))
    backend.models |= {"default": served, "tiny-v1": served}
    key = ApiKey(digest=b"", tenant="t", models=frozenset({"default"}))
    assert models.card("default", key) is served
    assert models.card("tiny", key) is served
    assert models.card(None, key) is served  # the only one, for this key
    assert [model.id for model in models.listing(key)] == ["tiny", "default", "tiny-v1"]
    with pytest.raises(Forbidden, match="may not use the model 'secret'"):
        models.card("secret", key)
    with pytest.raises(ModelNotFound) as caught:
        models.card("x", key)
    assert "secret" not in caught.value.message
    nothing = ApiKey(digest=b"", tenant="t", models=frozenset({"elsewhere"}))
    assert models.listing(nothing) == []
    with pytest.raises(ModelNotFound, match="served: nothing that this API key may use"):
        models.card("x", nothing)
    with pytest.raises(Forbidden, match="none of the models"):
        models.card(None, nothing)


async def test_names_are_looked_up(pool):
    backend, models = directory(pool, card(), card(name="big"))
    assert models.card("big").name == "big"
    with pytest.raises(ModelNotFound):
        models.card("x")
    with pytest.raises(InvalidRequest):
        models.card(None)
    backend.models = {}
    backend.unready = "loading"
    with pytest.raises(NotReady, match="loading"):
        models.card("big")


async def test_without_a_name_a_model_that_is_only_remembered_does_not_count(pool, monkeypatch):
    cards = {name: card(name=name) for name in ("here", "gone")}
    backend = FakeBackend(cards)
    directory = ModelRegistry(backend, pool)
    with pytest.raises(InvalidRequest, match="served: gone, here"):
        directory.card(None)
    refusals = {"gone": NoWorker("its last worker is gone")}
    monkeypatch.setattr(FakeBackend, "refusal", lambda self, asked: refusals.get(asked.name))
    assert directory.card(None) is cards["here"]


def test_the_fingerprint_changes_with_what_decides_answers():
    assert fingerprint(card()) == fingerprint(card(created=5))
    prints = {fingerprint(card(**change)) for change in ({}, {"dtype": "x"}, {"engine": "y"})}
    assert len(prints) == 3


# ---------------------------------------------------------------------- adapters


def adapted(**changes):
    loras = (LoraSummary(name="clerk", revision="2"), LoraSummary(name="poet", revision="1"))
    return card(loras=loras, **changes)


def served(pool, model):
    """A backend with the model under every name, as discovery gives it."""
    backend, models = directory(pool, model)
    names = (*model.aliases, *(lora.name for lora in model.loras))
    backend.models = {model.name: model} | dict.fromkeys(names, model)
    return backend, models


async def test_adapters_are_listed_behind_their_model(pool):
    _, models = served(pool, adapted(aliases=("default",)))
    assert [(one.id, one.root, one.parent) for one in models.listing()] == [
        ("tiny", "tiny", None),
        ("default", "tiny", None),
        ("clerk", "clerk@2", "tiny"),
        ("poet", "poet@1", "tiny"),
    ]


async def test_an_adapter_has_its_models_tokenizer_and_a_fingerprint_of_its_own(pool):
    tiny = adapted()
    _, models = served(pool, tiny)
    model = await models.get(models.card("poet"))
    poet, clerk = model.adapted("poet"), model.adapted("clerk")
    assert poet.tokenizer is clerk.tokenizer is model.tokenizer
    assert [one.lora for one in (model, poet, clerk)] == ["", "poet@1", "clerk@2"]
    assert len({one.fingerprint for one in (model, poet, clerk)}) == 3
    assert model.adapted("tiny") is model.adapted(None) is model


async def test_a_request_without_a_model_is_for_the_model_itself(pool):
    tiny = adapted()
    backend, models = served(pool, tiny)
    assert models.card(None) is tiny
    only_poet = ApiKey(digest=b"", tenant="t", models=frozenset({"poet"}))
    assert models.card("poet", only_poet) is tiny
    with pytest.raises(InvalidRequest, match="'model' is required; served: poet"):
        models.card(None, only_poet)
    only_tiny = ApiKey(digest=b"", tenant="t", models=frozenset({"tiny"}))
    assert models.card(None, only_tiny) is tiny
    with pytest.raises(Forbidden, match="may not use the model 'poet'"):
        models.card("poet", only_tiny)
    assert [one.id for one in models.listing(only_tiny)] == ["tiny"]
    backend.unready = "no worker"
    assert models.card(None) is tiny


async def test_an_unknown_name_is_refused_with_the_nearest_known_one(pool):
    _, models = served(pool, adapted())
    with pytest.raises(ModelNotFound, match="'poem' is not served here, did you mean 'poet'"):
        models.card("poem")
    for name in ("gpt-4", "poet" * 1000):
        with pytest.raises(ModelNotFound, match="is not served here; served: clerk, poet, tiny"):
            models.card(name)


async def test_adapters_come_and_go_without_making_the_model_again(pool, monkeypatch):
    backend, models = served(pool, adapted())
    await models.prepare()
    before = models.get_nowait(models.card("tiny"))
    monkeypatch.setattr(PreparedModel, "from_card", None)
    later = card(features=("lora",))
    backend.models = {"tiny": later}
    await models.prepare()
    after = models.get_nowait(later)
    assert after is not None
    assert after.card is later
    assert after.tokenizer is before.tokenizer
    assert models.get_nowait(before.card) is not None, "a request that has begun may still ask"


@pytest.mark.parametrize("told", [True, False])
async def test_code_that_only_a_worker_names_is_not_imported(pool, caplog, told):
    place = "pdserve.text.tool_parsers.json_calls.hermes:Hermes"
    backend = FakeBackend({"m": card(name="m", tool_parser=place)})
    models = ModelRegistry(backend, pool, {place} if told else set())
    model = await models.get(models.card("m"))
    assert (model.tools is not None) is told
    assert told or f"start it with --tool-parser={place}" in caplog.text
    await models.close()
