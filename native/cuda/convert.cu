// Blocks of KV from one layout to another, on the device. Launched by pdserve/kv/layout_cuda.py with
// blocks of (x, y) threads: y units at a time, x words of each.
//
// A plane is given by the address of its beginning. The map decides which entry point: each of its
// runs, distances and addresses must be a multiple of the word's size.
#include "layout_map.hpp"

namespace {

template <typename Word>
__device__ void convert(const pdserve::LayoutMap& map, const long long* destination_planes,
                        const long long* source_planes, const long long* destination_blocks,
                        const long long* source_blocks, unsigned units) {
  const unsigned words = static_cast<unsigned>(map.run / sizeof(Word));
  // A launch has at most 2^31 units and fewer threads, so the sum cannot wrap around.
  for (unsigned index = blockIdx.x * blockDim.y + threadIdx.y; index < units;
       index += gridDim.x * blockDim.y) {
    const pdserve::Unit unit = pdserve::unit_of(map, index);
    const auto* from = reinterpret_cast<const Word*>(
        source_planes[unit.plane] +
        pdserve::offset_of(map.source, source_blocks[unit.block], unit));
    auto* to = reinterpret_cast<Word*>(
        destination_planes[unit.plane] +
        pdserve::offset_of(map.destination, destination_blocks[unit.block], unit));
    for (unsigned word = threadIdx.x; word < words; word += blockDim.x) to[word] = from[word];
  }
}

}  // namespace

#define PDSERVE_CONVERT(bytes, Word)                                                              \
  extern "C" __global__ void pdserve_convert_##bytes(                                             \
      const pdserve::LayoutMap map, const long long* destination_planes,                          \
      const long long* source_planes, const long long* destination_blocks,                        \
      const long long* source_blocks, unsigned units) {                                           \
    convert<Word>(map, destination_planes, source_planes, destination_blocks, source_blocks,      \
                  units);                                                                         \
  }

PDSERVE_CONVERT(16, uint4)
PDSERVE_CONVERT(4, unsigned)
PDSERVE_CONVERT(1, unsigned char)
