// Four pages go side by side: a processor prefetches within a page only and keeps several DRAM rows
// open, and a store that bypasses the caches goes out by whole lines. What is shorter than that gains
// nothing by it.
#include "pdserve/stream_copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pdserve {

#if defined(__x86_64__)

namespace {

constexpr std::size_t kLine = 64, kPage = 4096, kPages = 4, kGroup = kPages * kPage;

// One group; `ahead` is the group to read next, asked for on the way.
void copy_group(std::uint8_t* to, const std::uint8_t* from, const std::uint8_t* ahead) {
  for (std::size_t at = 0; at < kPage; at += 2 * kLine) {
    for (std::size_t page = 0; page < kPages; ++page) {
      const char* const soon = reinterpret_cast<const char*>(ahead + page * kPage + at);
      _mm_prefetch(soon, _MM_HINT_T0);
      _mm_prefetch(soon + kLine, _MM_HINT_T0);
    }
    for (std::size_t page = 0; page < kPages; ++page) {
      const auto* const in = reinterpret_cast<const __m128i*>(from + page * kPage + at);
      auto* const out = reinterpret_cast<__m128i*>(to + page * kPage + at);
      for (int i = 0; i < 8; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
    }
  }
}

}  // namespace

void stream_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t size,
                 const std::uint8_t* next) {
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (size < kGroup + head) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= kGroup; to += kGroup, from += kGroup, size -= kGroup) {
    const bool more = size >= 2 * kGroup || next == nullptr;
    copy_group(to, from, more ? from + kGroup : next);  // a prefetch of nothing is harmless
  }
  std::memcpy(to, from, size);
}

void stream_fence() { _mm_sfence(); }

#else

void stream_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t size,
                 const std::uint8_t* next) {
  static_cast<void>(next);
  std::memcpy(to, from, size);
}

void stream_fence() {}

#endif

}  // namespace pdserve
