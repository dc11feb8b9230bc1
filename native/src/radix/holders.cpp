#include "pdserve/radix/holders.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace pdserve::radix {

namespace {

template <class T>
T* resized(T* data, std::size_t before, std::size_t after, Meter& meter) {
  void* moved = std::realloc(data, after * sizeof(T));
  if (moved == nullptr) throw std::bad_alloc();
  meter += (after - before) * sizeof(T);  // unsigned arithmetic: shrinking subtracts
  return static_cast<T*>(moved);
}

std::size_t words_for(Worker worker) { return worker / 64u + 1; }

}  // namespace

std::size_t WorkerSet::find(Worker worker) const {
  const Worker* first = list();
  return static_cast<std::size_t>(std::lower_bound(first, first + count_, worker) - first);
}

bool WorkerSet::contains(Worker worker) const {
  if (bits_) {
    const std::size_t word = worker / 64u;
    return word < capacity_ && (as_.words[word] >> (worker % 64u) & 1u) != 0;
  }
  const std::size_t at = find(worker);
  return at < count_ && list()[at] == worker;
}

void WorkerSet::insert(Worker worker, Meter& meter) {
  if (!bits_) {
    const Worker highest = count_ == 0 ? worker : std::max(worker, list()[count_ - 1]);
    const std::size_t words = words_for(highest);
    if (count_ > kInPlace && count_ >= 4 * words) to_bits(words, meter);
  }
  if (bits_) {
    if (words_for(worker) > capacity_) grow_bits(words_for(worker), meter);
    as_.words[worker / 64u] |= Word{1} << (worker % 64u);
    ++count_;
    return;
  }
  if (count_ == (capacity_ == 0 ? kInPlace : capacity_)) grow_list(meter);
  const std::size_t at = find(worker);
  Worker* first = list();
  std::memmove(first + at + 1, first + at, (count_ - at) * sizeof(Worker));
  first[at] = worker;
  ++count_;
}

void WorkerSet::erase(Worker worker, Meter& meter) {
  if (bits_) {
    as_.words[worker / 64u] &= ~(Word{1} << (worker % 64u));
    --count_;
    if (count_ < capacity_) to_list(meter);  // a quarter of what made it bits: no flapping
  } else {
    const std::size_t at = find(worker);
    Worker* first = list();
    std::memmove(first + at, first + at + 1, (count_ - at - 1) * sizeof(Worker));
    --count_;
  }
  if (count_ == 0) clear(meter);
}

void WorkerSet::clear(Meter& meter) {
  if (capacity_ > 0) {
    meter -= capacity_ * (bits_ ? sizeof(Word) : sizeof(Worker));
    std::free(bits_ ? static_cast<void*>(as_.words) : as_.many);
  }
  *this = WorkerSet();
}

void WorkerSet::copy_from(const WorkerSet& other, Meter& meter) {
  *this = other;
  if (capacity_ == 0) return;
  if (bits_) {
    as_.words = resized<Word>(nullptr, 0, capacity_, meter);
    std::memcpy(as_.words, other.as_.words, capacity_ * sizeof(Word));
  } else {
    as_.many = resized<Worker>(nullptr, 0, capacity_, meter);
    std::memcpy(as_.many, other.as_.many, count_ * sizeof(Worker));
  }
}

void WorkerSet::grow_list(Meter& meter) {
  const bool in_place = capacity_ == 0;
  const std::size_t before = capacity_;
  const std::size_t after = in_place ? 2 * kInPlace : before + before / 2;
  Worker* many = resized<Worker>(in_place ? nullptr : as_.many, before, after, meter);
  if (in_place) std::memcpy(many, as_.few, sizeof(as_.few));
  as_.many = many;
  capacity_ = static_cast<std::uint16_t>(after);
}

void WorkerSet::grow_bits(std::size_t words, Meter& meter) {
  as_.words = resized<Word>(as_.words, capacity_, words, meter);
  std::memset(as_.words + capacity_, 0, (words - capacity_) * sizeof(Word));
  capacity_ = static_cast<std::uint16_t>(words);
}

void WorkerSet::to_bits(std::size_t words, Meter& meter) {
  WorkerSet fresh;
  fresh.bits_ = true;
  fresh.grow_bits(words, meter);
  each([&](Worker worker) { fresh.as_.words[worker / 64u] |= Word{1} << (worker % 64u); });
  fresh.count_ = count_;
  clear(meter);
  *this = fresh;
}

void WorkerSet::to_list(Meter& meter) {
  WorkerSet fresh;
  if (count_ > kInPlace) {
    fresh.as_.many = resized<Worker>(nullptr, 0, count_, meter);
    fresh.capacity_ = static_cast<std::uint16_t>(count_);
  }
  Worker* out = fresh.list();
  each([&](Worker worker) { *out++ = worker; });
  fresh.count_ = count_;
  clear(meter);
  *this = fresh;
}

Part* Parts::lower(Worker worker) const {
  return std::lower_bound(data_, data_ + count_, worker,
                          [](const Part& part, Worker value) { return part.worker < value; });
}

Part* Parts::find(Worker worker) {
  Part* at = lower(worker);
  return at != data_ + count_ && at->worker == worker ? at : nullptr;
}

void Parts::reserve(std::size_t capacity, Meter& meter) {
  data_ = resized(data_, capacity_, capacity, meter);
  capacity_ = static_cast<std::uint32_t>(capacity);
}

void Parts::insert(Part part, Meter& meter) {
  if (count_ == capacity_) reserve(count_ + count_ / 2 + 1, meter);
  Part* at = lower(part.worker);
  std::memmove(at + 1, at, static_cast<std::size_t>(data_ + count_ - at) * sizeof(Part));
  *at = part;
  ++count_;
}

void Parts::append(Part part, Meter& meter) {
  if (count_ == capacity_) reserve(count_ + count_ / 2 + 1, meter);
  data_[count_++] = part;
}

void Parts::erase(const Part* part, Meter& meter) {
  Part* at = data_ + (part - data_);
  std::memmove(at, at + 1, static_cast<std::size_t>(data_ + count_ - at - 1) * sizeof(Part));
  truncate(count_ - 1, meter);
}

void Parts::truncate(std::size_t count, Meter& meter) {
  count_ = static_cast<std::uint32_t>(count);
  if (count_ == 0 && data_ != nullptr) {
    meter -= capacity_ * sizeof(Part);
    std::free(data_);
    data_ = nullptr;
    capacity_ = 0;
  } else if (count_ < capacity_ / 4) {
    reserve(count_ * 2, meter);
  }
}

}  // namespace pdserve::radix
