// XXH3-64 with a seed, after its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
// Twin: pdserve/blocks/public.py, which says what it is for. Lengths below 4 do not occur: tokens
// have four bytes.
#include "pdserve/xxh3.hpp"

#include <cstring>

namespace pdserve {
namespace {

constexpr std::uint64_t kP32_1 = 0x9E3779B1, kP32_2 = 0x85EBCA77, kP32_3 = 0xC2B2AE3D;
constexpr std::uint64_t kP64_1 = 0x9E3779B185EBCA87, kP64_2 = 0xC2B2AE3D27D4EB4F,
                        kP64_3 = 0x165667B19E3779F9, kP64_4 = 0x85EBCA77C2B2AE63,
                        kP64_5 = 0x27D4EB2F165667C5;
constexpr std::uint64_t kMix1 = 0x165667919E3779F9, kMix2 = 0x9FB21C651E98DF25;

constexpr std::size_t kStripe = 64;    // bytes mixed into the eight lanes at a time
constexpr std::size_t kSecret = 192;   // bytes of the default secret
constexpr std::size_t kStripes = 16;   // between two scrambles: (kSecret - kStripe) / 8

constexpr std::uint8_t kDefault[kSecret] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline std::uint32_t load32(const std::uint8_t* p) {
  return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
         static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

inline std::uint64_t load64(const std::uint8_t* p) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return load32(p) | static_cast<std::uint64_t>(load32(p + 4)) << 32;
#else
  std::uint64_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
#endif
}

inline std::uint64_t rotl(std::uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

// Both halves of the 128-bit product, xored.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t avalanche(std::uint64_t h) {
  h ^= h >> 37;
  h *= kMix1;
  return h ^ (h >> 32);
}

inline std::uint64_t mix16(const std::uint8_t* p, const std::uint8_t* s, std::uint64_t seed) {
  return fold(load64(p) ^ (load64(s) + seed), load64(p + 8) ^ (load64(s + 8) - seed));
}

std::uint64_t upto8(const std::uint8_t* p, std::size_t size, std::uint64_t seed) {
  seed ^= static_cast<std::uint64_t>(__builtin_bswap32(static_cast<std::uint32_t>(seed))) << 32;
  const std::uint64_t flip = (load64(kDefault + 8) ^ load64(kDefault + 16)) - seed;
  std::uint64_t h = load32(p + size - 4) + (static_cast<std::uint64_t>(load32(p)) << 32);
  h ^= flip;
  h ^= rotl(h, 49) ^ rotl(h, 24);
  h *= kMix2;
  h ^= (h >> 35) + size;
  h *= kMix2;
  return h ^ (h >> 28);
}

std::uint64_t upto16(const std::uint8_t* p, std::size_t size, std::uint64_t seed) {
  const std::uint64_t flip1 = (load64(kDefault + 24) ^ load64(kDefault + 32)) + seed;
  const std::uint64_t flip2 = (load64(kDefault + 40) ^ load64(kDefault + 48)) - seed;
  const std::uint64_t low = load64(p) ^ flip1, high = load64(p + size - 8) ^ flip2;
  return avalanche(size + __builtin_bswap64(low) + high + fold(low, high));
}

std::uint64_t upto128(const std::uint8_t* p, std::size_t size, std::uint64_t seed) {
  std::uint64_t sum = size * kP64_1;
  for (std::size_t i = (size - 1) / 32 + 1; i-- > 0;) {
    sum += mix16(p + 16 * i, kDefault + 32 * i, seed);
    sum += mix16(p + size - 16 * (i + 1), kDefault + 32 * i + 16, seed);
  }
  return avalanche(sum);
}

std::uint64_t upto240(const std::uint8_t* p, std::size_t size, std::uint64_t seed) {
  std::uint64_t sum = size * kP64_1;
  for (std::size_t i = 0; i < 8; ++i) sum += mix16(p + 16 * i, kDefault + 16 * i, seed);
  sum = avalanche(sum);
  for (std::size_t i = 8; i < size / 16; ++i)
    sum += mix16(p + 16 * i, kDefault + 16 * (i - 8) + 3, seed);
  return avalanche(sum + mix16(p + size - 16, kDefault + 136 - 17, seed));
}

inline void accumulate(std::uint64_t (&lanes)[8], const std::uint8_t* p, const std::uint8_t* s) {
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t value = load64(p + 8 * i), keyed = value ^ load64(s + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
  }
}

std::uint64_t longer(const std::uint8_t* p, std::size_t size, const std::uint8_t* secret) {
  std::uint64_t lanes[8] = {kP32_3, kP64_1, kP64_2, kP64_3, kP64_4, kP32_2, kP64_5, kP32_1};
  const std::size_t stripes = (size - 1) / kStripe;
  for (std::size_t n = 0; n < stripes; ++n) {
    accumulate(lanes, p + kStripe * n, secret + 8 * (n % kStripes));
    if (n % kStripes != kStripes - 1) continue;
    for (int i = 0; i < 8; ++i) {
      lanes[i] ^= (lanes[i] >> 47) ^ load64(secret + kSecret - kStripe + 8 * i);
      lanes[i] *= kP32_1;
    }
  }
  accumulate(lanes, p + size - kStripe, secret + kSecret - kStripe - 7);
  std::uint64_t sum = size * kP64_1;
  for (int i = 0; i < 4; ++i)
    sum += fold(lanes[2 * i] ^ load64(secret + 11 + 16 * i),
                lanes[2 * i + 1] ^ load64(secret + 11 + 16 * i + 8));
  return avalanche(sum);
}

void store64(std::uint8_t* p, std::uint64_t w) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<std::uint8_t>(w >> (8 * i));
}

}  // namespace

Xxh3::Xxh3(std::uint64_t seed) : seed_(seed) {
  for (std::size_t i = 0; i < kSecret; i += 16) {
    store64(secret_ + i, load64(kDefault + i) + seed);
    store64(secret_ + i + 8, load64(kDefault + i + 8) - seed);
  }
}

std::uint64_t Xxh3::digest(const std::uint8_t* data, std::size_t size) const {
  if (size <= 8) return upto8(data, size, seed_);
  if (size <= 16) return upto16(data, size, seed_);
  if (size <= 128) return upto128(data, size, seed_);
  if (size <= 240) return upto240(data, size, seed_);
  return longer(data, size, secret_);
}

void public_hashes(const std::uint8_t* tokens, std::size_t block_bytes, std::size_t count,
                   const Xxh3& hash, std::uint8_t* local, std::uint8_t* sequence) {
  std::uint8_t pair[16];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t own = hash.digest(tokens + i * block_bytes, block_bytes);
    store64(local + 8 * i, own);
    store64(pair + 8, own);
    const std::uint64_t chained = i == 0 ? own : hash.digest(pair, sizeof pair);
    store64(sequence + 8 * i, chained);
    store64(pair, chained);
  }
}

}  // namespace pdserve
