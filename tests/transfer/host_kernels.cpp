// The CUDA kernels as a host compiler sees them: threads take turns. What a GPU adds, real parallelism
// and its memory, is not here; every address that a launch computes is.
#define __global__
#define __device__
#define __host__

struct uint4 {
  unsigned x, y, z, w;
};
struct Place {
  unsigned x = 0, y = 0;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

#include "convert.cu"
#include "copy_runs.cu"

namespace {

template <typename Kernel>
void every_thread(unsigned grid, unsigned x, unsigned y, Kernel kernel) {
  gridDim = {grid, 1};
  blockDim = {x, y};
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.y = 0; threadIdx.y < y; ++threadIdx.y)
      for (threadIdx.x = 0; threadIdx.x < x; ++threadIdx.x) kernel();
}

}  // namespace

extern "C" void launch_convert(unsigned grid, unsigned x, unsigned y, unsigned word,
                               const pdserve::LayoutMap* map, const long long* to,
                               const long long* from, const long long* there,
                               const long long* here, unsigned units) {
  const auto kernel = word == 16  ? pdserve_convert_16
                      : word == 4 ? pdserve_convert_4
                                  : pdserve_convert_1;
  every_thread(grid, x, y, [&] { kernel(*map, to, from, there, here, units); });
}

extern "C" void launch_copy_runs(unsigned grid, unsigned x, const long long* to,
                                 const long long* from, const long long* lengths, unsigned count) {
  every_thread(grid, x, 1, [&] { pdserve_copy_runs(to, from, lengths, count); });
}
