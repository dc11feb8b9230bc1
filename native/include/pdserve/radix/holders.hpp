// Who holds a run of blocks: workers that hold all of it, and workers that hold a stretch of it.
// Knows nothing of names. Memory is counted by the caller's meter, and freed only by `clear`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdserve::radix {

using Worker = std::uint16_t;
using Word = std::uint64_t;
using Meter = std::size_t;

// A set of worker slots: up to four in place, then a sorted list, and bits once those are smaller.
class WorkerSet {
 public:
  std::size_t size() const { return count_; }
  bool contains(Worker worker) const;
  void insert(Worker worker, Meter& meter);  // must not be in it
  void erase(Worker worker, Meter& meter);   // must be in it
  void clear(Meter& meter);
  void copy_from(const WorkerSet& other, Meter& meter);  // into an empty one

  // The bits if it is kept as such, else nullptr; `words` says how many words of bits there are.
  const Word* bits(std::size_t& words) const {
    words = bits_ ? capacity_ : 0;
    return bits_ ? as_.words : nullptr;
  }

  template <class Visit>
  void each(Visit&& visit) const {
    if (!bits_) {
      const Worker* at = list();
      for (std::size_t i = 0; i < count_; ++i) visit(at[i]);
      return;
    }
    for (std::size_t i = 0; i < capacity_; ++i)
      for (Word word = as_.words[i]; word != 0; word &= word - 1)
        visit(static_cast<Worker>(i * 64 + static_cast<unsigned>(__builtin_ctzll(word))));
  }

 private:
  static constexpr std::size_t kInPlace = 4;

  const Worker* list() const { return capacity_ == 0 ? as_.few : as_.many; }
  Worker* list() { return capacity_ == 0 ? as_.few : as_.many; }
  std::size_t find(Worker worker) const;  // in the list: where it is or would be
  void grow_list(Meter& meter);
  void grow_bits(std::size_t words, Meter& meter);
  void to_bits(std::size_t words, Meter& meter);
  void to_list(Meter& meter);

  std::uint32_t count_ = 0;
  std::uint16_t capacity_ = 0;  // of the list or, if bits, in words; 0: in place
  bool bits_ = false;
  union {
    Worker few[kInPlace];
    Worker* many;
    Word* words;
  } as_ = {};
};

// A worker that holds offsets [from, to) of a run, and not all of it.
struct Part {
  Worker worker;
  std::uint16_t from;
  std::uint16_t to;
};

// Parts sorted by worker, at most one for each.
class Parts {
 public:
  std::size_t size() const { return count_; }
  const Part* begin() const { return data_; }
  const Part* end() const { return data_ + count_; }
  Part* find(Worker worker);
  const Part* find(Worker worker) const { return const_cast<Parts*>(this)->find(worker); }
  void insert(Part part, Meter& meter);        // the worker must have none
  void erase(const Part* part, Meter& meter);  // one of this
  void append(Part part, Meter& meter);        // the worker is greater than all before
  void truncate(std::size_t count, Meter& meter);
  void clear(Meter& meter) { truncate(0, meter); }
  Part* data() { return data_; }

 private:
  void reserve(std::size_t capacity, Meter& meter);
  Part* lower(Worker worker) const;

  Part* data_ = nullptr;
  std::uint32_t count_ = 0;
  std::uint32_t capacity_ = 0;
};

}  // namespace pdserve::radix
