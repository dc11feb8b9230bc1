// Copies that are larger than the caches, past them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve {

// As std::memcpy, but what is written does not enter the caches, nor is it read before: memory is
// touched two times instead of three. `next` is where the copy after this one will read, or null.
void stream_copy(std::uint8_t* to, const std::uint8_t* from, std::size_t size,
                 const std::uint8_t* next);

// Call after the last one, before telling another thread that the bytes are there.
void stream_fence();

}  // namespace pdserve
