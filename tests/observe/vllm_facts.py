"""Reads vLLM's own names from its source: name, kind and labels of each metric.

    .venv-vllm/bin/python -m tests.observe.vllm_facts > tests/observe/vllm_metrics.toml

Only `vllm/v1/metrics/loggers.py` is read, as text; nothing of vLLM is imported.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Final

_KINDS: Final = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}
_LABELS: Final = ("model_name", "engine")
"""What the variable `labelnames` holds there."""


_CONFIG: Final = ("block_size", "num_gpu_blocks")
"""Of its `CacheConfig`: those fields that others read from the metric."""


def facts(source: str) -> dict[str, tuple[str, ...]]:
    """Kind and labels by name, as on the page: counters end with `_total`."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = _KINDS.get(node.func.attr)
            words = {one.arg: one.value for one in node.keywords}
            name = words.get("name")
            if kind and isinstance(name, ast.Constant) and isinstance(name.value, str):
                full = name.value.removeprefix("vllm:")
                full += "_total" if kind == "counter" else ""
                found[full] = (kind, *_labels(words["labelnames"]))
    if '"vllm:cache_config_info"' in source:
        # Its name and its labels are values of variables; the latter are the fields of a config.
        found["cache_config_info"] = ("gauge", "engine", *_CONFIG)
    return dict(sorted(found.items()))


def _labels(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Name):
        return _LABELS
    if isinstance(node, ast.BinOp):
        return _labels(node.left) + _labels(node.right)
    if isinstance(node, ast.List):
        return tuple(str(one.value) for one in node.elts if isinstance(one, ast.Constant))
    return ()


def installed() -> str:
    """The source of the installed vLLM. Errors: `ModuleNotFoundError`."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("vllm")
    return (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()


if __name__ == "__main__":
    (distribution,) = importlib.metadata.packages_distributions()["vllm"]
    version = importlib.metadata.version(distribution)
    print(f"# The metrics of vLLM {version}: kind, then labels.")
    for metric, words in facts(installed()).items():
        print(f"{metric} = {str(list(words)).replace(chr(39), chr(34))}")
