"""Says how far a worker's tokens may differ from another worker's. Pure.

The last bits of a logit depend on the order of sums, so on kernels, ranks and the rest of the
batch. What a worker promises follows from how it computes alone, and goes to its peers in its
card's features. docs/reliability.md has the promises in words.
"""

from __future__ import annotations

from typing import Final

from pdserve.messages.card import CLOSE_PREFIX, EXACT_PREFIX

__all__ = ["LOGITS_WITHIN", "NEAR_TIE", "token_promises"]

LOGITS_WITHIN: Final = 1e-4
"""Largest difference between two workers' logits for the same tokens, if both are close."""
NEAR_TIE: Final = 1e-3
"""Two close workers choose the same token if the scores of its two best candidates differ by more.
A score is a logit after penalties, plus temperature times noise. The distance of two scores differs
by up to twice `LOGITS_WITHIN`, and penalties enlarge it."""


def token_promises(
    *,
    row_kernels: str,
    dtype: str,
    kv_cache_dtype: str,
    experts: bool,
    ranks: int,
    matmul_precision: str,
) -> tuple[str, ...]:
    """The entries of `ModelCard.features` for a model that is computed so; none: near ties may fall
    either way, and no bound is known.

    Args: `row_kernels` is `ForwardModel.exact`; `dtype` that of the activations; `kv_cache_dtype`
    as in `TorchSettings`; `experts`: each token chooses experts; `matmul_precision` is torch's for
    products in float32, `highest` unless the process was told otherwise.
    """
    exact = (f"{EXACT_PREFIX}{row_kernels}",) if row_kernels and ranks == 1 else ()
    if dtype != "float32" or kv_cache_dtype != "auto":
        # A difference in the last bit may round to the next number of the narrower format.
        return exact
    if experts or (not exact and matmul_precision != "highest"):
        # Near ties of experts change whole logits. Lower precision is TF32 or bfloat16 inside of
        # products; some containers of NVIDIA's set it.
        return exact
    return (*exact, f"{CLOSE_PREFIX}{dtype}")
