"""Entry points of cores over the fake, as an `EngineSpec` names them."""

from __future__ import annotations

from pdserve_engines.tensorrt_llm import TensorRtLlm
from pdserve_engines.tensorrt_llm.package import read_package
from tests.engines.tensorrt_llm.fake_llm import FakeLlm, FakeLlm14, fake_modules

ENGINE = "tests.engines.tensorrt_llm.fake_engine:create"
ENGINE_14 = "tests.engines.tensorrt_llm.fake_engine:create_14"


def engine_of(llm: type[FakeLlm]) -> TensorRtLlm:
    return TensorRtLlm(lambda: read_package(fake_modules(llm)))


def create() -> TensorRtLlm:
    return engine_of(FakeLlm)


def create_14() -> TensorRtLlm:
    return engine_of(FakeLlm14)
