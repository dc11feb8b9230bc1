// Copies that compute the CRC-32 of what they write.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve {

// As stream_copy (`streaming`) or std::memcpy; continues `crc` over the bytes written, whatever others
// write to the source meanwhile. Needs crc32_here(), and stream_fence() afterwards.
std::uint32_t summed_copy(std::uint32_t crc, std::uint8_t* to, const std::uint8_t* from,
                          std::size_t size, const std::uint8_t* next, bool streaming);

}  // namespace pdserve
