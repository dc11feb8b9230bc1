// Chooses among the instruction sets that were built, by what this machine can run.
#include <algorithm>
#include <cstring>

#include "pdserve/cpu/kernels.hpp"

namespace pdserve::cpu {

extern const Kernels portable;
#if defined(PDSERVE_X86_SETS)
extern const Kernels avx2;
extern const Kernels avx512;
extern const Kernels avx512_bf16;
#endif

namespace {

// From best to worst; the last one always runs.
int usable(const Kernels* (&found)[4]) {
  int count = 0;
#if defined(PDSERVE_X86_SETS)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide && __builtin_cpu_supports("avx512bf16")) found[count++] = &avx512_bf16;
  if (wide) found[count++] = &avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found[count++] = &avx2;
#endif
  found[count++] = &portable;
  return count;
}

}  // namespace

const Kernels* best_kernels() {
  const Kernels* found[4];
  usable(found);
  return found[0];
}

const Kernels* find_kernels(const char* name) {
  const Kernels* found[4];
  const int count = usable(found);
  for (int i = 0; i < count; ++i)
    if (std::strcmp(found[i]->name, name) == 0) return found[i];
  return nullptr;
}

std::size_t scratch_floats(const Kernels& kernels, int head_dim, int heads) {
  const auto panel = static_cast<std::size_t>(kernels.panel);
  const auto rows = static_cast<std::size_t>(std::max(kAttentionRows, heads));
  const auto dim = (static_cast<std::size_t>(head_dim) + panel - 1) / panel * panel;
  const std::size_t attention = 2 * rows * dim + 3 * dim * panel + rows * panel + 2 * rows;
  const std::size_t linear = 2 * static_cast<std::size_t>(kernels.max_rows) * panel;
  return std::max(attention, linear);
}

}  // namespace pdserve::cpu
