// Steps of the CRC-32 of crc32.cpp on registers of 128 and of 512 bits, which summed_copy.cpp takes, too.
// `c` is a CRC that is not inverted.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#define PDSERVE_CLMUL __attribute__((target("pclmul,sse4.1")))
#define PDSERVE_CLMUL512 __attribute__((target("pclmul,sse4.1,vpclmulqdq,avx512f")))

namespace pdserve {

// x^n modulo the polynomial, as a factor of carry-less multiplication: bit-reflected, shifted by one.
constexpr std::int64_t power(int n) {
  std::uint32_t r = 0x80000000U;
  for (int i = 0; i < n; ++i) r = (r >> 1) ^ ((r & 1) ? 0xEDB88320U : 0U);
  return static_cast<std::int64_t>(r) << 1;
}

// The two factors that move a register over n bits.
template <int n>
struct Distance {
  static constexpr std::int64_t low = power(n + 32), high = power(n - 32);
  PDSERVE_CLMUL static __m128i narrow() { return _mm_set_epi64x(high, low); }
  PDSERVE_CLMUL512 static __m512i wide() {
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
  }
};

PDSERVE_CLMUL inline __m128i load(const std::uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Moves `x` by the distance that `by` stands for, onto `next`.
PDSERVE_CLMUL inline __m128i fold(__m128i x, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

PDSERVE_CLMUL512 inline __m512i fold(__m512i x, __m512i by, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(x, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);
}

// From four registers in a row to one.
PDSERVE_CLMUL inline __m128i fold4(__m128i a, __m128i b, __m128i d, __m128i e, __m128i by) {
  return fold(fold(fold(a, by, b), by, d), by, e);
}

PDSERVE_CLMUL512 inline __m128i narrowed(__m512i x) {
  return fold4(_mm512_castsi512_si128(x), _mm512_extracti32x4_epi32(x, 1),
               _mm512_extracti32x4_epi32(x, 2), _mm512_extracti32x4_epi32(x, 3),
               Distance<128>::narrow());
}

// From 128 bits to the remainder: twice a shorter fold, then Barrett's reduction.
PDSERVE_CLMUL inline std::uint32_t reduce(__m128i x) {
  const __m128i by128 = Distance<128>::narrow();
  const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
  const __m128i by64 = _mm_set_epi64x(0, 0x163CD6124);
  const __m128i barrett = _mm_set_epi64x(0x1F7011641, 0x1DB710641);
  x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by128, 0x10));
  x = _mm_xor_si128(_mm_srli_si128(x, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(x, low32), by64, 0x00));
  __m128i q = _mm_clmulepi64_si128(_mm_and_si128(x, low32), barrett, 0x10);
  q = _mm_clmulepi64_si128(_mm_and_si128(q, low32), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(x, q), 1));
}

// Whether PDSERVE_CLMUL512 may be used: the machine has it, and crc32_wide has not switched it off.
bool wide_here();

}  // namespace pdserve

#endif
