// How stages are cut into pieces, and sizes that an int may not hold.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pdserve::cpu {

// Pieces per member a stage is cut into: enough for a slow member to be helped, few enough for the
// counter not to matter.
constexpr int kShare = 6;

inline int grain_of(int total, int members) { return std::max(1, total / (members * kShare)); }

inline std::size_t product_of(int a, int b) {
  return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
}

}  // namespace pdserve::cpu
