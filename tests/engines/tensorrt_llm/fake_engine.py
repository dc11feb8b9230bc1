"""Entry points of cores over the fake, as an `EngineSpec` names them."""

from __future__ import annotations

from pdserve.clock import SystemClock
from pdserve_engines.tensorrt_llm.core import TensorRtLlmCore
from pdserve_engines.tensorrt_llm.package import read_package
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, FakeLlm14, fake_modules

ENGINE = "tests.engines.tensorrt_llm.fake_engine:create"
ENGINE_14 = "tests.engines.tensorrt_llm.fake_engine:create_14"


def core_of(llm: type[FakeLlm], clock: object = None) -> TensorRtLlmCore:
    return TensorRtLlmCore(
        clock or SystemClock(),  # type: ignore[arg-type]
        lambda: read_package(fake_modules(llm)),
    )


def create() -> TensorRtLlmCore:
    return core_of(FakeLlm)


def create_14() -> TensorRtLlmCore:
    return core_of(FakeLlm14)
