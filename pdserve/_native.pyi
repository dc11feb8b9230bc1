"""Types of the compiled extension (native/src/bindings.cpp). Import it through pdserve.accel."""

from array import array
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import TypeVar

_K = TypeVar("_K")

def block_hashes(
    tokens: Sequence[int] | bytes | memoryview, block_size: int, secret: bytes, parent: bytes
) -> bytes: ...
def largest_id(tokens: array[int]) -> int: ...
def short_names(hashes: bytes) -> bytes: ...
def copy_runs(
    destination: memoryview | bytearray | mmap,
    source: memoryview | bytes | bytearray | mmap,
    to: memoryview | array[int],
    from_: memoryview | array[int],
    lengths: memoryview | array[int],
    streaming: bool = False,
) -> int: ...
def copy_summed(
    destination: memoryview | bytearray | mmap,
    source: memoryview | bytes | bytearray | mmap,
    to: memoryview | array[int],
    from_: memoryview | array[int],
    lengths: memoryview | array[int],
    streaming: bool = False,
    start: int = 0,
) -> int: ...
def crc32_runs(
    memory: memoryview | bytes | bytearray | mmap,
    from_: memoryview | array[int],
    lengths: memoryview | array[int],
    start: int = 0,
) -> int: ...
def bind_runs(
    source: array[int],
    destination: array[int],
    spans: array[int],
    here: int,
    there: int,
    out_source: array[int],
    out_destination: array[int],
    out_length: array[int],
) -> int: ...
def convert_layout(
    map: array[int],
    destination: Sequence[memoryview | bytearray | mmap],
    source: Sequence[memoryview | bytes | bytearray | mmap],
    destination_planes: array[int],
    source_planes: array[int],
    destination_blocks: array[int],
    source_blocks: array[int],
    first: int,
    count: int,
) -> int: ...
def crc32_here() -> bool: ...
def crc32_wide(wanted: bool) -> None: ...
def crc32(data: memoryview | bytes | bytearray, start: int = 0) -> int: ...
def cpu_kernel_sets() -> list[str]: ...

class BpeEncoder:
    """Encodes text by byte-level BPE; `tokenizers` is its twin (pdserve/text/tokenization).

    Arguments as in byte_level_bpe.py and split_pattern.py; `classes` has a byte for each code
    point.
    Raises ValueError for what does not fit together. Memory is fixed after construction.
    """

    def __init__(
        self,
        *,
        classes: bytes,
        patterns: Sequence[
            tuple[
                Sequence[tuple[int, int, int, bool, Sequence[tuple[int, int]]]],
                Sequence[tuple[int, int, int, int]],
                Sequence[int],
                Sequence[int],
                bool,
            ]
        ],
        merges: bytes,
        bytes: Sequence[int],
        added: Sequence[tuple[bytes, int]],
        whole: Sequence[tuple[bytes, int]],
    ) -> None: ...
    def encode(self, text: str) -> bytes | None: ...

class CpuModel:
    """Forward passes on the CPU; twin of pdserve_engines/torch/models/torch_model.py, which says
    what it does.

    Arrays are C-contiguous numpy arrays of int32 or float32. Raises ValueError for anything that
    does not fit; releases the GIL while it computes.
    """

    def __init__(
        self,
        *,
        bfloat16: bool,
        layers: int,
        hidden: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        epsilon: float,
        tied: bool,
        threads: int,
        kernels: str = "",
        windows: Sequence[int] = (),
        ropes: Sequence[int] = (),
        sparse: Sequence[bool] = (),
        experts: int = 0,
        experts_per_token: int = 0,
        experts_inner: int = 0,
        experts_normalized: bool = False,
        activation: str = "silu",
        alpha: float = 1.0,
        limit: float = 0.0,
        out_norms: bool = False,
        embed_scale: float = 1.0,
        query_scale: float = 0.0,
        softcap: float = 0.0,
        logits_softcap: float = 0.0,
        in_norms: bool = True,
        layer_norms: bool = False,
        whole_qk_norm: bool = False,
        parallel: bool = False,
        residual_scale: float = 1.0,
        logit_scale: float = 1.0,
        query_beta: float = 0.0,
        query_span: int = 1,
    ) -> None:
        """`windows` (0: none), `ropes` (which rotary table) and `sparse` (has experts) are empty or
        have an entry for each layer. `activation`: silu, gelu, or swiglu with `alpha` and `limit`.
        A `query_scale` of 0 is the one of `head_dim`; a soft cap of 0 is none."""

    @property
    def kernels(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def sharers(self) -> int:
        """How many models the weights are shared by, this one included."""

    def sibling(self, threads: int) -> CpuModel:
        """A model with the same weights, which it shares, and nothing else in common: it needs a
        rotary table and a pool. The weights are freed with the last of those that share them."""

    def place(self, name: str, layer: int, at: int, rows: int, data: object) -> None: ...
    def set_rope(self, table: object, which: int = 0) -> None: ...
    def bind(
        self, pool: object, blocks: int, block_size: int, fp8_scales: Sequence[float] = ()
    ) -> None:
        """`fp8_scales`: those of each layer's keys and values, one after the other, if the pool
        holds FP8 (E4M3)."""

    def close(self) -> None: ...
    def forward(
        self,
        tokens: object,
        positions: object,
        offsets: object,
        starts: object,
        tables: object,
        table_offsets: object,
        rows: object,
        out: object,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """`after` is called in this thread after each layer, with how many are done."""

    def logits(self, hidden: object, out: object) -> None: ...
    def greedy(
        self,
        tokens: object,
        positions: object,
        offsets: object,
        starts: object,
        tables: object,
        table_offsets: object,
        rows: object,
        after: Callable[[int], None] | None = None,
    ) -> list[int]: ...

class RadixTree:
    """Blocks to the workers that hold them; twin of pdserve/router/prefix_index/radix_tree.py."""

    def __init__(self, max_blocks: int) -> None: ...
    def __len__(self) -> int: ...
    def stored(
        self, worker: int, tier: int, parent: int | None, names: bytes | memoryview
    ) -> int: ...
    def removed(self, worker: int, tier: int, names: bytes | memoryview) -> int: ...
    def cleared(self, worker: int, tier: int) -> int: ...
    def drop(self, worker: int) -> int: ...
    def match(self, names: bytes | memoryview) -> dict[int, int]: ...
    def match_into(self, names: bytes | memoryview, depths: array[int]) -> int: ...
    def match_as(self, names: bytes | memoryview, shown: dict[int, _K]) -> dict[_K, int]: ...
    def match_tiers(self, names: bytes | memoryview) -> dict[int, tuple[int, int, int]]: ...
    def blocks(self, worker: int) -> int: ...
    def numbers(self) -> tuple[int, int, int, int, int]: ...

class SendTable:
    """Work requests as C structures; twin of pdserve/transfer/rdma/work_requests.py, which says
    what it does. Raises ValueError for what leaves its arrays, its table or a region."""

    def __init__(self, depth: int) -> None: ...
    @property
    def depth(self) -> int: ...
    def fill(
        self,
        at: int,
        stop: int,
        source: array[int],
        destination: array[int],
        length: array[int],
        run: int,
        done: int,
        ours: array[int],
        theirs: array[int],
    ) -> tuple[int, int, int]: ...
    def empty(self, at: int, word: int, theirs: array[int]) -> None: ...
    def post(
        self, function: int, pair: int, count: int, first: int, every: int
    ) -> tuple[int, int]: ...
    def row(self, at: int) -> tuple[int, int, int, int, int, int, int, int, int, int]: ...

def post_receives(function: int, pair: int, count: int) -> int: ...
def poll_completions(function: int, queue: int) -> list[tuple[int, int, int, int, int]]: ...
