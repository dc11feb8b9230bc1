// A backtracking matcher for the small patterns that cut text before BPE. Patterns have no loops
// but those over one set of characters, so recursion is no deeper than a pattern is long.
#include "pdserve/bpe/splitter.hpp"

#include <cstring>

namespace pdserve::bpe {

namespace {

std::uint32_t code_point(const char* text) {
  const auto* b = reinterpret_cast<const unsigned char*>(text);
  if (b[0] < 0x80) return b[0];
  if (b[0] < 0xE0) return (b[0] & 0x1Fu) << 6 | (b[1] & 0x3Fu);
  if (b[0] < 0xF0) return (b[0] & 0x0Fu) << 12 | (b[1] & 0x3Fu) << 6 | (b[2] & 0x3Fu);
  return (b[0] & 0x07u) << 18 | (b[1] & 0x3Fu) << 12 | (b[2] & 0x3Fu) << 6 | (b[3] & 0x3Fu);
}

bool is_inner(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

Splitter::Splitter(const std::uint8_t* classes, std::vector<Pattern> patterns)
    : classes_(classes), patterns_(std::move(patterns)) {}

bool Splitter::knows(std::string_view text) const {
  constexpr std::uint64_t kBeyondAscii = 0x8080808080808080ull;
  for (std::size_t at = 0; at < text.size();) {
    std::uint64_t eight = kBeyondAscii;
    if (text.size() - at >= sizeof(eight)) std::memcpy(&eight, text.data() + at, sizeof(eight));
    if (!(eight & kBeyondAscii)) {
      at += sizeof(eight);
      continue;
    }
    const auto first = static_cast<unsigned char>(text[at]);
    if (first >= 0x80 && classes_[code_point(text.data() + at)] == 0) return false;
    at += width(first);
  }
  return true;
}

bool Splitter::has(const CharSet& set, const char* text, std::size_t at) const {
  const auto first = static_cast<unsigned char>(text[at]);
  if (first < 0x80) return set.ascii[first >> 6] >> (first & 63) & 1;
  const std::uint32_t point = code_point(text + at);
  bool found = set.classes >> classes_[point] & 1;
  for (const auto& [low, high] : set.ranges) found = found || (low <= point && point <= high);
  return found != set.inverted;
}

std::size_t Splitter::match(const Pattern& pattern, const char* text, std::size_t at,
                            std::size_t end) const {
  const auto first = static_cast<unsigned char>(text[at]);
  std::uint32_t left = first < 0x80 ? pattern.starts[first] : ~0u;
  for (const std::int32_t begin : pattern.alternatives) {
    if (left & 1) {
      const std::size_t stop = run(pattern, static_cast<std::size_t>(begin), text, at, end);
      if (stop != kNone) return stop;
    }
    left >>= 1;
  }
  return kNone;
}

std::size_t Splitter::run(const Pattern& pattern, std::size_t step, const char* text,
                          std::size_t at, std::size_t end) const {
  for (;;) {
    const Step& now = pattern.steps[step];
    switch (now.op) {
      case Op::kDone:
        return at;
      case Op::kSet:
        return repeat(pattern, step, text, at, end);
      case Op::kJump:
        step = static_cast<std::size_t>(now.a);
        break;
      case Op::kNotAhead:
        if (at < end && has(pattern.sets[static_cast<std::size_t>(now.a)], text, at)) return kNone;
        ++step;
        break;
      case Op::kFork: {
        const std::size_t stop = run(pattern, static_cast<std::size_t>(now.a), text, at, end);
        if (stop != kNone) return stop;
        step = static_cast<std::size_t>(now.b);
        break;
      }
    }
  }
}

// Takes as many characters of a set as it can, and gives back one after the other until the rest
// matches.
std::size_t Splitter::repeat(const Pattern& pattern, std::size_t step, const char* text,
                             std::size_t at, std::size_t end) const {
  const Step& now = pattern.steps[step];
  const CharSet& set = pattern.sets[static_cast<std::size_t>(now.a)];
  std::size_t count = 0;
  const auto least = static_cast<std::size_t>(now.b), most = static_cast<std::size_t>(now.c);
  const auto [low, high] = set.ascii;
  for (; count < most && at < end; ++count) {
    const auto first = static_cast<unsigned char>(text[at]);
    if (first < 0x80) {
      if (!((first < 64 ? low : high) >> (first & 63) & 1)) break;
      ++at;
    } else {
      if (!has(set, text, at)) break;
      at += width(first);
    }
  }
  for (; count >= least; --count) {
    const std::size_t stop = run(pattern, step + 1, text, at, end);
    if (stop != kNone) return stop;
    if (count == least) break;
    do --at;
    while (is_inner(text[at]));
  }
  return kNone;
}

}  // namespace pdserve::bpe
