#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace pdserve::bpe {

// What pdserve/text/tokenization/split_pattern.py makes of a pattern; it says what each part means.
struct CharSet {
  std::array<bool, 128> ascii;
  std::uint32_t classes;  // a bit per class of characters beyond ASCII
  bool inverted;          // of the members beyond ASCII
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
};

enum class Op : std::int32_t { kSet, kFork, kJump, kNotAhead, kDone };

struct Step {
  Op op;
  std::int32_t a, b, c;
  bool keeps = false;  // a set whose characters the next set lacks: giving one back helps nothing
};

struct Pattern {
  std::vector<CharSet> sets;
  std::vector<Step> steps;
  std::array<std::uint32_t, 128> starts;  // by first byte: a bit per alternative that may match
  std::vector<std::int32_t> alternatives;  // where each begins in `steps`
  std::uint32_t all = 0;  // a bit per alternative
  bool keep_gaps;                          // text that nothing matches is a piece, too
};

// Cuts text into pieces, as the regular expressions of `patterns` say, one after the other. Text is
// valid UTF-8. Its classes of characters are borrowed.
class Splitter {
 public:
  Splitter(const std::uint8_t* classes, std::vector<Pattern> patterns);

  // Whether the table has a class for every character of `text`.
  bool knows(std::string_view text) const;

  // Calls `piece(begin, end)` for every piece of text[begin, end), in order.
  template <typename Piece>
  void split(std::string_view text, std::size_t begin, std::size_t end, Piece&& piece,
             std::size_t stage = 0) const {
    if (stage == patterns_.size()) return piece(begin, end);
    const Pattern& pattern = patterns_[stage];
    std::size_t gap = begin;
    for (std::size_t at = begin; at < end;) {
      const std::size_t stop = match(pattern, text.data(), at, end);
      if (stop == kNone) {
        at += width(static_cast<unsigned char>(text[at]));
        continue;
      }
      if (gap < at && pattern.keep_gaps) split(text, gap, at, piece, stage + 1);
      split(text, at, stop, piece, stage + 1);
      gap = at = stop;
    }
    if (gap < end && pattern.keep_gaps) split(text, gap, end, piece, stage + 1);
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  static std::size_t width(unsigned char first) {
    return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  }
  std::size_t match(const Pattern& pattern, const char* text, std::size_t at,
                    std::size_t end) const;
  std::size_t run(const Pattern& pattern, std::size_t step, const char* text, std::size_t at,
                  std::size_t end) const;
  std::size_t give_back(const Pattern& pattern, std::size_t step, const char* text,
                        std::size_t spare, std::size_t at, std::size_t end) const;
  bool has(const CharSet& set, const char* text, std::size_t at) const;

  const std::uint8_t* classes_;
  std::vector<Pattern> patterns_;
};

}  // namespace pdserve::bpe
