// Blocks of KV from one layout to another, without the GIL. Twin: pdserve/kv/layout.py, which says
// what it is for. The map is the CUDA kernel's too.
#include "bind_layout.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "held.hpp"
#include "layout_map.hpp"

namespace nb = nanobind;

namespace {

using pdserve::LayoutMap;
using pdserve::LayoutSide;

// One end: its memories, the beginnings of its planes, and the blocks concerned.
struct End {
  std::deque<Held> memories;
  std::vector<std::uint8_t*> planes;
  const std::int64_t* blocks = nullptr;
};

LayoutMap map_of(const Numbers& numbers) {
  if (numbers.size() != 10) throw nb::value_error("a map has ten numbers");
  const std::int64_t* n = numbers.data();
  for (int i = 0; i < 10; ++i)
    if (n[i] < 0 || (i < 3 && (n[i] < 1 || n[i] >= INT64_C(1) << 31)))
      throw nb::value_error("the map has a number out of range");
  const auto count = [&](int i) { return static_cast<unsigned>(n[i]); };
  return {count(0), count(1), count(2), 0, n[3], {n[4], n[5], n[6]}, {n[7], n[8], n[9]}};
}

// Everything is checked before the first byte moves: the farthest byte that any unit has.
void hold(End& end, nb::sequence memories, const Numbers& planes, const Numbers& blocks,
          const LayoutMap& map, const LayoutSide& side, int flags) {
  for (nb::handle memory : memories) end.memories.emplace_back(memory, flags);
  if (planes.size() != 2 * static_cast<std::int64_t>(map.planes))
    throw nb::value_error("a plane is a memory and an offset");
  end.blocks = blocks.data();
  const std::int64_t count = blocks.size();
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (end.blocks[i] < 0) throw nb::value_error("there is no block below 0");
    last = std::max(last, end.blocks[i]);
  }
  using Wide = __int128;
  const Wide reach = Wide(last) * side.block + Wide(map.heads - 1) * side.head +
                     Wide(map.tokens - 1) * side.token + map.run;
  for (std::int64_t i = 0; i < planes.size(); i += 2) {
    const std::int64_t memory = planes.data()[i], offset = planes.data()[i + 1];
    if (memory < 0 || memory >= static_cast<std::int64_t>(end.memories.size()) || offset < 0)
      throw nb::value_error("a plane is in no memory");
    const Held& held = end.memories[static_cast<std::size_t>(memory)];
    if (count && reach + offset > held.size()) throw nb::value_error("a block leaves its memory");
    end.planes.push_back(held.as<std::uint8_t>() + offset);
  }
}

// Rows of a size that the compiler knows are a few moves in line instead of a call.
template <std::size_t Run>
void rows(std::uint8_t* to, const std::uint8_t* from, std::size_t, std::int64_t there,
          std::int64_t here, unsigned count) {
  for (; count; --count, to += there, from += here) std::memcpy(to, from, Run);
}

void any_rows(std::uint8_t* to, const std::uint8_t* from, std::size_t run, std::int64_t there,
              std::int64_t here, unsigned count) {
  for (; count; --count, to += there, from += here) std::memcpy(to, from, run);
}

auto rows_of(std::int64_t run) {
  switch (run) {
    case 64:
      return &rows<64>;
    case 128:
      return &rows<128>;
    case 256:
      return &rows<256>;
    default:
      return &any_rows;
  }
}

// The tokens of one head lie in a row at both ends: the map is asked once for all of them.
void copy_units(const LayoutMap& map, const End& destination, const End& source, unsigned index,
                unsigned left) {
  const auto copy = rows_of(map.run);
  while (left) {
    const pdserve::Unit unit = pdserve::unit_of(map, index);
    const unsigned tokens = std::min(map.tokens - unit.token, left);
    copy(destination.planes[unit.plane] +
             pdserve::offset_of(map.destination, destination.blocks[unit.block], unit),
         source.planes[unit.plane] +
             pdserve::offset_of(map.source, source.blocks[unit.block], unit),
         static_cast<std::size_t>(map.run), map.destination.token, map.source.token, tokens);
    index += tokens;
    left -= tokens;
  }
}

std::int64_t convert_layout(nb::handle map_numbers, nb::sequence destination, nb::sequence source,
                            nb::handle destination_planes, nb::handle source_planes,
                            nb::handle destination_blocks, nb::handle source_blocks,
                            std::int64_t first, std::int64_t count) {
  const LayoutMap map = map_of(Numbers(map_numbers));
  const Numbers to_planes(destination_planes), from_planes(source_planes);
  const Numbers to_blocks(destination_blocks), from_blocks(source_blocks);
  if (to_blocks.size() != from_blocks.size())
    throw nb::value_error("as many destinations as sources");
  End to, from;
  hold(to, destination, to_planes, to_blocks, map, map.destination,
       PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
  hold(from, source, from_planes, from_blocks, map, map.source, PyBUF_C_CONTIGUOUS);
  using Wide = __int128;
  const Wide units = Wide(map.planes) * map.heads * map.tokens * to_blocks.size();
  if (units >= Wide(1) << 31) throw nb::value_error("more than 2^31 units: convert fewer blocks");
  if (first < 0 || count < 0 || Wide(first) + count > units)
    throw nb::value_error("there are no such units");
  nb::gil_scoped_release unlocked;
  copy_units(map, to, from, static_cast<unsigned>(first), static_cast<unsigned>(count));
  return count * map.run;
}

}  // namespace

void bind_layout(nb::module_& m) {
  m.def("convert_layout", &convert_layout, nb::arg("map"), nb::arg("destination"),
        nb::arg("source"), nb::arg("destination_planes"), nb::arg("source_planes"),
        nb::arg("destination_blocks"), nb::arg("source_blocks"), nb::arg("first"),
        nb::arg("count"));
}
