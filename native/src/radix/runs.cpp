#include "pdserve/radix/runs.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <random>
#include <utility>

namespace pdserve::radix {

RunId Runs::make(std::size_t capacity, Meter& meter) {
  if (unused_.empty()) {
    if (made_ == chunks_.size() * kChunk) {
      chunks_.push_back(std::make_unique<Run[]>(kChunk));
      meter += kChunk * sizeof(Run);
    }
    unused_.push_back(static_cast<RunId>(made_++));
  }
  const RunId id = unused_.back();
  reserve((*this)[id], capacity, meter);
  unused_.pop_back();
  return id;
}

void Runs::reserve(Run& run, std::size_t capacity, Meter& meter) {
  void* names = std::realloc(run.names, capacity * sizeof(Name));
  if (names == nullptr) throw std::bad_alloc();
  meter += (capacity - run.capacity) * sizeof(Name);
  run.names = static_cast<Name*>(names);
  run.capacity = static_cast<std::uint16_t>(capacity);
}

void Runs::touch(Run& run, int tier, Meter& meter) {
  if (tier == 0 || run.lower) return;
  run.lower = std::make_unique<Plane[]>(kTiers - 1);
  meter += (kTiers - 1) * sizeof(Plane);
}

void Runs::release(RunId id, Meter& meter) {
  Run& run = (*this)[id];
  if (run.lower) meter -= (kTiers - 1) * sizeof(Plane);
  meter -= run.capacity * sizeof(Name);
  std::free(run.names);
  run = Run();
  unused_.push_back(id);
  if (size() > 0) return;
  meter -= chunks_.size() * kChunk * sizeof(Run);
  chunks_.clear();
  unused_.clear();
  made_ = 0;
}

namespace {

constexpr std::uint64_t kDistance = 0xFFFF;
constexpr std::uint64_t kTagged = 0x3FFFFF;  // tag and distance
constexpr int kTagShift = 16;
constexpr int kOffsetShift = 22;
constexpr int kRunShift = 32;
constexpr std::size_t kMaxCapacity = kDistance - 1;  // so that no distance is ever too long
constexpr std::size_t kNamesPerShard = 4096;
static_assert(kMaxRun <= 1 << (kRunShift - kOffsetShift));

std::uint64_t packed(Place place) {
  return std::uint64_t{place.run} << kRunShift | std::uint64_t{place.offset} << kOffsetShift;
}

std::uint64_t at_home(std::uint64_t hash) { return (hash & 0x3F) << kTagShift | 1; }

Place unpacked(std::uint64_t slot) {
  return {static_cast<RunId>(slot >> kRunShift),
          static_cast<std::uint16_t>(slot >> kOffsetShift & 0x3FF)};
}

std::size_t home(std::uint64_t hash, std::size_t capacity) {
  return ((hash >> 8 & 0xFFFFFFFF) * capacity) >> 32;
}

// Robin hood: who is further from home keeps the slot, the other moves on. There is a free one.
void settle(std::uint64_t* slots, std::size_t capacity, std::size_t at, std::uint64_t slot) {
  while (slots[at] != 0) {
    if ((slots[at] & kDistance) < (slot & kDistance)) std::swap(slots[at], slot);
    ++slot;
    if (++at == capacity) at = 0;
  }
  slots[at] = slot;
}

}  // namespace

Table::Table(const Runs& runs, std::size_t max_names) : runs_(runs), shard_bits_(0) {
  while (shard_bits_ < 20 && max_names >> shard_bits_ > kNamesPerShard) ++shard_bits_;
  shards_ = std::make_unique<Shard[]>(std::size_t{1} << shard_bits_);
  // Drawn anew for each table, so that a client cannot aim at one slot. No answer depends on it.
  std::random_device device;
  for (auto& seed : seed_) seed = std::uint64_t{device()} << 32 | device() | 1;
}

Table::~Table() {
  for (std::size_t i = 0; i < std::size_t{1} << shard_bits_; ++i) std::free(shards_[i].slots);
}

std::uint64_t Table::hash(Name name) const {
  const auto wide = static_cast<unsigned __int128>(name ^ seed_[0]) * seed_[1];
  const auto mixed = static_cast<std::uint64_t>(wide) ^ static_cast<std::uint64_t>(wide >> 64);
  return mixed * 0x9E3779B97F4A7C15u;
}

void Table::prefetch(Name name) const {
  const std::uint64_t hashed = hash(name);
  const Shard& there = shard(hashed);
  if (there.capacity > 0) __builtin_prefetch(there.slots + home(hashed, there.capacity));
}

Table::Slot* Table::locate(Name name) const {
  const std::uint64_t hashed = hash(name);
  const Shard& there = shard(hashed);
  if (there.count == 0) return nullptr;
  std::size_t at = home(hashed, there.capacity);
  for (std::uint64_t wanted = at_home(hashed);; ++wanted) {
    const Slot slot = there.slots[at];
    if ((slot & kDistance) < (wanted & kDistance)) return nullptr;  // it would stand here
    if ((slot & kTagged) == wanted) {
      const Place place = unpacked(slot);
      if (runs_.name(place.run, place.offset) == name) return there.slots + at;
    }
    if (++at == there.capacity) at = 0;
  }
}

bool Table::find(Name name, Place& place) const {
  const Slot* slot = locate(name);
  if (slot != nullptr) place = unpacked(*slot);
  return slot != nullptr;
}

bool Table::insert(Name name, Place place, Meter& meter) {
  const std::uint64_t hashed = hash(name);
  Shard& there = shard(hashed);
  if ((there.count + 1) * std::size_t{5} > there.capacity * std::size_t{4}) {
    const std::size_t wanted = std::min(there.capacity * std::size_t{2} + 8, kMaxCapacity);
    if (wanted == there.capacity) return false;
    resize(there, wanted, meter);
  }
  ++there.count;
  settle(there.slots, there.capacity, home(hashed, there.capacity),
         packed(place) | at_home(hashed));
  return true;
}

void Table::move(Name name, Place place) {
  Slot* slot = locate(name);
  *slot = packed(place) | (*slot & kTagged);
}

void Table::erase(Name name, Meter& meter) {
  Slot* slot = locate(name);
  Shard& there = shard(hash(name));
  std::size_t at = static_cast<std::size_t>(slot - there.slots);
  for (;;) {  // those behind move up, until one is at home or there is none
    const std::size_t next = at + 1 == there.capacity ? 0 : at + 1;
    if ((there.slots[next] & kDistance) <= 1) break;
    there.slots[at] = there.slots[next] - 1;
    at = next;
  }
  there.slots[at] = 0;
  --there.count;
  if (there.count * std::size_t{6} < there.capacity) resize(there, there.count * 2, meter);
}

void Table::resize(Shard& there, std::size_t capacity, Meter& meter) {
  const Shard old = there;
  there.slots = nullptr;
  if (capacity > 0) {
    there.slots = static_cast<Slot*>(std::calloc(capacity, sizeof(Slot)));
    if (there.slots == nullptr) {
      there = old;
      throw std::bad_alloc();
    }
  }
  there.capacity = static_cast<std::uint32_t>(capacity);
  meter += (capacity - old.capacity) * sizeof(Slot);
  constexpr std::size_t kAhead = 16;  // each name is likely a cache miss: ask for it early
  for (std::size_t i = 0; i < old.capacity; ++i) {
    if (i + kAhead < old.capacity && old.slots[i + kAhead] != 0) {
      const Place ahead = unpacked(old.slots[i + kAhead]);
      __builtin_prefetch(runs_[ahead.run].names + ahead.offset);
    }
    if (old.slots[i] == 0) continue;
    const Place place = unpacked(old.slots[i]);
    const std::uint64_t hashed = hash(runs_.name(place.run, place.offset));
    settle(there.slots, capacity, home(hashed, capacity), packed(place) | at_home(hashed));
  }
  std::free(old.slots);
}

}  // namespace pdserve::radix
