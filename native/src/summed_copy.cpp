// The checksum of streamed bytes is folded from the registers that are stored, so memory is read once.
// stream_copy.cpp says why four pages go side by side; each has a remainder of its own.
#include "pdserve/summed_copy.hpp"

#include <algorithm>
#include <cstring>

#include "crc32_fold.hpp"
#include "pdserve/crc32.hpp"

namespace pdserve {
namespace {

constexpr std::size_t kLine = 64, kPage = 4096, kPages = 4, kGroup = kPages * kPage;

// Pieces stay in the first cache between the copy and the sum of what was written.
std::uint32_t copy_cached(std::uint32_t crc, std::uint8_t* to, const std::uint8_t* from,
                          std::size_t size) {
  for (std::size_t at = 0; at < size; at += kGroup) {
    const std::size_t step = std::min(kGroup, size - at);
    std::memcpy(to + at, from + at, step);
    crc = crc32(crc, to + at, step);
  }
  return crc;
}

#if defined(__x86_64__)

PDSERVE_CLMUL std::uint32_t joined(const __m128i* pages) {
  return reduce(fold4(pages[0], pages[1], pages[2], pages[3], Distance<8 * kPage>::narrow()));
}

// One group; `ahead` is the group to read next, asked for on the way.
PDSERVE_CLMUL std::uint32_t group4(std::uint32_t c, std::uint8_t* to, const std::uint8_t* from,
                                   const std::uint8_t* ahead) {
  const __m128i by128 = Distance<128>::narrow();
  __m128i sums[kPages] = {};
  for (std::size_t at = 0; at < kPage; at += kLine)
    for (std::size_t page = 0; page < kPages; ++page) {
      const std::size_t line = page * kPage + at;
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
      for (std::size_t word = line; word < line + kLine; word += 16) {
        const __m128i bytes = load(from + word);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + word), bytes);
        const __m128i start = _mm_cvtsi32_si128(word == 0 ? static_cast<int>(c) : 0);
        sums[page] = fold(sums[page], by128, _mm_xor_si128(bytes, start));
      }
    }
  return joined(sums);
}

PDSERVE_CLMUL512 std::uint32_t group16(std::uint32_t c, std::uint8_t* to, const std::uint8_t* from,
                                       const std::uint8_t* ahead) {
  const __m512i by512 = Distance<512>::wide();
  __m512i sums[kPages] = {};
  __m512i start = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(c)));
  for (std::size_t at = 0; at < kPage; at += kLine)
    for (std::size_t page = 0; page < kPages; ++page) {
      const std::size_t line = page * kPage + at;
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_T0);
      const __m512i bytes = _mm512_loadu_si512(from + line);
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + line), bytes);
      sums[page] = fold(sums[page], by512, _mm512_xor_si512(bytes, start));
      start = _mm512_setzero_si512();
    }
  __m128i pages[kPages];
  for (std::size_t page = 0; page < kPages; ++page) pages[page] = narrowed(sums[page]);
  return joined(pages);
}

#endif

}  // namespace

std::uint32_t summed_copy(std::uint32_t crc, std::uint8_t* to, const std::uint8_t* from,
                          std::size_t size, const std::uint8_t* next, bool streaming) {
#if defined(__x86_64__)
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (streaming && size >= kGroup + head) {
    const auto group = wide_here() ? group16 : group4;
    crc = copy_cached(crc, to, from, head);
    to += head, from += head, size -= head;
    for (; size >= kGroup; to += kGroup, from += kGroup, size -= kGroup) {
      const bool more = size >= 2 * kGroup || next == nullptr;
      crc = ~group(~crc, to, from, more ? from + kGroup : next);  // a prefetch of nothing is harmless
    }
  }
#else
  static_cast<void>(next), static_cast<void>(streaming);
#endif
  return copy_cached(crc, to, from, size);
}

}  // namespace pdserve
