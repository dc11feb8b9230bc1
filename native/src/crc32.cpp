// Folding (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ", 2009), for
// the bit-reflected polynomial of zlib. A 128-bit register is moved over n bits of data by multiplying
// its halves with x^n modulo the polynomial; four registers run side by side, since a multiplication
// takes several cycles and one can begin in each.
#include "pdserve/crc32.hpp"

#include <array>
#include <atomic>

#include "crc32_fold.hpp"

namespace pdserve {
namespace {

std::atomic<bool> wide_wanted{true};

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

PDSERVE_CLMUL __m128i folded4(std::uint32_t c, const std::uint8_t*& p, std::size_t& size) {
  const __m128i by512 = Distance<512>::narrow();
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
  return fold4(a, b, d, e, Distance<128>::narrow());
}

PDSERVE_CLMUL512 __m128i folded16(std::uint32_t c, const std::uint8_t*& p, std::size_t& size) {
  const __m512i by2048 = Distance<2048>::wide(), by512 = Distance<512>::wide();
  const __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(c)));
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), start);
  __m512i b = _mm512_loadu_si512(p + 64), d = _mm512_loadu_si512(p + 128);
  __m512i e = _mm512_loadu_si512(p + 192);
  p += 256;
  size -= 256;
  for (; size >= 256; p += 256, size -= 256) {
    a = fold(a, by2048, _mm512_loadu_si512(p));
    b = fold(b, by2048, _mm512_loadu_si512(p + 64));
    d = fold(d, by2048, _mm512_loadu_si512(p + 128));
    e = fold(e, by2048, _mm512_loadu_si512(p + 192));
  }
  return narrowed(fold(fold(fold(a, by512, b), by512, d), by512, e));
}

// `size` is 64 or more; a tail shorter than 16 bytes is left over.
PDSERVE_CLMUL std::uint32_t folded(std::uint32_t c, const std::uint8_t* p, std::size_t size) {
  __m128i a = size >= 256 && wide_here() ? folded16(c, p, size) : folded4(c, p, size);
  for (; size >= 16; p += 16, size -= 16) a = fold(a, Distance<128>::narrow(), load(p));
  return reduce(a);
}

#endif

}  // namespace

void crc32_wide(bool wanted) { wide_wanted = wanted; }

#if defined(__x86_64__)
bool wide_here() {
  static const bool here = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f");
  return here && wide_wanted;
}
#endif

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
