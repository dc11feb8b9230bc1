// What Python sees of bpe/: one class, made of what pdserve/text/tokenization/byte_level_bpe.py reads
// from a tokenizer's file.
#include "bind_bpe.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "pdserve/bpe/encoder.hpp"

namespace nb = nanobind;
using namespace pdserve::bpe;

namespace {

constexpr std::size_t kCodePoints = 0x110000;
constexpr Py_ssize_t kHeld = 32 * 1024;  // a shorter text takes less time than the lock may

using SetParts = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t, bool,
                            std::vector<std::pair<std::uint32_t, std::uint32_t>>>;
using StepParts = std::array<std::int32_t, 4>;
using PatternParts = std::tuple<std::vector<SetParts>, std::vector<StepParts>,
                                std::vector<std::uint32_t>, std::vector<std::int32_t>, bool>;

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

void check(const Pattern& pattern) {
  const auto sets = static_cast<std::int32_t>(pattern.sets.size());
  const auto steps = static_cast<std::int32_t>(pattern.steps.size());
  const auto inside = [](std::int32_t value, std::int32_t end) { return 0 <= value && value < end; };
  require(pattern.alternatives.size() <= 32, "a pattern has at most 32 alternatives");
  require(steps > 0 && pattern.steps.back().op == Op::kDone, "a pattern ends with the last step");
  for (const std::int32_t begin : pattern.alternatives)
    require(inside(begin, steps), "an alternative begins outside of the pattern");
  for (std::int32_t i = 0; i < steps; ++i) {
    const Step& step = pattern.steps[static_cast<std::size_t>(i)];
    const auto later = [&](std::int32_t to) { return inside(to, steps) && to > i; };
    switch (step.op) {
      case Op::kSet:
        require(inside(step.a, sets) && 0 <= step.b && step.b <= step.c, "a bad set");
        break;
      case Op::kNotAhead:
        require(inside(step.a, sets), "a bad set");
        break;
      case Op::kFork:
        require(later(step.a) && later(step.b), "a step back");
        break;
      case Op::kJump:
        require(later(step.a), "a step back");
        break;
      case Op::kDone:
        break;
      default:
        require(false, "an unknown step");
    }
  }
}

std::array<bool, 128> members(std::uint64_t low, std::uint64_t high) {
  std::array<bool, 128> found{};
  for (std::size_t i = 0; i < found.size(); ++i) found[i] = (i < 64 ? low : high) >> (i & 63) & 1;
  return found;
}

Pattern pattern_of(const PatternParts& parts) {
  const auto& [sets, steps, starts, alternatives, keep_gaps] = parts;
  require(starts.size() == 128, "starts must have an entry for each ASCII character");
  Pattern pattern;
  for (const auto& [low, high, classes, inverted, ranges] : sets)
    pattern.sets.push_back({members(low, high), classes, inverted, ranges});
  for (const auto& [op, a, b, c] : steps) pattern.steps.push_back({static_cast<Op>(op), a, b, c});
  std::copy(starts.begin(), starts.end(), pattern.starts.begin());
  pattern.alternatives = alternatives;
  pattern.keep_gaps = keep_gaps;
  check(pattern);
  return pattern;
}

Encoder::Vocabulary vocabulary_of(const std::vector<std::pair<nb::bytes, Id>>& tokens) {
  Encoder::Vocabulary found;
  for (const auto& [token, id] : tokens) {
    require(token.size() > 0, "a token must not be empty");
    found.emplace_back(std::string(token.c_str(), token.size()), id);
  }
  return found;
}

class BpeEncoder {
 public:
  BpeEncoder(nb::bytes classes, const std::vector<PatternParts>& patterns, const nb::bytes& merges,
             const std::vector<Id>& bytes, const std::vector<std::pair<nb::bytes, Id>>& added,
             const std::vector<std::pair<nb::bytes, Id>>& whole)
      : classes_(std::move(classes)),
        encoder_(splitter(classes_, patterns), merges_of(merges, bytes), vocabulary_of(added),
                 vocabulary_of(whole)) {}

  // A tokenizer's text is bounded by the request's body; ids take less than four bytes a byte.
  nb::object encode(const nb::str& text) {
    Py_ssize_t size = 0;
    const char* const bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (!bytes) throw nb::python_error();
    const std::string_view view(bytes, static_cast<std::size_t>(size));
    Ids ids;
    bool known;
    if (size > kHeld) {
      nb::gil_scoped_release unlocked;
      known = encoder_.encode(view, ids);
    } else {
      known = encoder_.encode(view, ids);
    }
    if (!known) return nb::none();
    return nb::bytes(ids.data(), ids.size() * sizeof(Id));
  }

 private:
  static Splitter splitter(const nb::bytes& classes, const std::vector<PatternParts>& parts) {
    require(classes.size() == kCodePoints, "classes must have a byte for each code point");
    std::vector<Pattern> patterns;
    for (const auto& each : parts) patterns.push_back(pattern_of(each));
    return {reinterpret_cast<const std::uint8_t*>(classes.c_str()), std::move(patterns)};
  }

  static Merges merges_of(const nb::bytes& merges, const std::vector<Id>& bytes) {
    require(merges.size() % (3 * sizeof(Id)) == 0, "merges must be whole, three ids each");
    std::vector<Id> ids(merges.size() / sizeof(Id));
    if (!ids.empty()) std::memcpy(ids.data(), merges.c_str(), merges.size());
    return {ids.data(), ids.size() / 3, bytes_of(bytes)};
  }

  static std::array<Id, 256> bytes_of(const std::vector<Id>& ids) {
    require(ids.size() == 256, "there must be an id for each byte");
    std::array<Id, 256> bytes;
    std::copy(ids.begin(), ids.end(), bytes.begin());
    return bytes;
  }

  nb::bytes classes_;
  Encoder encoder_;
};

}  // namespace

void bind_bpe(nb::module_& m) {
  nb::class_<BpeEncoder>(m, "BpeEncoder")
      .def(nb::init<nb::bytes, const std::vector<PatternParts>&, const nb::bytes&,
                    const std::vector<Id>&, const std::vector<std::pair<nb::bytes, Id>>&,
                    const std::vector<std::pair<nb::bytes, Id>>&>(),
           nb::kw_only(), nb::arg("classes"), nb::arg("patterns"), nb::arg("merges"),
           nb::arg("bytes"), nb::arg("added"), nb::arg("whole"))
      .def("encode", &BpeEncoder::encode, nb::arg("text"));
}
