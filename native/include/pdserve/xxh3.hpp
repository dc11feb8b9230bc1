// The public hashes of blocks: XXH3-64 with a seed, for comparison with other systems.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve {

// XXH3-64 under one seed; `size` is 4 or more.
class Xxh3 {
 public:
  explicit Xxh3(std::uint64_t seed);

  std::uint64_t digest(const std::uint8_t* data, std::size_t size) const;

 private:
  std::uint64_t seed_;
  std::uint8_t secret_[192];  // the default one, shifted by the seed: for more than 240 bytes
};

// Writes for each of `count` blocks its own hash and that of the chain up to it, 8 bytes each.
void public_hashes(const std::uint8_t* tokens, std::size_t block_bytes, std::size_t count,
                   const Xxh3& hash, std::uint8_t* local, std::uint8_t* sequence);

}  // namespace pdserve
