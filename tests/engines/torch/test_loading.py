"""What loading costs: memory once, and never the event loop's breath. In a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import transformers

from pdserve import accel
from tests.engines.torch.checkpoints import Tiny, build

WATCH = """
    import sys
    from pathlib import Path
    from pdserve_engines.torch import create
    from tests.engines.torch.driver import spec

    def private():
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024

    executor = create()
    before, peak = private(), 0

    def watch(stage, fraction):
        global peak
        peak = max(peak, private() - before)

    info = executor.load(spec(Path(sys.argv[1]), options={"kernels": sys.argv[2]}), watch)
    print(info.weight_bytes, peak, private() - before)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 MB of weights, so that what is not weights does not count."""
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    model = build(Tiny("Llama", fields | {"vocab_size": 2000, "max_position_embeddings": 64}))
    path = tmp_path_factory.mktemp("loading")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("kernels", ["torch", "native"] if accel.NATIVE else ["torch"])
def test_weights_are_in_memory_once_while_loading_and_after(directory: Path, kernels: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WATCH), directory, kernels],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
        cwd=Path(__file__).parents[3],
    )
    weights, peak, after = map(int, found.stdout.split())
    assert weights > 50e6
    # Large pages and the allocators' slack are the rest.
    assert peak < weights * 1.3 + 20e6
    assert after < weights * 1.3 + 20e6


def test_no_transformers_and_no_compiler_are_needed_to_serve(directory: Path) -> None:
    """The oracle of these tests is no dependency: importing and loading must not pull it in. Nor
    torch's compiler, which would double the time that the import takes."""
    assert transformers is not None
    program = f"""
        import sys
        from pathlib import Path
        from pdserve_engines.torch import create
        from pdserve.messages.engine import EngineSpec

        executor = create()
        executor.load(EngineSpec(engine="torch", model={str(directory)!r}), lambda s, f: None)
        executor.close()
        loaded = {{name.partition(".")[0] for name in sys.modules}}
        assert not loaded & {{"transformers", "safetensors", "huggingface_hub"}}, loaded
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=50)
