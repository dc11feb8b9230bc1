"""Siblings: one copy of the weights, two pools, two threads, and no order in which to close."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import pytest

from pdserve import accel
from pdserve.errors import ConfigError
from pdserve_engines.torch.models.cpu_model import CpuModel
from pdserve_engines.torch.models.torch_model import TorchModel
from tests.engines.torch.checkpoints import RARE, VOCAB, WITH_KERNELS, checkpoint, oracle_generate
from tests.engines.torch.driver import Driver, loaded, spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_engines.torch.executor import TorchExecutor

KERNELS = ["torch", "native"] if accel.NATIVE else ["torch"]
every_kernels = pytest.mark.parametrize("kernels", KERNELS)


def pair(name: str, kernels: str, threads: int = 1) -> tuple[TorchExecutor, TorchExecutor]:
    """Two executors over one copy of the weights; their pools and limits differ."""
    directory, options = checkpoint(name)[0], {"kernels": kernels}
    first = loaded(directory, 64, options=options, threads=threads)
    second = first.sibling()
    stages: list[str] = []
    wanted = spec(directory, options=options, threads=threads, block_size=4, max_model_len=128)
    second.load(wanted, lambda stage, fraction: stages.append(stage))
    second.allocate(96)
    assert stages == ["sharing the weights of another worker"]
    return first, second


def prompts(seed: int, count: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB), k=rng.randint(2, 40)) for _ in range(count)]


def outputs(executor: TorchExecutor, wanted: Sequence[list[int]], chunk: int) -> list[list[int]]:
    driver = Driver(executor)
    sequences = [driver.add(prompt) for prompt in wanted]
    driver.finish(sequences, 12, chunk)
    for sequence in sequences:
        driver.drop(sequence)
    return [sequence.tokens[sequence.prompt_len :][:12].tolist() for sequence in sequences]


@pytest.mark.parametrize(
    ("name", "kernels"), [row for row in WITH_KERNELS if row.values[0] not in RARE]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_two_that_compute_at_once_get_what_each_would_alone(name: str, kernels: str, threads: int):
    executors = pair(name, kernels, threads)
    model = checkpoint(name)[1]
    wanted = [prompts(8), prompts(9)]
    expected = [[oracle_generate(model, prompt, 12) for prompt in each] for each in wanted]
    found: list[list[list[list[int]]]] = [[], []]

    def run(number: int) -> None:
        executors[number].prepare_thread()
        for chunk in (3, 100, 7, 100):
            found[number].append(outputs(executors[number], wanted[number], chunk))

    runners = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(50)
    assert found == [[expected[0]] * 4, [expected[1]] * 4]
    for executor in executors:
        executor.close()


@every_kernels
def test_there_is_one_copy_of_the_weights(kernels: str):
    first, second = pair("qwen3", kernels)
    assert first.info is not None
    assert second.info is not None
    assert first.info.weight_bytes == second.info.weight_bytes
    assert first.info.compat_hash != second.info.compat_hash  # other blocks, same weights
    ours, theirs = first._model, second._model
    if isinstance(ours, TorchModel):
        assert isinstance(theirs, TorchModel)
        assert ours._held is theirs._held
    else:
        assert isinstance(ours, CpuModel)
        assert isinstance(theirs, CpuModel)
        assert ours._native.sharers == theirs._native.sharers == 2
        with pytest.raises(ValueError, match="shared weights cannot be placed"):
            ours._native.place("norm", 0, 0, 0, b"")
        del ours
        first.close()
        assert theirs._native.sharers == 1
    first.close()
    second.close()


@every_kernels
@pytest.mark.parametrize("closed", [0, 1])
def test_either_may_close_first(closed: int, kernels: str):
    executors = pair("llama", kernels)
    executors[closed].close()
    wanted = prompts(2)
    model = checkpoint("llama")[1]
    other = executors[1 - closed]
    assert outputs(other, wanted, 100) == [oracle_generate(model, prompt, 12) for prompt in wanted]
    other.close()


@every_kernels
def test_a_third_comes_from_the_second_when_the_first_is_gone(kernels: str):
    first, second = pair("llama", kernels)
    first.close()
    third = second.sibling()
    directory = checkpoint("llama")[0]
    third.load(spec(directory, options={"kernels": kernels}), lambda stage, fraction: None)
    third.allocate(64)
    wanted = prompts(3)
    assert outputs(third, wanted, 100) == outputs(second, wanted, 100)
    second.close()
    third.close()


@every_kernels
def test_the_sibling_of_a_closed_one_reads_for_itself(kernels: str):
    directory, model = checkpoint("llama")
    options = {"kernels": kernels}
    first = loaded(directory, options=options)
    first.close()
    second = first.sibling()
    stages: list[str] = []
    second.load(spec(directory, options=options), lambda stage, fraction: stages.append(stage))
    second.allocate(64)
    assert "loading weights" in stages
    wanted = prompts(4)
    assert outputs(second, wanted, 100) == [oracle_generate(model, prompt, 12) for prompt in wanted]
    second.close()


@every_kernels
def test_one_that_closes_before_its_sibling_loads_takes_the_weights_along(
    kernels: str, caplog: pytest.LogCaptureFixture
):
    directory, model = checkpoint("llama")
    options = {"kernels": kernels}
    first = loaded(directory, options=options)
    second = first.sibling()
    first.close()
    second.load(spec(directory, options=options), lambda stage, fraction: None)
    second.allocate(64)
    wanted = prompts(5)
    assert outputs(second, wanted, 100) == [oracle_generate(model, prompt, 12) for prompt in wanted]
    if kernels == "torch":  # native weights live as long as anybody who may share them
        assert "reading the weights again" in caplog.text
    second.close()


@every_kernels
def test_kernels_are_common_because_weights_are_packed_for_them(kernels: str):
    directory = checkpoint("llama")[0]
    first = loaded(directory, options={"kernels": kernels})
    second = first.sibling()
    with pytest.raises(ConfigError, match="engine option kernels=auto: .* has " + kernels):
        second.load(spec(directory), lambda stage, fraction: None)
    second.close()
    first.close()
