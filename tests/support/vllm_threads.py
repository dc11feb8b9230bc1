"""How many threads vLLM has on a CPU in tests."""

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Environment of processes with vLLM. By default vLLM binds each of its worker processes to cores,
from the first on: all workers of all engines, and their imports of nine seconds, would share
core 0. Models of tests are too small for a second thread."""
