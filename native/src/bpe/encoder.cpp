#include "pdserve/bpe/encoder.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <queue>

namespace pdserve::bpe {

namespace {

constexpr std::size_t kCacheEntries = 1u << 16;  // 4 MiB
constexpr std::size_t kCachedBytes = 31;
constexpr std::size_t kWaiting = 16;  // pieces whose entries are on their way at once
constexpr std::size_t kShort = 32;  // up to here, looking at all neighbours beats a queue
constexpr std::size_t kPairs = 256 * 256;
constexpr auto kOnesThenZeros = [] {
  std::array<unsigned char, 2 * sizeof(PieceCache::Key)> bytes{};
  for (std::size_t i = 0; i < bytes.size() / 2; ++i) bytes[i] = 0xFF;
  return bytes;
}();
// Spread the words of a key, each by itself: the products do not wait for each other.
constexpr std::uint64_t kOdd[] = {0x9E3779B97F4A7C15ull, 0xC2B2AE3D27D4EB4Full,
                                  0x165667B19E3779F9ull, 0xD6E8FEB86659FD93ull};

std::uint64_t mixed(std::uint64_t x) {
  x *= 0x9E3779B97F4A7C15ull;
  return x ^ x >> 32;
}

std::uint64_t pair_of(Id left, Id right) { return static_cast<std::uint64_t>(left) << 32 | right; }

// Sets a key to a piece and zeros. A copy of fixed size, of which the piece is kept, takes less time
// than one of any size.
void fill(PieceCache::Key& key, std::string_view piece, std::size_t readable) {
  if (readable < sizeof(key)) {
    key = {};
    std::memcpy(key.data(), piece.data(), piece.size());
    return;
  }
  PieceCache::Key kept;
  std::memcpy(key.data(), piece.data(), sizeof(key));
  std::memcpy(kept.data(), kOnesThenZeros.data() + sizeof(key) - piece.size(), sizeof(kept));
  for (std::size_t i = 0; i < key.size(); ++i) key[i] &= kept[i];
}

// Four words are compared sooner than memcmp is called.
bool equal(const PieceCache::Key& some, const PieceCache::Key& other) {
  std::uint64_t differs = 0;
  for (std::size_t i = 0; i < some.size(); ++i) differs |= some[i] ^ other[i];
  return differs == 0;
}

}  // namespace

Merges::Merges(const Id* merges, std::size_t count, const std::array<Id, 256>& bytes)
    : bytes_(bytes), first_(kPairs) {
  std::size_t size = 16;
  while (size < 2 * count) size *= 2;
  mask_ = size - 1;
  slots_.assign(size, {kNone, kNone});
  for (std::size_t rank = 0; rank < count; ++rank) {
    const Id* const merge = merges + 3 * rank;
    const std::uint64_t key = pair_of(merge[0], merge[1]);
    std::size_t at = mixed(key) & mask_;
    while (slots_[at].key != kNone && slots_[at].key != key) at = (at + 1) & mask_;
    slots_[at] = {key, pair_of(static_cast<Id>(rank), merge[2])};
  }
  for (std::size_t pair = 0; pair < kPairs; ++pair)
    first_[pair] = find(bytes[pair >> 8], bytes[pair & 255]);
}

std::uint64_t Merges::find(Id left, Id right) const {
  const std::uint64_t key = pair_of(left, right);
  std::size_t at = mixed(key) & mask_;
  while (slots_[at].key != key) {
    if (slots_[at].key == kNone) return kNone;
    at = (at + 1) & mask_;
  }
  return slots_[at].merge;
}

std::uint64_t Merges::find_bytes(std::string_view piece, std::size_t at) const {
  const auto left = static_cast<unsigned char>(piece[at]);
  return first_[static_cast<std::size_t>(left) << 8 | static_cast<unsigned char>(piece[at + 1])];
}

void Merges::apply(std::string_view piece, Ids& ids) const {
  ids.clear();
  for (const char byte : piece) ids.push_back(bytes_[static_cast<unsigned char>(byte)]);
  if (ids.size() < 2) return;
  ids.size() <= kShort ? apply_short(piece, ids) : apply_long(piece, ids);
}

void Merges::apply_short(std::string_view piece, Ids& ids) const {
  std::array<std::uint64_t, kShort> merge;  // of each id with the one after it
  std::size_t size = ids.size();
  for (std::size_t i = 0; i + 1 < size; ++i) merge[i] = find_bytes(piece, i);
  while (size > 1) {
    const auto best = std::min_element(merge.begin(), merge.begin() + size - 1);
    if (*best == kNone) break;
    const std::size_t i = best - merge.begin();
    ids[i] = static_cast<Id>(*best);
    std::copy(ids.begin() + i + 2, ids.begin() + size, ids.begin() + i + 1);
    std::copy(merge.begin() + i + 1, merge.begin() + size - 1, merge.begin() + i);
    --size;
    if (i > 0) merge[i - 1] = find(ids[i - 1], ids[i]);
    if (i + 1 < size) merge[i] = find(ids[i], ids[i + 1]);
  }
  ids.resize(size);
}

// A queue of ranks and places; one whose neighbours have changed meanwhile is passed over.
void Merges::apply_long(std::string_view piece, Ids& ids) const {
  constexpr std::uint32_t kEnd = ~0u;
  const auto size = static_cast<std::uint32_t>(ids.size());
  std::vector<std::uint32_t> before(size), after(size);
  std::vector<std::uint64_t> merge(size, kNone), waiting;
  const auto rank_at = [&](std::uint32_t i) { return merge[i] >> 32 << 32 | i; };
  for (std::uint32_t i = 0; i < size; ++i) {
    before[i] = i - 1;  // kEnd for the first
    after[i] = i + 1 < size ? i + 1 : kEnd;
    if (i + 1 < size) merge[i] = find_bytes(piece, i);
    if (merge[i] != kNone) waiting.push_back(rank_at(i));
  }
  std::priority_queue queue(std::greater<>(), std::move(waiting));
  const auto update = [&](std::uint32_t i) {
    merge[i] = after[i] == kEnd ? kNone : find(ids[i], ids[after[i]]);
    if (merge[i] != kNone) queue.push(rank_at(i));
  };
  while (!queue.empty()) {
    const std::uint64_t top = queue.top();
    queue.pop();
    const auto i = static_cast<std::uint32_t>(top);
    if (merge[i] == kNone || rank_at(i) != top) continue;
    const std::uint32_t dead = after[i];
    ids[i] = static_cast<Id>(merge[i]);
    merge[dead] = kNone;
    after[i] = after[dead];
    if (after[i] != kEnd) before[after[i]] = i;
    update(i);
    if (before[i] != kEnd) update(before[i]);
  }
  std::size_t kept = 0;
  for (std::uint32_t i = 0; i != kEnd; i = after[i]) ids[kept++] = ids[i];
  ids.resize(kept);
}

PieceCache::PieceCache() : entries_(kCacheEntries) {}

PieceCache::Entry* PieceCache::place(std::string_view piece, std::size_t readable, Key& key) {
  if (piece.size() > kCachedBytes) return nullptr;
  fill(key, piece, readable);
  reinterpret_cast<unsigned char*>(key.data())[kCachedBytes] =
      static_cast<unsigned char>(piece.size());
  const std::uint64_t hash =
      mixed(key[0] * kOdd[0] ^ key[1] * kOdd[1] ^ key[2] * kOdd[2] ^ key[3] * kOdd[3]);
  Entry* const two = &entries_[hash & (kCacheEntries - 2)];
  __builtin_prefetch(two, 1);
  __builtin_prefetch(two + 1, 1);
  return two;
}

Encoder::Encoder(Splitter splitter, Merges merges, Vocabulary added, Vocabulary whole)
    : splitter_(std::move(splitter)),
      merges_(std::move(merges)),
      added_(std::move(added)),
      whole_(std::move(whole)),
      added_ids_(index(added_)),
      whole_ids_(index(whole_)) {
  for (const auto& [token, id] : added_) {
    const auto first = static_cast<unsigned char>(token[0]);
    added_starts_[first] = true;
    auto& lengths = added_lengths_[first];
    if (std::find(lengths.begin(), lengths.end(), token.size()) == lengths.end())
      lengths.push_back(token.size());
  }
  for (auto& lengths : added_lengths_) std::sort(lengths.rbegin(), lengths.rend());
}

Encoder::Lookup Encoder::index(const Vocabulary& vocabulary) {
  Lookup found;
  found.reserve(vocabulary.size());
  for (const auto& [token, id] : vocabulary) found[token] = id;
  return found;
}

bool Encoder::encode(std::string_view text, Ids& out) {
  if (!splitter_.knows(text)) return false;
  out.reserve(out.size() + text.size() / 4);  // usual texts have fewer ids
  const std::unique_lock<std::mutex> lock(cache_mutex_, std::try_to_lock);
  PieceCache* const cache = lock.owns_lock() ? &cache_ : nullptr;
  Ids scratch;
  std::array<Waiting, kWaiting> waiting;
  std::size_t count = 0;
  const auto encode_all = [&] {
    for (std::size_t i = 0; i < count; ++i) encode_piece(waiting[i], scratch, out);
    count = 0;
  };
  const auto piece = [&](std::size_t begin, std::size_t end) {
    Waiting& next = waiting[count++];
    next.piece = text.substr(begin, end - begin);
    next.entries = cache ? cache->place(next.piece, text.size() - begin, next.key) : nullptr;
    if (count == waiting.size()) encode_all();
  };
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    if (!added_starts_[static_cast<unsigned char>(text[at])]) {
      ++at;
      continue;
    }
    Id id = 0;
    const std::size_t length = added_at(text, at, id);
    if (length == 0) {
      ++at;
      continue;
    }
    splitter_.split(text, begin, at, piece);
    encode_all();
    out.push_back(id);
    begin = at += length;
  }
  splitter_.split(text, begin, text.size(), piece);
  encode_all();
  return true;
}

// Length of the longest added token that begins at `at`; 0 if none does.
std::size_t Encoder::added_at(std::string_view text, std::size_t at, Id& id) const {
  for (const std::size_t length : added_lengths_[static_cast<unsigned char>(text[at])]) {
    if (length > text.size() - at) continue;
    const auto found = added_ids_.find(text.substr(at, length));
    if (found == added_ids_.end()) continue;
    id = found->second;
    return length;
  }
  return 0;
}

void Encoder::encode_piece(const Waiting& waiting, Ids& scratch, Ids& out) const {
  const auto& [piece, key, entries] = waiting;
  for (std::size_t i = 0; entries && i < 2; ++i) {
    if (!equal(entries[i].key, key)) continue;
    for (std::uint32_t k = 0; k < entries[i].count; ++k) out.push_back(entries[i].ids[k]);
    return;
  }
  merge(piece, scratch);
  out.insert(out.end(), scratch.begin(), scratch.end());
  if (!entries || scratch.size() > entries->ids.size()) return;
  // Nothing fails from here on: a key without its ids would be found later.
  entries[1] = entries[0];
  entries->key = key;
  entries->count = static_cast<std::uint32_t>(scratch.size());
  std::copy(scratch.begin(), scratch.end(), entries->ids.begin());
}

void Encoder::merge(std::string_view piece, Ids& ids) const {
  const auto found = whole_ids_.find(piece);
  if (found == whole_ids_.end()) return merges_.apply(piece, ids);
  ids.assign(1, found->second);
}

}  // namespace pdserve::bpe
