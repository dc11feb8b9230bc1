// Rounds floats to FP8 (E4M3, without infinities), as KV is stored.
//
// Twin: pdserve_engines/torch/fp8_kv.py, bit by bit. `widen_fp8` in kernels_impl.hpp is the other way.
#pragma once

#include <cstdint>
#include <cstring>

namespace pdserve::cpu {

constexpr float kLargestFp8 = 448.0f;

// Nearest, ties to even; larger numbers become the largest one, and a NaN stays one.
inline std::uint8_t to_fp8(float x) {
  if (x > kLargestFp8) x = kLargestFp8;
  if (x < -kLargestFp8) x = -kLargestFp8;
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7fu;
  if (bits < 121u << 23) {  // below 2^-6 all steps are 2^-9, as those of floats at 2^14 are
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 16384.0f;
    std::memcpy(&bits, &shifted, 4);
    return sign | static_cast<std::uint8_t>(bits - (141u << 23));
  }
  // 20 bits go; the exponent's bias falls from 127 to 7.
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return sign | static_cast<std::uint8_t>((bits - (120u << 23)) >> 20);
}

}  // namespace pdserve::cpu
