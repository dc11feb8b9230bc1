// The router's index: which worker holds how much of a prompt. Twin of
// pdserve/router/prefix_index/radix_tree.py, which says what every call means; this says how it is kept.
//
// Blocks that came one after another are one run. A run grows while one worker alone holds it and is
// cut where chains part, so that those who share a prefix hold whole runs: one bit each, for up to
// 1,024 blocks. Who holds less of a run has a part of it. A walk finds a run by its first name,
// compares names side by side and ANDs bits, run by run; it needs no links between runs, since a
// name stands for everything before it. So events may come in any order, and a hint about the parent
// that is wrong costs memory, never an answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pdserve/radix/runs.hpp"

namespace pdserve::radix {

// Names as they come: u64 values that need not be aligned.
struct Names {
  const std::uint8_t* data;
  std::size_t count;

  Name operator[](std::size_t at) const;
};

struct Counters {
  std::size_t runs;
  std::size_t worker_blocks;
  std::size_t bytes;
  std::size_t dropped_full;
  std::size_t unknown_removed;
};

// What a walk found: for workers in `matched`, how deep. Valid until the next walk.
struct Depths {
  std::vector<Word> matched;  // those who hold the first block on any tier that was asked for
  std::vector<std::uint32_t> depth[kTiers];  // by level and worker

  template <class Visit>
  void each(Visit&& visit) const {
    for (std::size_t i = 0; i < matched.size(); ++i)
      for (Word word = matched[i]; word != 0; word &= word - 1)
        visit(i * 64 + static_cast<std::size_t>(__builtin_ctzll(word)));
  }
};

class Tree {
 public:
  explicit Tree(std::size_t max_blocks);
  ~Tree();
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  std::size_t stored(Worker worker, int tier, const Name* parent, Names names);
  std::size_t removed(Worker worker, int tier, Names names);
  std::size_t cleared(Worker worker, int tier);
  std::size_t drop(Worker worker);

  // Level n counts a block that is held on any of the tiers 0 to n.
  const Depths& match(Names names, int levels);

  std::size_t size() const { return blocks_; }
  std::size_t blocks(Worker worker) const;
  Counters counters() const;

 private:
  // A tier of a worker. `runs` may name some it has left, or twice; `live` of them are true.
  struct Holdings {
    std::vector<RunId> runs;
    std::size_t live = 0;
    std::size_t blocks = 0;
  };
  struct Tiers {
    Holdings tier[kTiers];
  };

  // Where the next block of a chain may stand: behind the one before, in its run.
  struct Cursor {
    bool known = false;
    Place place{};
  };

  // A stretch of a run: offsets [from, to), nothing if both are the same.
  struct Span {
    std::size_t from;
    std::size_t to;
  };

  Tiers& tiers_of(Worker worker);
  Holdings& holdings_of(Worker worker, int tier) { return tiers_of(worker).tier[tier]; }
  void forget_if_empty(Worker worker);
  void enter(Worker worker, int tier, RunId id);
  void leave(Worker worker, int tier);
  void weed(Holdings& holdings, Worker worker, int tier);
  Span held(Worker worker, int tier, const Run& run) const;

  bool add(Worker worker, int tier, Name name, std::size_t more, Cursor& cursor);
  bool may_grow(const Run& run, Worker worker, int tier) const;
  void grow(Run& run, Worker worker, int tier, Name name);
  RunId begin_run(Worker worker, int tier, std::size_t capacity);
  void abandon(Worker worker, int tier, RunId id);
  void hold(Worker worker, int tier, std::size_t count, Cursor& cursor);
  void count(Worker worker, int tier, std::size_t more);
  void let_go(Worker worker, int tier, RunId id, Span span);

  RunId split(RunId id, std::size_t at);
  void split_plane(RunId left, RunId right, int tier);
  void trim(RunId id, Span span);
  void free_gap(RunId id, Span gap);
  void promote(Run& run);

  void begin_walk(const Run& run, std::size_t offset, int levels);
  bool step(const Run& run, Span span, std::size_t depth, int level);
  void follow_parts(const Run& run, Span span, std::size_t depth, int level);
  std::size_t reach(const Run& run, Worker worker, std::size_t from, int level) const;

  std::size_t max_blocks_;
  Meter bytes_ = 0;
  Runs runs_;
  Table table_;
  std::vector<std::unique_ptr<Tiers>> workers_;
  std::size_t blocks_ = 0;
  std::size_t worker_blocks_ = 0;
  std::size_t dropped_full_ = 0;
  std::size_t unknown_removed_ = 0;

  Depths found_;
  std::vector<Word> active_[kTiers];
  std::vector<Word> gone_;
  std::vector<Span> covered_;
};

}  // namespace pdserve::radix
