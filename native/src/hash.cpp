// The block-hash chain. Twin: pdserve/blocks/hashing.py, which says what the hash means.
//
// Portable on purpose. A chain is sequential (each block needs its parent's digest), so wide vectors
// cannot run blocks of one prompt side by side, and compilers keep the scalar rounds in registers.
#include "pdserve/hash.hpp"

#include <cstring>

namespace pdserve {
namespace {

constexpr std::size_t kChunk = 128;  // bytes BLAKE2b absorbs per compression

// RFC 7693, section 2.6: the initialisation vector.
constexpr std::uint64_t kIv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// Section 2.7: message word schedule; rounds 10 and 11 repeat 0 and 1.
constexpr std::uint8_t kSigma[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3}};

inline std::uint64_t load64(const std::uint8_t* p) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  std::uint64_t w = 0;
  for (int i = 7; i >= 0; --i) w = (w << 8) | p[i];
  return w;
#else
  std::uint64_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
#endif
}

inline void store64(std::uint8_t* p, std::uint64_t w) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<std::uint8_t>(w >> (8 * i));
}

inline std::uint64_t rotr(std::uint64_t x, int n) { return (x >> n) | (x << (64 - n)); }

// Section 3.1: the mixing function G.
inline void mix(std::uint64_t& a, std::uint64_t& b, std::uint64_t& c, std::uint64_t& d,
                std::uint64_t x, std::uint64_t y) {
  a = a + b + x;
  d = rotr(d ^ a, 32);
  c = c + d;
  b = rotr(b ^ c, 24);
  a = a + b + y;
  d = rotr(d ^ a, 16);
  c = c + d;
  b = rotr(b ^ c, 63);
}

// A template, so that the schedule is a constant in each round and the words stay in registers.
template <int R>
inline void round(std::uint64_t (&v)[16], const std::uint64_t (&m)[16]) {
  constexpr const std::uint8_t* s = kSigma[R];
  mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

// Section 3.2: the compression function F. `total` counts the bytes absorbed so far, the key block
// and this chunk's own bytes included; a prompt never reaches 2^64 of them, so the high word is 0.
void compress(std::uint64_t (&h)[8], const std::uint8_t* chunk, std::uint64_t total, bool last) {
  std::uint64_t m[16];
  for (int i = 0; i < 16; ++i) m[i] = load64(chunk + 8 * i);
  std::uint64_t v[16];
  for (int i = 0; i < 8; ++i) v[i] = h[i];
  for (int i = 0; i < 8; ++i) v[8 + i] = kIv[i];
  v[12] ^= total;
  if (last) v[14] = ~v[14];
  round<0>(v, m);
  round<1>(v, m);
  round<2>(v, m);
  round<3>(v, m);
  round<4>(v, m);
  round<5>(v, m);
  round<6>(v, m);
  round<7>(v, m);
  round<8>(v, m);
  round<9>(v, m);
  round<10>(v, m);
  round<11>(v, m);
  for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[8 + i];
}

}  // namespace

KeyedState::KeyedState(const std::uint8_t* secret, std::size_t secret_bytes) {
  for (int i = 0; i < 8; ++i) h_[i] = kIv[i];
  // Section 2.5: parameter block, here digest length, key length, fanout 1, depth 1.
  h_[0] ^= 0x01010000ULL ^ (static_cast<std::uint64_t>(secret_bytes) << 8) ^ kHashBytes;
  std::uint8_t chunk[kChunk] = {};
  std::memcpy(chunk, secret, secret_bytes);
  compress(h_, chunk, kChunk, false);
}

void KeyedState::digest(const std::uint8_t* head, const std::uint8_t* tail, std::size_t tail_bytes,
                        std::uint8_t* out) const {
  std::uint64_t h[8];
  std::memcpy(h, h_, sizeof h);
  std::uint64_t total = kChunk;
  std::uint8_t chunk[kChunk];
  std::memcpy(chunk, head, kHashBytes);
  std::size_t filled = kHashBytes;
  // The last chunk, even a full one, is the flagged one: never compress while it might be last.
  while (filled + tail_bytes > kChunk) {
    const std::size_t take = kChunk - filled;
    std::memcpy(chunk + filled, tail, take);
    tail += take;
    tail_bytes -= take;
    total += kChunk;
    compress(h, chunk, total, false);
    filled = 0;
  }
  std::memcpy(chunk + filled, tail, tail_bytes);
  filled += tail_bytes;
  std::memset(chunk + filled, 0, kChunk - filled);
  compress(h, chunk, total + filled, true);
  store64(out, h[0]);
  store64(out + 8, h[1]);
}

void block_hashes(const std::uint8_t* tokens, std::size_t block_bytes, std::size_t count,
                  const KeyedState& keyed, const std::uint8_t* parent, std::uint8_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    keyed.digest(parent, tokens + i * block_bytes, block_bytes, out);
    parent = out;
    out += kHashBytes;
  }
}

}  // namespace pdserve
