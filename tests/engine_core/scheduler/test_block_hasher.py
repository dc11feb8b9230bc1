"""Block names of a sequence are those of the hashing scheme, each computed once."""

from __future__ import annotations

from pdserve.blocks.hashing import HASH_SECRET_TEST, block_hashes, root_hash
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids

REQUEST = GenerateRequest(
    request_id="r", model="m", prompt=token_ids([1]), sampling=SamplingParams(max_tokens=1)
)


def sequence(names: BlockHasher, tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(1, 0, REQUEST, token_ids(tokens), len(tokens), 0.0, root=names.root(salt))


def test_names_agree_with_a_direct_computation():
    names = BlockHasher(HASH_SECRET_TEST, 4, "compat")
    tokens = list(range(19))
    parent = root_hash(HASH_SECRET_TEST, "compat", None, "tenant")
    expected = block_hashes(tokens, 4, parent=parent, secret=HASH_SECRET_TEST)
    subject = sequence(names, tokens, "tenant")
    assert names.of(subject, 1) == expected[:1]
    assert names.of(subject, 4) == expected
    assert names.of(subject, 2) == expected  # what is known stays known


def test_models_tenants_adapters_and_secrets_have_different_roots():
    one, other = (BlockHasher(HASH_SECRET_TEST, 4, model) for model in ("a", "b"))
    secret = BlockHasher(b"another secret", 4, "a")
    roots = {one.root(""), one.root("t"), other.root(""), secret.root("")}
    roots |= {one.root("", "t"), one.root("t", "t"), one.root("", "t@2")}
    assert len(roots) == 7


def test_only_full_blocks_have_names():
    names = BlockHasher(HASH_SECRET_TEST, 4, "compat")
    assert len(names.of(sequence(names, list(range(7))), 1)) == 1
