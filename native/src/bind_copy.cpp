// Runs of bytes of KV: their addresses, copies and checksums, without the GIL. Twins:
// pdserve/transfer/copy_plan.py and copying.py, which say what they are for.
#include "bind_copy.hpp"

#include <cstdint>
#include <cstring>

#include "held.hpp"
#include "pdserve/crc32.hpp"
#include "pdserve/stream_copy.hpp"
#include "pdserve/summed_copy.hpp"

namespace nb = nanobind;

namespace {

bool inside(std::int64_t at, std::int64_t length, std::int64_t size) {
  return at >= 0 && length >= 0 && length <= size && at <= size - length;
}

// A list of copies, whose memory is held. All runs are checked before the first byte moves.
class Copies {
 public:
  Copies(nb::handle destination, nb::handle source, nb::handle to, nb::handle from,
         nb::handle lengths)
      : target_(destination, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS),
        origin_(source, PyBUF_C_CONTIGUOUS),
        to_(to),
        from_(from),
        length_(lengths) {
    if (to_.size() != length_.size() || from_.size() != length_.size())
      throw nb::value_error("offsets and lengths must be arrays of int64 of one size");
    for (std::int64_t i = 0; i < length_.size(); ++i)
      if (!inside(to_.data()[i], size(i), target_.size()) ||
          !inside(from_.data()[i], size(i), origin_.size()))
        throw nb::value_error("a run leaves its memory");
  }

  // Calls copy(to, from, size, source of the next run or null) for each run.
  template <typename Copy>
  void each(Copy copy) const {
    for (std::int64_t i = 0; i < length_.size(); ++i)
      copy(target_.as<std::uint8_t>() + to_.data()[i], source(i), static_cast<std::size_t>(size(i)),
           i + 1 < length_.size() ? source(i + 1) : nullptr);
  }

 private:
  std::int64_t size(std::int64_t i) const { return length_.data()[i]; }
  const std::uint8_t* source(std::int64_t i) const {
    return origin_.as<const std::uint8_t>() + from_.data()[i];
  }

  const Held target_, origin_;
  const Numbers to_, from_, length_;
};

std::int64_t copy_runs(nb::handle destination, nb::handle source, nb::handle to, nb::handle from,
                       nb::handle lengths, bool streaming) {
  const Copies copies(destination, source, to, from, lengths);
  std::int64_t total = 0;
  nb::gil_scoped_release unlocked;
  copies.each([&](std::uint8_t* out, const std::uint8_t* in, std::size_t size,
                  const std::uint8_t* next) {
    if (streaming)
      pdserve::stream_copy(out, in, size, next);
    else
      std::memcpy(out, in, size);
    total += static_cast<std::int64_t>(size);
  });
  if (streaming) pdserve::stream_fence();
  return total;
}

void need_crc32() {
  if (!pdserve::crc32_here()) throw nb::value_error("this machine has no carry-less multiplication");
}

std::uint32_t copy_summed(nb::handle destination, nb::handle source, nb::handle to, nb::handle from,
                          nb::handle lengths, bool streaming, std::uint32_t start) {
  need_crc32();
  const Copies copies(destination, source, to, from, lengths);
  nb::gil_scoped_release unlocked;
  copies.each([&](std::uint8_t* out, const std::uint8_t* in, std::size_t size,
                  const std::uint8_t* next) {
    start = pdserve::summed_copy(start, out, in, size, next, streaming);
  });
  if (streaming) pdserve::stream_fence();
  return start;
}

std::uint32_t crc32_runs(nb::handle memory, nb::handle from, nb::handle lengths,
                         std::uint32_t start) {
  need_crc32();
  const Held held(memory, PyBUF_C_CONTIGUOUS);
  const Numbers at(from), length(lengths);
  if (at.size() != length.size()) throw nb::value_error("as many offsets as lengths are needed");
  for (std::int64_t i = 0; i < length.size(); ++i)
    if (!inside(at.data()[i], length.data()[i], held.size()))
      throw nb::value_error("a run leaves its memory");
  nb::gil_scoped_release unlocked;
  for (std::int64_t i = 0; i < length.size(); ++i)
    start = pdserve::crc32(start, held.as<const std::uint8_t>() + at.data()[i],
                           static_cast<std::size_t>(length.data()[i]));
  return start;
}

// `outputs` are three arrays to fill; the number of runs filled is returned.
std::int64_t bind_runs(nb::handle source, nb::handle destination, nb::handle spans,
                       std::int64_t here, std::int64_t there, nb::handle out_source,
                       nb::handle out_destination, nb::handle out_length) {
  const Numbers ours(source), theirs(destination), each(spans);
  const Numbers from(out_source, PyBUF_WRITABLE), to(out_destination, PyBUF_WRITABLE),
      length(out_length, PyBUF_WRITABLE);
  const std::int64_t blocks = ours.size(), width = each.size() / 3;
  if (theirs.size() != blocks || each.size() % 3)
    throw nb::value_error("as many destinations as sources, and spans of three numbers");
  const std::int64_t room = blocks * width;
  if (from.size() < room || to.size() < room || length.size() < room)
    throw nb::value_error("the runs do not fit their arrays");
  nb::gil_scoped_release unlocked;
  const std::int64_t *s = ours.data(), *d = theirs.data(), *span = each.data();
  std::int64_t *f = from.data(), *t = to.data(), *n = length.data();
  // Whole blocks merge with their neighbours at both ends.
  const bool whole = width == 1 && here == there && span[0] == 0 && span[1] == 0 && span[2] == here;
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < blocks; ++i) {
    if (whole && i > 0 && s[i] == s[i - 1] + 1 && d[i] == d[i - 1] + 1) {
      n[at - 1] += here;
      continue;
    }
    for (std::int64_t j = 0; j < width; ++j, ++at) {
      f[at] = s[i] * here + span[3 * j];
      t[at] = d[i] * there + span[3 * j + 1];
      n[at] = span[3 * j + 2];
    }
  }
  return at;
}

std::uint32_t crc32(nb::handle data, std::uint32_t start) {
  need_crc32();
  const Held held(data, PyBUF_C_CONTIGUOUS);
  nb::gil_scoped_release unlocked;
  return pdserve::crc32(start, held.as<const std::uint8_t>(),
                        static_cast<std::size_t>(held.size()));
}

}  // namespace

void bind_copy(nb::module_& m) {
  m.def("copy_runs", &copy_runs, nb::arg("destination"), nb::arg("source"), nb::arg("to"),
        nb::arg("from_"), nb::arg("lengths"), nb::arg("streaming") = false);
  m.def("copy_summed", &copy_summed, nb::arg("destination"), nb::arg("source"), nb::arg("to"),
        nb::arg("from_"), nb::arg("lengths"), nb::arg("streaming") = false, nb::arg("start") = 0);
  m.def("crc32_runs", &crc32_runs, nb::arg("memory"), nb::arg("from_"), nb::arg("lengths"),
        nb::arg("start") = 0);
  m.def("bind_runs", &bind_runs, nb::arg("source"), nb::arg("destination"), nb::arg("spans"),
        nb::arg("here"), nb::arg("there"), nb::arg("out_source"), nb::arg("out_destination"),
        nb::arg("out_length"));
  m.def("crc32_here", &pdserve::crc32_here);
  m.def("crc32_wide", &pdserve::crc32_wide);
  m.def("crc32", &crc32, nb::arg("data"), nb::arg("start") = 0);
}
