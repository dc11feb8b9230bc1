// Chained block hashes: keyed BLAKE2b (RFC 7693) with a 16-byte digest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve {

constexpr std::size_t kHashBytes = 16;
constexpr std::size_t kMaxSecretBytes = 64;

// The state after the key block has been absorbed. It is the same for every hash under one secret,
// so a chain pays for that compression once instead of once per block.
class KeyedState {
 public:
  KeyedState(const std::uint8_t* secret, std::size_t secret_bytes);

  // Writes BLAKE2b-128(key=secret, head || tail) to `out`, which may alias `head`.
  void digest(const std::uint8_t* head, const std::uint8_t* tail, std::size_t tail_bytes,
              std::uint8_t* out) const;

 private:
  std::uint64_t h_[8];
};

// Writes `count` digests, each naming `block_bytes` of tokens and everything before them.
void block_hashes(const std::uint8_t* tokens, std::size_t block_bytes, std::size_t count,
                  const KeyedState& keyed, const std::uint8_t* parent, std::uint8_t* out);

}  // namespace pdserve
