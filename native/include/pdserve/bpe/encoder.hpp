#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pdserve/bpe/splitter.hpp"

namespace pdserve::bpe {

using Id = std::uint32_t;
using Ids = std::vector<Id>;

// The merges of a vocabulary: two neighbours to their rank and the token that they become.
class Merges {
 public:
  static constexpr std::uint64_t kNone = ~0ull;

  // `merges` has three ids for each merge, best rank first: left, right, merged. `bytes` are the ids
  // of single bytes.
  Merges(const Id* merges, std::size_t count, const std::array<Id, 256>& bytes);
  // Sets `ids` to those of a piece's bytes, merged until no merge is left.
  void apply(std::string_view piece, Ids& ids) const;

 private:
  struct Slot {
    std::uint64_t key;    // two ids
    std::uint64_t merge;  // rank in the upper half, merged id in the lower one
  };

  std::uint64_t find(Id left, Id right) const;
  std::uint64_t find_bytes(std::string_view piece, std::size_t at) const;
  void apply_short(std::string_view piece, Ids& ids) const;
  void apply_long(std::string_view piece, Ids& ids) const;

  std::array<Id, 256> bytes_;
  std::size_t mask_;
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> first_;  // merges of two bytes
};

// Remembers the ids of short pieces. Its size never changes: a piece replaces the older one of two.
class PieceCache {
 public:
  PieceCache();
  using Key = std::array<std::uint64_t, 4>;  // a piece, and its length in the last byte
  struct alignas(64) Entry {
    Key key;
    std::uint32_t count;
    std::array<Id, 7> ids;
  };
  // The first of the two entries that may have `piece`, on their way from memory; nullptr if a piece of
  // this length is not remembered. Sets `key` to the piece's. `readable`: bytes from its first one to the end of
  // the text.
  Entry* place(std::string_view piece, std::size_t readable, Key& key);

 private:
  std::vector<Entry> entries_;
};

// Encodes text like `tokenizers`: added tokens, then pieces, then merges of bytes. Memory is fixed
// after construction, but for what one call needs.
class Encoder {
 public:
  using Vocabulary = std::vector<std::pair<std::string, Id>>;

  // `whole`: pieces that are one token, whatever the merges say.
  Encoder(Splitter splitter, Merges merges, Vocabulary added, Vocabulary whole);
  // Appends the ids of `text` to `out`; false if it has a character of unknown class. Any number of
  // threads may call it; one of them at a time uses the cache, and none waits.
  bool encode(std::string_view text, Ids& out);

 private:
  using Lookup = std::unordered_map<std::string_view, Id>;
  struct Waiting {
    std::string_view piece;
    PieceCache::Key key;
    PieceCache::Entry* entries;  // two; nullptr: not remembered
  };

  static Lookup index(const Vocabulary& vocabulary);
  std::size_t added_at(std::string_view text, std::size_t at, Id& id) const;
  void encode_piece(const Waiting& waiting, Ids& scratch, Ids& out) const;
  void merge(std::string_view piece, Ids& ids) const;

  Splitter splitter_;
  Merges merges_;
  Vocabulary added_, whole_;
  Lookup added_ids_, whole_ids_;
  std::array<bool, 256> added_starts_{};
  std::array<std::vector<std::size_t>, 256> added_lengths_;  // by first byte, longest first
  std::mutex cache_mutex_;
  PieceCache cache_;
};

}  // namespace pdserve::bpe
