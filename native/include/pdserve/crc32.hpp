// CRC-32 as zlib computes it, by carry-less multiplication: several times as fast, the same values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve {

// Whether this machine has the instructions; without them crc32 must not be called.
bool crc32_here();

// Whether registers of 512 bits are used where the machine has them; false is for tests.
void crc32_wide(bool wanted);

// Continues `crc`, the value of the bytes before (0: none).
std::uint32_t crc32(std::uint32_t crc, const std::uint8_t* data, std::size_t size);

}  // namespace pdserve
