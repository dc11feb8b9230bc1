// Runs of bytes of KV: their addresses, copies and checksums, without the GIL. Twins:
// pdserve/transfer/copy_plan.py and copying.py, which say what they are for.
#include "bind_copy.hpp"

#include <cstdint>
#include <cstring>

#include "held.hpp"
#include "pdserve/crc32.hpp"
#include "pdserve/stream_copy.hpp"

namespace nb = nanobind;

namespace {

bool inside(std::int64_t at, std::int64_t length, std::int64_t size) {
  return at >= 0 && length >= 0 && length <= size && at <= size - length;
}

// All runs are checked before the first byte moves.
std::int64_t copy_runs(nb::handle destination, nb::handle source, nb::handle to, nb::handle from,
                       nb::handle lengths, bool streaming) {
  const Held target(destination, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
  const Held origin(source, PyBUF_C_CONTIGUOUS);
  const Held there(to, PyBUF_C_CONTIGUOUS), here(from, PyBUF_C_CONTIGUOUS),
      length(lengths, PyBUF_C_CONTIGUOUS);
  const std::int64_t count = length.size() / 8;
  if (there.size() != length.size() || here.size() != length.size() || length.size() % 8)
    throw nb::value_error("offsets and lengths must be arrays of int64 of one size");
  const auto* const t = there.as<const std::int64_t>();
  const auto* const h = here.as<const std::int64_t>();
  const auto* const n = length.as<const std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i)
    if (!inside(t[i], n[i], target.size()) || !inside(h[i], n[i], origin.size()))
      throw nb::value_error("a run leaves its memory");
  std::int64_t total = 0;
  {
    nb::gil_scoped_release unlocked;
    auto* const out = target.as<std::uint8_t>();
    const auto* const in = origin.as<const std::uint8_t>();
    for (std::int64_t i = 0; i < count; ++i) {
      const auto size = static_cast<std::size_t>(n[i]);
      if (streaming)
        pdserve::stream_copy(out + t[i], in + h[i], size, i + 1 < count ? in + h[i + 1] : nullptr);
      else
        std::memcpy(out + t[i], in + h[i], size);
      total += n[i];
    }
    if (streaming) pdserve::stream_fence();
  }
  return total;
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
  if (!pdserve::crc32_here()) throw nb::value_error("this machine has no carry-less multiplication");
  const Held held(data, PyBUF_C_CONTIGUOUS);
  nb::gil_scoped_release unlocked;
  return pdserve::crc32(start, held.as<const std::uint8_t>(),
                        static_cast<std::size_t>(held.size()));
}

}  // namespace

void bind_copy(nb::module_& m) {
  m.def("copy_runs", &copy_runs, nb::arg("destination"), nb::arg("source"), nb::arg("to"),
        nb::arg("from_"), nb::arg("lengths"), nb::arg("streaming") = false);
  m.def("bind_runs", &bind_runs, nb::arg("source"), nb::arg("destination"), nb::arg("spans"),
        nb::arg("here"), nb::arg("there"), nb::arg("out_source"), nb::arg("out_destination"),
        nb::arg("out_length"));
  m.def("crc32_here", &pdserve::crc32_here);
  m.def("crc32", &crc32, nb::arg("data"), nb::arg("start") = 0);
}
