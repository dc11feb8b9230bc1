// Folding (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009), for
// the bit-reflected polynomial of zlib. A 128-bit register is moved over n bits of data by multiplying
// its halves with x^n modulo the polynomial; four registers run side by side, since a multiplication
// takes several cycles and one can begin in each.
#include "pdserve/crc32.hpp"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#define PDSERVE_CLMUL __attribute__((target("pclmul,sse4.1")))
#endif

namespace pdserve {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? 0xEDB88320U : 0U);
    table[i] = c;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

// What is shorter than a register, and tails. `c` is not inverted.
std::uint32_t bytewise(std::uint32_t c, const std::uint8_t* p, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) c = kTable[(c ^ p[i]) & 0xFF] ^ (c >> 8);
  return c;
}

#if defined(__x86_64__)

PDSERVE_CLMUL inline __m128i load(const std::uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Moves `x` by the distance that `by` stands for, onto `next`.
PDSERVE_CLMUL inline __m128i fold(__m128i x, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// From 128 bits to the remainder: twice a shorter fold, then Barrett's reduction.
PDSERVE_CLMUL inline std::uint32_t reduce(__m128i x, __m128i by128) {
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

// `size` is 64 or more; a tail shorter than 16 bytes is left over.
PDSERVE_CLMUL std::uint32_t folded(std::uint32_t c, const std::uint8_t* p, std::size_t size) {
  const __m128i by512 = _mm_set_epi64x(0x1C6E41596, 0x154442BD4);
  const __m128i by128 = _mm_set_epi64x(0xCCAA009E, 0x1751997D0);
  __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(c)));
  __m128i b = load(p + 16), d = load(p + 32), e = load(p + 48);
  p += 64;
  size -= 64;
  for (; size >= 64; p += 64, size -= 64) {
    a = fold(a, by512, load(p));
    b = fold(b, by512, load(p + 16));
    d = fold(d, by512, load(p + 32));
    e = fold(e, by512, load(p + 48));
  }
  a = fold(fold(fold(a, by128, b), by128, d), by128, e);
  for (; size >= 16; p += 16, size -= 16) a = fold(a, by128, load(p));
  return reduce(a, by128);
}

#endif

}  // namespace

bool crc32_here() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#else
  return false;
#endif
}

std::uint32_t crc32(std::uint32_t crc, const std::uint8_t* data, std::size_t size) {
  std::uint32_t c = ~crc;
#if defined(__x86_64__)
  if (size >= 64) {
    c = folded(c, data, size);
    data += size - size % 16;
    size %= 16;
  }
#endif
  return ~bytewise(c, data, size);
}

}  // namespace pdserve
