"""Makes `tokenizer.json` files of the kinds that are in use, for `encode_text.py`.

No published model's file is needed: `mistral_common` brings Mistral's two vocabularies,
`sentencepiece` reads the older one, and the steps before the vocabulary are those of the
families. WordPiece and Unigram are small ones that `tokenizers` trains.
"""

from __future__ import annotations

import json
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from pdserve.text.tokenization.tekken import from_tekken
from tests.text import builders
from tests.text.tokenization.test_fast_encoder import KINDS, with_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTE_LEVEL = ("llama3", "qwen", "deepseek")
"""Families whose steps stand before the vocabulary of tekken."""


def write_kinds(folder: Path) -> list[Path]:
    """The files, one of each kind; those of Mistral only where `mistral_common` is installed."""
    paths = []
    for name, content in _kinds():
        path = folder / f"{name}.json"
        path.write_bytes(content)
        paths.append(path)
    return paths


def _kinds() -> Iterator[tuple[str, bytes]]:
    yield "bundled", files("pdserve").joinpath("bundled", "tokenizer.json").read_bytes()
    found = find_spec("mistral_common")
    if found is not None and found.origin is not None:
        data = Path(found.origin).parent / "data"
        yield from _behind_tekken(max(data.glob("tekken_*.json")))
        yield "spm_v3", _from_sentencepiece(next(data.glob("*.model.v3")))
    for name, made in (("wordpiece", builders.wordpiece()), ("metaspace", builders.metaspace())):
        yield name, made.to_str().encode()


def _behind_tekken(path: Path) -> Iterator[tuple[str, bytes]]:
    content, _ = from_tekken(path.read_bytes())
    yield "tekken", content
    base: dict[str, Any] = json.loads(content)
    for name in BYTE_LEVEL:
        changes: dict[str, Any] = {"normalizer": {"type": "NFC"}} if name == "qwen" else {}
        yield name, with_steps(base, *KINDS[name], **changes)


def _from_sentencepiece(path: Path) -> bytes:
    """A BPE model of SentencePiece. Any two pieces that make a third are a merge; the third's rank
    is the merge's."""
    from sentencepiece import SentencePieceProcessor

    read = SentencePieceProcessor(model_file=str(path))
    pieces = [read.id_to_piece(number) for number in range(read.vocab_size())]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -read.get_score(vocab[piece]))
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    raw = Tokenizer(model)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    controls = [piece for piece in pieces if read.is_control(vocab[piece])]
    raw.add_special_tokens([AddedToken(piece, normalized=False) for piece in controls])
    return raw.to_str().encode()
