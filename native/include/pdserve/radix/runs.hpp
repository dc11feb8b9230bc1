// Runs of blocks, and the table that finds a block's place in them by its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pdserve/radix/holders.hpp"

namespace pdserve::radix {

using Name = std::uint64_t;
using RunId = std::uint32_t;

constexpr int kTiers = 4;
// Bounds what cutting a run in two costs; a prompt of 128 k tokens in blocks of 32 is four runs.
constexpr std::size_t kMaxRun = 1024;

// Those who hold a run on one tier: all of it, or a part of it, never both.
struct Plane {
  WorkerSet full;
  Parts parts;

  bool empty() const { return full.size() == 0 && parts.size() == 0; }
};

// Blocks that follow one another. Offsets count from `names`, so that dropping the first blocks
// moves nothing; those in use are [from, to), and some worker holds each of them.
struct Run {
  Name* names = nullptr;
  std::uint16_t from = 0;
  std::uint16_t to = 0;
  std::uint16_t capacity = 0;
  Plane device;
  std::unique_ptr<Plane[]> lower;  // the other tiers, once a worker holds the run there

  Plane& plane(int tier) { return tier == 0 ? device : lower[tier - 1]; }
  const Plane* peek(int tier) const {
    return tier == 0 ? &device : lower ? &lower[tier - 1] : nullptr;
  }
  std::size_t size() const { return static_cast<std::size_t>(to - from); }
};

// All runs by number. A run stays where it is in memory until it is released.
class Runs {
 public:
  Run& operator[](RunId id) { return chunks_[id / kChunk][id % kChunk]; }
  const Run& operator[](RunId id) const { return chunks_[id / kChunk][id % kChunk]; }
  Name name(RunId id, std::size_t offset) const { return (*this)[id].names[offset]; }
  std::size_t size() const { return made_ - unused_.size(); }

  RunId make(std::size_t capacity, Meter& meter);
  void reserve(Run& run, std::size_t capacity, Meter& meter);  // storage, also less of it
  void touch(Run& run, int tier, Meter& meter);                // make sure that the plane exists
  void release(RunId id, Meter& meter);                        // frees everything with the last run

 private:
  static constexpr std::size_t kChunk = 256;

  std::vector<std::unique_ptr<Run[]>> chunks_;
  std::vector<RunId> unused_;
  std::size_t made_ = 0;
};

struct Place {
  RunId run;
  std::uint16_t offset;
};

// Name → place, 8 bytes for each: the name itself stands in its run. Many small tables, so that
// growing one delays no caller; robin-hood probing, so that each can be four fifths full.
class Table {
 public:
  Table(const Runs& runs, std::size_t max_names);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  bool find(Name name, Place& place) const;
  // Must not be there yet; its run may get it after this. False: no room, by a chance in 2**64.
  bool insert(Name name, Place place, Meter& meter);
  void move(Name name, Place place);      // must be there, and its old run have it still
  void erase(Name name, Meter& meter);    // likewise
  void prefetch(Name name) const;

 private:
  // From the highest: run, 32 bits; offset, 10; tag, 6 bits of the hash; distance from home, 16: 1 is
  // at home, 0 is a free slot.
  using Slot = std::uint64_t;
  struct Shard {
    Slot* slots = nullptr;
    std::uint32_t capacity = 0;
    std::uint32_t count = 0;
  };

  std::uint64_t hash(Name name) const;
  Shard& shard(std::uint64_t hash) const { return shards_[shard_bits_ ? hash >> (64 - shard_bits_) : 0]; }
  Slot* locate(Name name) const;
  void resize(Shard& shard, std::size_t capacity, Meter& meter);

  const Runs& runs_;
  std::uint64_t seed_[2];
  int shard_bits_;
  std::unique_ptr<Shard[]> shards_;
};

}  // namespace pdserve::radix
