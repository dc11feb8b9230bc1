"""Tokenizes and decodes text for one model, from the files in its model card.

Wraps the `tokenizers` library and does the same as `transformers` with the same two files; only the
post-processor in tokenizer.json decides which first and last tokens are added. It opens no file,
and knows neither chats nor requests. One object serves a model while its card is the same.

`choose_encoder` lets the extension encode where it gives the same ids (`fast_encoder.py`).

Threads: encoding and decoding change nothing, so any number of threads may use one object. `encode`
and `encode_batch` release the interpreter lock while they work; `decode` does not.
"""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import tokenizers

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.text.tokenization.detokenizer import Detokenizer, make_detokenizer
from pdserve.text.tokenization.fast_encoder import choose_encoder
from pdserve.text.tokenization.slow_text import check_slow_texts
from pdserve.text.tokenization.token_bound import chars_per_token, split_text
from pdserve.text.tokenization.token_text_table import TokenTextTable, decoder_shape, is_panic
from pdserve.text.tokenization.tokenization_cache import (
    WORTH,
    WORTH_FAST,
    TokenizationCache,
    plan_cuts,
)
from pdserve.text.tokenization.tokenizer_config import TokenizerConfig, parse_tokenizer_config
from pdserve.token_ids import TokenIds, token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.messages.card import ModelCard
    from pdserve.text.tokenization.encoder_choice import EncoderChoice
    from pdserve.text.tokenization.fast_encoder import FastEncoder

# Without it the library warns on standard error when a process forks after a parallel encode.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

_BATCH_CHARS: Final = 1 << 20
"""Most characters passed to the library at once, which then needs about 150 bytes per character. A
single text may be longer."""
_SLICE_CHARS: Final = 1 << 18
"""Characters encoded at once when tokens are only counted."""
_SLICE_SLACK: Final = 64
"""Upper bound of the tokens that a cut may add."""
_MOST_IDS: Final = 1 << 24
"""Bound of a tokenizer's ids: its tables have an entry for each. Vocabularies have 2**18."""
_CONVERT = (
    "the model has no tokenizer.json; convert its tokenizer once with "
    "`python -c 'from transformers import AutoTokenizer as T; "
    'T.from_pretrained("MODEL").save_pretrained("MODEL")\'`'
)


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        pieces: TokenTextTable,
        config: TokenizerConfig,
        tokenizer_json: bytes,
    ) -> None:
        """Use `from_card` or `from_bytes`."""
        self._raw = raw
        self._pieces = pieces
        self._json = tokenizer_json
        self.config = config
        self._fast: FastEncoder | None = None
        self.segments: TokenizationCache | None = None
        """Cache of segments of earlier texts; None if texts cannot be cut, and before
        `choose_encoder`."""

    @classmethod
    def from_card(cls, card: ModelCard) -> Tokenizer:
        """Make the tokenizer of a model card. Raises `ConfigError`."""
        return cls.from_bytes(
            card.tokenizer_json, card.tokenizer_config_json, model_vocab_size=card.vocab_size
        )

    @classmethod
    def from_bytes(
        cls,
        tokenizer_json: bytes,
        tokenizer_config_json: bytes = b"{}",
        *,
        model_vocab_size: int = 0,
    ) -> Tokenizer:
        """Make a tokenizer from the two files' contents.

        `model_vocab_size` is the number of ids the model can produce; those beyond the tokenizer's
        own decode to nothing. Raises `ConfigError` when a file is missing or cannot be used.
        """
        if not tokenizer_json.strip():
            raise ConfigError(_CONVERT)
        config = parse_tokenizer_config(tokenizer_config_json)
        try:
            raw = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            shape = decoder_shape(tokenizer_json)
        except Exception as error:
            # The library raises a plain `Exception` for every reason.
            raise ConfigError(f"tokenizer.json cannot be used: {error}") from None
        raw.no_padding()
        raw.no_truncation()
        _add_tokens(raw, config)
        highest = _highest_id(raw)
        if highest >= _MOST_IDS:
            raise ConfigError(f"tokenizer.json cannot be used: it has a token of id {highest}")
        size = max(model_vocab_size, highest + 1)
        pieces = TokenTextTable(raw, shape, size, _special_ids(raw))
        return cls(raw, pieces, config, tokenizer_json)

    # ---------------------------------------------------------------- properties

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, added ones included; the model may have more rows."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def json(self) -> bytes:
        """Content of its `tokenizer.json`."""
        return self._json

    @cached_property
    def digest(self) -> bytes:
        """Digest (16 bytes) that identifies this tokenizer."""
        return hashlib.blake2b(self._json, digest_size=16).digest()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._pieces.special

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token` ... -> content, as chat templates see them."""
        return self.config.special_tokens

    @property
    def eos_token_id(self) -> int | None:
        content = self.config.special_tokens.get("eos_token")
        return None if content is None else self._raw.token_to_id(content)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as written in the vocabulary; None if it is unknown."""
        return self._raw.token_to_id(token)

    def token_name(self, token_id: int) -> str:
        """The token as written in the vocabulary; empty for an unknown id."""
        return self._raw.id_to_token(token_id) or ""

    # ---------------------------------------------------------------- text to ids

    def choose_encoder(self) -> EncoderChoice:
        """Encode by the extension from now on, if it covers this tokenizer and gives the same ids.

        Takes tenths of a second: run it off the event loop. Idempotent. Other threads may encode
        meanwhile.
        """
        choice, self._fast = choose_encoder(self._json, self._raw)
        cuts = plan_cuts(self._raw)
        if cuts is not None:
            shortest = WORTH if self._fast is None else WORTH_FAST
            self.segments = TokenizationCache(cuts, shortest=shortest)
        return choice

    @property
    def is_fast(self) -> bool:
        """Whether the extension encodes."""
        return self._fast is not None

    def encode(self, text: str, add_special_tokens: bool = True, salt: str = "") -> TokenIds:
        """Return the token ids of `text`. Raises `InvalidRequest` for a lone surrogate, `SlowText`
        where `slow_text.run_in_place` says so.

        `salt`: cached segments are used only if they were encoded with the same salt.

        Contents of special tokens inside the text become those tokens, as chat templates need. With
        `add_special_tokens` the tokenizer's first and last tokens are added; leave it off for the
        output of a chat template, which has them already.
        """
        segments = self.segments
        if segments is not None and not add_special_tokens and len(text) >= segments.shortest:
            return segments.encode(text, self._encode_pieces, salt)
        return self.encode_batch([text], add_special_tokens)[0]

    def _encode_pieces(self, texts: Sequence[str]) -> list[TokenIds]:
        return self.encode_batch(texts, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[TokenIds]:
        """`encode` for several texts at once. Raises as `encode` does."""
        found: list[TokenIds] = []
        for batch in _batches(texts):
            found += self._encode_at_once(batch, add_special_tokens)
        return found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TokenIds]:
        """Return the token ids of pairs of texts, joined as the tokenizer's post-processor says.
        Raises `InvalidRequest` for a lone surrogate."""
        return self._encode_slowly(list(pairs), add_special_tokens=True)

    def _encode_at_once(self, texts: list[str], add_special_tokens: bool) -> list[TokenIds]:
        fast = self._fast
        if fast is None:
            return self._encode_slowly(texts, add_special_tokens)
        try:
            found = [fast.encode(text, add_special_tokens) for text in texts]
        except UnicodeEncodeError:
            raise InvalidRequest("text must be valid Unicode") from None
        check_slow_texts(text for text, ids in zip(texts, found, strict=True) if ids is None)
        return [
            self._encode_slowly([text], add_special_tokens)[0] if ids is None else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def _encode_slowly(
        self, texts: list[str] | list[tuple[str, str]], add_special_tokens: bool
    ) -> list[TokenIds]:
        try:
            # A single text is passed as a batch too, because only batches release the GIL.
            encodings = self._raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("text must be valid Unicode") from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequest(f"the tokenizer cannot process the text: {error}") from None
        return [token_ids(encoding.ids) for encoding in encodings]

    def fewest_tokens(self, chars: int) -> int:
        """Fewest tokens that a text of `chars` characters can have; 0 if no bound is certain.

        The first call reads the whole vocabulary, so run it off the event loop.
        """
        bound = self._chars_per_token
        return 0 if bound is None else -(-chars // bound)

    def count_up_to(self, text: str, enough: int) -> int:
        """Count the tokens of `text` and stop above `enough`; returns a lower bound. Needs memory
        for one slice at a time. Raises `InvalidRequest` for a lone surrogate."""
        count = 0
        for part in split_text(text, _SLICE_CHARS):
            (ids,) = self._encode_at_once([part], add_special_tokens=False)
            count += max(0, len(ids) - _SLICE_SLACK)
            if count > enough:
                break
        return count

    @cached_property
    def _chars_per_token(self) -> int | None:
        return chars_per_token(self._json, self._raw)

    # ---------------------------------------------------------------- ids to text

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Return the text of `ids` as a text of its own; ids that the vocabulary lacks have none.

        With `spaces_between_special_tokens` off, a special token directly after another one is
        written without the space that some decoders put between tokens.
        """
        stream = self.detokenizer(
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return stream.feed_many(ids) + stream.flush()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
        keep: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Make an incremental detokenizer for one sequence.

        `prompt`: the ids whose text the output continues, for decoders that drop a space at the
        start of a text. A completion continues its prompt; a chat message is a text of its own, so
        pass nothing for it. `keep`: special ids that are shown although others are skipped; each
        such set takes a table, so a model may have only a few of them.
        """
        return make_detokenizer(
            self._pieces,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            prompt=prompt,
            keep=keep,
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token, for a person or a logprobs entry: special tokens are shown, bytes
        that are no character by themselves appear as U+FFFD. Empty for an unknown id."""
        text = self._pieces.all.text(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if text is None else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes behind `token_text`; joined over all tokens they are the text's UTF-8."""
        return self._pieces.raw_bytes(token_id)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield neighbouring texts, as many as may be encoded at once; at least one."""
    batch: list[str] = []
    chars = 0
    for text in texts:
        if batch and chars + len(text) > _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
        batch.append(text)
        chars += len(text)
    if batch:
        yield batch


def _add_tokens(raw: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add the tokens that only tokenizer_config.json lists, or lists as special."""
    present = {token.content: token for token in raw.get_added_tokens_decoder().values()}
    for entry in config.added_tokens:
        if entry.get("content") not in present:
            _add_at_id(raw, dict(entry))
    special = {content: present.get(content) for content in config.extra_special_tokens}
    special = {content: None for content, known in special.items() if known is None}
    for content in config.special_tokens.values():
        known = present.get(content)
        if known is None or not known.special:
            special[content] = known
    for content, known in special.items():
        # A token not in the vocabulary would get an id that the model does not have.
        if raw.token_to_id(content) is not None:
            raw.add_special_tokens([known or content])


def _add_at_id(raw: tokenizers.Tokenizer, entry: dict[str, Any]) -> None:
    expected = entry.pop("id")
    try:
        token = tokenizers.AddedToken(**entry)
    except TypeError as error:
        raise ConfigError(f"tokenizer_config.json: token {expected}: {error}") from None
    (raw.add_special_tokens if token.special else raw.add_tokens)([token])
    actual = raw.token_to_id(token.content)
    if actual != expected:
        raise ConfigError(
            f"tokenizer_config.json gives {token.content!r} the id {expected}, "
            f"tokenizer.json the id {actual}"
        )


def _highest_id(raw: tokenizers.Tokenizer) -> int:
    added = max(raw.get_added_tokens_decoder(), default=-1)
    count = raw.get_vocab_size(with_added_tokens=True)
    # Ids are dense, except in tokenizers edited by hand, for which the whole map is read.
    if raw.id_to_token(count - 1) is not None and added < count:
        return count - 1
    return max(raw.get_vocab(with_added_tokens=True).values(), default=-1)


def _special_ids(raw: tokenizers.Tokenizer) -> frozenset[int]:
    added = raw.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
