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

const CharSet& set_of(const Pattern& pattern, const Step& step) {
  return pattern.sets[static_cast<std::size_t>(step.a)];
}

bool is_inner(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Whether no character is in both sets; false also where that would take long to find out.
bool apart(const CharSet& some, const CharSet& others) {
  for (std::size_t i = 0; i < some.ascii.size(); ++i)
    if (some.ascii[i] && others.ascii[i]) return false;
  if (!some.ranges.empty() || !others.ranges.empty() || (some.inverted && others.inverted))
    return false;
  if (!some.inverted && !others.inverted) return (some.classes & others.classes) == 0;
  const auto [inside, outside] = some.inverted ? std::pair(others.classes, some.classes)
                                               : std::pair(some.classes, others.classes);
  return (inside & ~outside) == 0;
}

}  // namespace

Splitter::Splitter(const std::uint8_t* classes, std::vector<Pattern> patterns)
    : classes_(classes), patterns_(std::move(patterns)) {
  for (Pattern& pattern : patterns_) {
    for (std::size_t i = 0; i < pattern.alternatives.size(); ++i) pattern.all |= 1u << i;
    for (std::uint32_t& start : pattern.starts) start &= pattern.all;
    for (std::size_t i = 0; i + 1 < pattern.steps.size(); ++i) {
      Step& now = pattern.steps[i];
      const Step& next = pattern.steps[i + 1];
      if (now.op != Op::kSet) continue;
      const bool must = next.op == Op::kSet && next.b > 0;
      now.keeps = next.op == Op::kDone ||
                  (must && apart(set_of(pattern, now), set_of(pattern, next)));
    }
  }
}

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
  if (first < 0x80) return set.ascii[first];
  const std::uint32_t point = code_point(text + at);
  bool found = set.classes >> classes_[point] & 1;
  for (const auto& [low, high] : set.ranges) found = found || (low <= point && point <= high);
  return found != set.inverted;
}

std::size_t Splitter::match(const Pattern& pattern, const char* text, std::size_t at,
                            std::size_t end) const {
  const auto first = static_cast<unsigned char>(text[at]);
  std::uint32_t left = first < 0x80 ? pattern.starts[first] : pattern.all;
  for (; left != 0; left &= left - 1) {
    const auto begin = static_cast<std::size_t>(pattern.alternatives[__builtin_ctz(left)]);
    const std::size_t stop = run(pattern, begin, text, at, end);
    if (stop != kNone) return stop;
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
      case Op::kSet: {
        const CharSet& set = set_of(pattern, now);
        const std::size_t most = static_cast<std::size_t>(now.c);
        std::size_t left = most;
        for (; left > 0 && at < end; --left) {
          const auto first = static_cast<unsigned char>(text[at]);
          if (!(first < 0x80 ? set.ascii[first] : has(set, text, at))) break;
          at += width(first);
        }
        const std::size_t count = most - left, least = static_cast<std::size_t>(now.b);
        if (count < least) return kNone;
        ++step;
        if (count > least && !now.keeps)
          return give_back(pattern, step, text, count - least, at, end);
        break;
      }
      case Op::kJump:
        step = static_cast<std::size_t>(now.a);
        break;
      case Op::kNotAhead:
        if (at < end && has(set_of(pattern, now), text, at)) return kNone;
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

// Goes on at `step` behind a run of characters, which gives back up to `spare` of them, one after the
// other, until the rest matches.
std::size_t Splitter::give_back(const Pattern& pattern, std::size_t step, const char* text,
                                std::size_t spare, std::size_t at, std::size_t end) const {
  for (;; --spare) {
    const std::size_t stop = run(pattern, step, text, at, end);
    if (stop != kNone || spare == 0) return stop;
    do --at;
    while (is_inner(text[at]));
  }
}

}  // namespace pdserve::bpe
