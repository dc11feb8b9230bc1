// Which bytes of one KV layout are which bytes of another: the one index map that the CPU's copies and
// the CUDA kernel use, so that testing the first tests the map of the second.
// Twin: pdserve/kv/layout.py, which says what planes, units and runs are.
//
// Nothing is included: NVRTC has no standard headers.
#pragma once

#if defined(__CUDACC__)
#define PDSERVE_BOTH __host__ __device__
#else
#define PDSERVE_BOTH
#endif

namespace pdserve {

// Distances in bytes inside one end's memory.
struct LayoutSide {
  long long block, head, token;
};

// `run` bytes are contiguous at both ends: a unit. Units are counted block by block, in each plane by
// plane, head by head, token by token.
struct LayoutMap {
  unsigned planes, heads, tokens;
  unsigned reserved;
  long long run;
  LayoutSide source, destination;
};

struct Unit {
  unsigned block;  // a place in the lists of blocks
  unsigned plane, head, token;
};

PDSERVE_BOTH inline Unit unit_of(const LayoutMap& map, unsigned index) {
  Unit unit;
  unit.token = index % map.tokens;
  index /= map.tokens;
  unit.head = index % map.heads;
  index /= map.heads;
  unit.plane = index % map.planes;
  unit.block = index / map.planes;
  return unit;
}

// From a plane's beginning; `block` is the id that the lists have for `unit.block`.
PDSERVE_BOTH inline long long offset_of(const LayoutSide& side, long long block, const Unit& unit) {
  return block * side.block + unit.head * side.head + unit.token * side.token;
}

}  // namespace pdserve
