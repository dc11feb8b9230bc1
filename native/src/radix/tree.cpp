#include "pdserve/radix/tree.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace pdserve::radix {

namespace {

// How many leading names agree. Eight at a time: most often all of them do.
std::size_t common(const Name* ours, const std::uint8_t* theirs, std::size_t count) {
  std::size_t same = 0;
  for (; same + 8 <= count; same += 8) {
    Name other[8];
    std::memcpy(other, theirs + same * sizeof(Name), sizeof(other));
    Name differ = 0;
    for (int i = 0; i < 8; ++i) differ |= ours[same + i] ^ other[i];
    if (differ != 0) break;
  }
  Name other;
  for (; same < count; ++same) {
    std::memcpy(&other, theirs + same * sizeof(Name), sizeof(other));
    if (ours[same] != other) break;
  }
  return same;
}

template <class Visit>
void each_bit(const std::vector<Word>& words, Visit&& visit) {
  for (std::size_t i = 0; i < words.size(); ++i)
    for (Word word = words[i]; word != 0; word &= word - 1)
      visit(static_cast<Worker>(i * 64 + static_cast<unsigned>(__builtin_ctzll(word))));
}

bool test(const std::vector<Word>& words, Worker worker) {
  return (words[worker / 64u] >> (worker % 64u) & 1u) != 0;
}

void set(std::vector<Word>& words, Worker worker) {
  words[worker / 64u] |= Word{1} << (worker % 64u);
}

void unset(std::vector<Word>& words, Worker worker) {
  words[worker / 64u] &= ~(Word{1} << (worker % 64u));
}

// words |= the set
void unite(std::vector<Word>& words, const WorkerSet& workers) {
  std::size_t count;
  if (const Word* bits = workers.bits(count)) {
    count = std::min(count, words.size());
    for (std::size_t i = 0; i < count; ++i) words[i] |= bits[i];
  } else {
    workers.each([&](Worker worker) { set(words, worker); });
  }
}

constexpr std::size_t kAhead = 8;  // names whose place in the table is fetched early

}  // namespace

Name Names::operator[](std::size_t at) const {
  Name name;
  std::memcpy(&name, data + at * sizeof(Name), sizeof(name));
  return name;
}

Tree::Tree(std::size_t max_blocks) : max_blocks_(max_blocks), table_(runs_, max_blocks) {}

Tree::~Tree() {
  for (std::size_t worker = 0; worker < workers_.size(); ++worker)
    drop(static_cast<Worker>(worker));
}

std::size_t Tree::blocks(Worker worker) const {
  std::size_t sum = 0;
  if (worker < workers_.size() && workers_[worker])
    for (const Holdings& holdings : workers_[worker]->tier) sum += holdings.blocks;
  return sum;
}

Counters Tree::counters() const {
  return {runs_.size(), worker_blocks_, bytes_, dropped_full_, unknown_removed_};
}

// ------------------------------------------------------------- what a worker is part of

Tree::Tiers& Tree::tiers_of(Worker worker) {
  if (worker >= workers_.size()) workers_.resize(worker + std::size_t{1});
  if (!workers_[worker]) {
    workers_[worker] = std::make_unique<Tiers>();
    bytes_ += sizeof(Tiers);
  }
  return *workers_[worker];
}

void Tree::forget_if_empty(Worker worker) {
  if (worker >= workers_.size() || !workers_[worker] || blocks(worker) > 0) return;
  workers_[worker].reset();
  bytes_ -= sizeof(Tiers);
}

void Tree::enter(Worker worker, int tier, RunId id) {
  Holdings& holdings = holdings_of(worker, tier);
  const std::size_t before = holdings.runs.capacity();
  holdings.runs.push_back(id);
  bytes_ += (holdings.runs.capacity() - before) * sizeof(RunId);
  ++holdings.live;
  if (holdings.runs.size() > 2 * holdings.live + 32) weed(holdings, worker, tier);
}

void Tree::leave(Worker worker, int tier) {
  Holdings& holdings = holdings_of(worker, tier);
  if (--holdings.live > 0) return;
  bytes_ -= holdings.runs.capacity() * sizeof(RunId);
  std::vector<RunId>().swap(holdings.runs);
}

void Tree::weed(Holdings& holdings, Worker worker, int tier) {
  std::vector<RunId>& runs = holdings.runs;
  std::sort(runs.begin(), runs.end());
  runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
  const auto left = [&](RunId id) {  // not by its span: a run that has just begun is empty
    const Plane* plane = runs_[id].peek(tier);
    return plane == nullptr ||
           (!plane->full.contains(worker) && plane->parts.find(worker) == nullptr);
  };
  runs.erase(std::remove_if(runs.begin(), runs.end(), left), runs.end());
}

Tree::Span Tree::held(Worker worker, int tier, const Run& run) const {
  const Plane* plane = run.peek(tier);
  if (plane == nullptr) return {0, 0};
  if (plane->full.contains(worker)) return {run.from, run.to};
  const Part* part = plane->parts.find(worker);
  return part == nullptr ? Span{0, 0} : Span{part->from, part->to};
}

// ------------------------------------------------------------- events

std::size_t Tree::stored(Worker worker, int tier, const Name* parent, Names names) {
  const std::size_t before = worker_blocks_;
  Cursor cursor;
  if (parent != nullptr && table_.find(*parent, cursor.place)) {
    cursor.known = true;
    ++cursor.place.offset;
  }
  for (std::size_t i = 0; i < names.count;) {
    if (cursor.known) {  // a chain that is here goes on beside the names
      const Run& run = runs_[cursor.place.run];
      const std::size_t at = cursor.place.offset;
      const std::size_t same = common(run.names + at, names.data + i * sizeof(Name),
                                      std::min(run.to - at, names.count - i));
      if (same > 0) {
        hold(worker, tier, same, cursor);
        i += same;
        continue;
      }
    }
    if (i + kAhead < names.count) table_.prefetch(names[i + kAhead]);
    if (table_.find(names[i], cursor.place)) {
      cursor.known = true;
      continue;
    }
    if (!add(worker, tier, names[i], names.count - i, cursor)) ++dropped_full_;
    ++i;
  }
  return worker_blocks_ - before;
}

std::size_t Tree::removed(Worker worker, int tier, Names names) {
  const std::size_t before = worker_blocks_;
  for (std::size_t i = 0; i < names.count;) {
    if (i + kAhead < names.count) table_.prefetch(names[i + kAhead]);
    Place place{};
    if (!table_.find(names[i], place)) {
      ++unknown_removed_;
      ++i;
      continue;
    }
    const Run& run = runs_[place.run];
    const Span whole = held(worker, tier, run);
    if (place.offset < whole.from || place.offset >= whole.to) {
      // Others' blocks: a prompt with one block of a run mostly has its neighbours too.
      const std::size_t end = place.offset < whole.from ? whole.from : run.to;
      const std::size_t same = common(run.names + place.offset, names.data + i * sizeof(Name),
                                      std::min(end - place.offset, names.count - i));
      unknown_removed_ += same;
      i += same;
      continue;
    }
    // Neighbours go together, in whichever direction they come.
    const Name* ours = runs_[place.run].names;
    Span span{place.offset, place.offset + std::size_t{1}};
    ++i;
    while (i < names.count && span.to < whole.to && names[i] == ours[span.to]) ++span.to, ++i;
    if (span.to == place.offset + std::size_t{1})
      while (i < names.count && span.from > whole.from && names[i] == ours[span.from - 1])
        --span.from, ++i;
    let_go(worker, tier, place.run, span);
  }
  forget_if_empty(worker);
  return before - worker_blocks_;
}

std::size_t Tree::cleared(Worker worker, int tier) {
  if (worker >= workers_.size() || !workers_[worker]) return 0;
  const std::size_t before = worker_blocks_;
  Holdings& holdings = workers_[worker]->tier[tier];
  const std::vector<RunId> runs = holdings.runs;
  for (std::size_t i = 0; holdings.live > 0; ++i) {
    const Span span = held(worker, tier, runs_[runs[i]]);
    if (span.from < span.to) let_go(worker, tier, runs[i], span);
  }
  forget_if_empty(worker);
  return before - worker_blocks_;
}

std::size_t Tree::drop(Worker worker) {
  std::size_t sum = 0;
  for (int tier = 0; tier < kTiers; ++tier) sum += cleared(worker, tier);
  return sum;
}

// ------------------------------------------------------------- taking hold

// One new block behind the cursor. False: there is no room for it.
bool Tree::add(Worker worker, int tier, Name name, std::size_t more, Cursor& cursor) {
  Cursor after = cursor;
  cursor.known = false;
  if (blocks_ >= max_blocks_) return false;
  if (!after.known || !may_grow(runs_[after.place.run], worker, tier) ||
      after.place.offset < runs_[after.place.run].to) {
    // Chains part here: cut, so that those who hold what comes before hold a whole run.
    if (after.known && after.place.offset < runs_[after.place.run].to)
      split(after.place.run, after.place.offset);
    after.place = {begin_run(worker, tier, std::min({more, kMaxRun, max_blocks_ - blocks_})), 0};
  }
  Run& run = runs_[after.place.run];
  if (!table_.insert(name, {after.place.run, run.to}, bytes_)) {
    if (run.size() == 0) abandon(worker, tier, after.place.run);
    return false;
  }
  grow(run, worker, tier, name);
  cursor = {true, {after.place.run, run.to}};
  return true;
}

// A run grows only while one worker alone holds all of it: no other worker loses a whole run.
bool Tree::may_grow(const Run& run, Worker worker, int tier) const {
  if (run.to == kMaxRun || held(worker, tier, run).to != run.to) return false;
  for (int other = 0; other < kTiers; ++other) {
    const Plane* plane = run.peek(other);
    if (plane == nullptr || plane->full.size() == 0) continue;
    if (plane->full.size() > 1 || !plane->full.contains(worker)) return false;
  }
  return true;
}

void Tree::grow(Run& run, Worker worker, int tier, Name name) {
  if (run.to == run.capacity)
    runs_.reserve(run, std::min<std::size_t>(kMaxRun, run.capacity + run.capacity / 2 + 4), bytes_);
  for (int other = 0; other < kTiers; ++other) {  // its other tiers hold what was the whole
    Plane* plane = other == tier || run.peek(other) == nullptr ? nullptr : &run.plane(other);
    if (plane == nullptr || plane->full.size() == 0) continue;
    plane->full.erase(worker, bytes_);
    plane->parts.insert({worker, run.from, run.to}, bytes_);
  }
  run.names[run.to++] = name;
  if (Part* part = run.plane(tier).parts.find(worker)) ++part->to;
  ++blocks_;
  count(worker, tier, 1);
}

RunId Tree::begin_run(Worker worker, int tier, std::size_t capacity) {
  const RunId id = runs_.make(capacity, bytes_);
  runs_.touch(runs_[id], tier, bytes_);
  runs_[id].plane(tier).full.insert(worker, bytes_);
  enter(worker, tier, id);
  return id;
}

void Tree::abandon(Worker worker, int tier, RunId id) {
  runs_[id].plane(tier).full.erase(worker, bytes_);
  leave(worker, tier);
  runs_.release(id, bytes_);
}

void Tree::count(Worker worker, int tier, std::size_t more) {
  holdings_of(worker, tier).blocks += more;
  worker_blocks_ += more;
}

// The worker holds `count` blocks from the cursor on, which moves behind them.
void Tree::hold(Worker worker, int tier, std::size_t length, Cursor& cursor) {
  const RunId id = cursor.place.run;
  const std::size_t from = cursor.place.offset;
  const std::size_t to = from + length;
  Run& run = runs_[id];
  runs_.touch(run, tier, bytes_);
  Plane& plane = run.plane(tier);
  cursor.place.offset = static_cast<std::uint16_t>(to);
  if (plane.full.contains(worker)) return;
  Part* part = plane.parts.find(worker);
  if (part != nullptr && (from > part->to || to < part->from)) {
    // One stretch per worker and run: cut where this one begins, or where that one does.
    const std::size_t at = from > part->to ? from : part->from;
    const RunId right = split(id, at);
    cursor.place = {from >= at ? right : id, static_cast<std::uint16_t>(from >= at ? 0 : from)};
    return hold(worker, tier, length, cursor);
  }
  Part grown{worker, static_cast<std::uint16_t>(from), static_cast<std::uint16_t>(to)};
  if (part != nullptr) {
    grown.from = std::min(grown.from, part->from);
    grown.to = std::max(grown.to, part->to);
    count(worker, tier, (grown.to - grown.from) - std::size_t(part->to - part->from));
    *part = grown;
  } else {
    count(worker, tier, length);
  }
  if (grown.from == run.from && grown.to == run.to) {
    if (part != nullptr) plane.parts.erase(part, bytes_);
    plane.full.insert(worker, bytes_);
  } else if (part == nullptr) {
    plane.parts.insert(grown, bytes_);
  }
  if (part == nullptr) enter(worker, tier, id);
}

// ------------------------------------------------------------- letting go

// The worker holds all of `span`, and none of it after this.
void Tree::let_go(Worker worker, int tier, RunId id, Span span) {
  Run& run = runs_[id];
  const Span whole = held(worker, tier, run);
  if (span.from > whole.from && span.to < whole.to) split(id, span.to);
  Plane& plane = run.plane(tier);
  Part rest{worker, run.from, run.to};
  if (Part* part = plane.parts.find(worker)) {
    rest = *part;
    plane.parts.erase(part, bytes_);
  } else {
    plane.full.erase(worker, bytes_);
  }
  if (rest.from == span.from)
    rest.from = static_cast<std::uint16_t>(span.to);
  else
    rest.to = static_cast<std::uint16_t>(span.from);
  if (rest.from < rest.to)
    plane.parts.insert(rest, bytes_);
  else
    leave(worker, tier);
  count(worker, tier, span.from - span.to);  // unsigned arithmetic: subtracts
  trim(id, span);
}

// Frees the blocks of a span that no worker holds any more, after a worker has released it.
void Tree::trim(RunId id, Span span) {
  Run& run = runs_[id];
  covered_.clear();
  for (int tier = 0; tier < kTiers; ++tier) {
    const Plane* plane = run.peek(tier);
    if (plane == nullptr) continue;
    if (plane->full.size() > 0) return;
    for (const Part& part : plane->parts) {
      if (part.from <= span.from && part.to >= span.to) return;
      if (part.from < span.to && part.to > span.from) covered_.push_back({part.from, part.to});
    }
  }
  std::sort(covered_.begin(), covered_.end(),
            [](const Span& a, const Span& b) { return a.to > b.to; });
  // From the right, since freeing in the middle moves what is right of it to another run.
  std::size_t to = span.to;
  for (const Span& part : covered_) {
    if (part.to < to) free_gap(id, {part.to, to});
    to = std::min(to, part.from);
    if (to <= span.from) return;
  }
  free_gap(id, {span.from, to});
}

void Tree::free_gap(RunId id, Span gap) {
  Run& run = runs_[id];
  if (gap.from > run.from && gap.to < run.to) split(id, gap.to);
  for (std::size_t at = gap.from; at < gap.to; ++at) {
    if (at + kAhead < gap.to) table_.prefetch(run.names[at + kAhead]);
    table_.erase(run.names[at], bytes_);
  }
  blocks_ -= gap.to - gap.from;
  if (gap.to == run.to)
    run.to = static_cast<std::uint16_t>(gap.from);
  else
    run.from = static_cast<std::uint16_t>(gap.to);
  if (run.size() == 0) return runs_.release(id, bytes_);
  if (run.to * 2 + 8 < run.capacity) runs_.reserve(run, run.to, bytes_);
  promote(run);
}

// Who holds all that is left of a run holds it whole.
void Tree::promote(Run& run) {
  for (int tier = 0; tier < kTiers; ++tier) {
    if (run.peek(tier) == nullptr) continue;
    Plane& plane = run.plane(tier);
    Part* out = plane.parts.data();
    for (const Part& part : plane.parts) {
      if (part.from == run.from && part.to == run.to)
        plane.full.insert(part.worker, bytes_);
      else
        *out++ = part;
    }
    plane.parts.truncate(static_cast<std::size_t>(out - plane.parts.data()), bytes_);
  }
}

// What is at `at` and behind it becomes a run of its own, which is returned.
RunId Tree::split(RunId id, std::size_t at) {
  Run& left = runs_[id];
  const std::size_t length = left.to - at;
  const RunId right_id = runs_.make(length, bytes_);
  Run& right = runs_[right_id];
  std::memcpy(right.names, left.names + at, length * sizeof(Name));
  for (std::size_t i = 0; i < length; ++i) {
    if (i + kAhead < length) table_.prefetch(right.names[i + kAhead]);
    table_.move(right.names[i], {right_id, static_cast<std::uint16_t>(i)});
  }
  right.to = static_cast<std::uint16_t>(length);
  left.to = static_cast<std::uint16_t>(at);
  runs_.reserve(left, at, bytes_);
  for (int tier = 0; tier < kTiers; ++tier)
    if (left.peek(tier) != nullptr) split_plane(id, right_id, tier);
  return right_id;
}

void Tree::split_plane(RunId left_id, RunId right_id, int tier) {
  Run& left = runs_[left_id];
  Run& right = runs_[right_id];
  runs_.touch(right, tier, bytes_);
  Plane& ours = left.plane(tier);
  Plane& theirs = right.plane(tier);
  const std::uint16_t at = left.to;
  theirs.full.copy_from(ours.full, bytes_);
  Part* out = ours.parts.data();
  for (Part part : ours.parts) {  // a copy: `out` writes behind it
    if (part.to > at) {
      const auto from = static_cast<std::uint16_t>(std::max(part.from, at) - at);
      const auto to = static_cast<std::uint16_t>(part.to - at);
      if (from == 0 && to == right.to)
        theirs.full.insert(part.worker, bytes_);
      else
        theirs.parts.append({part.worker, from, to}, bytes_);
    }
    if (part.from >= at) {
      leave(part.worker, tier);
      continue;
    }
    part.to = std::min(part.to, at);
    if (part.from == left.from && part.to == at)
      ours.full.insert(part.worker, bytes_);
    else
      *out++ = part;
  }
  ours.parts.truncate(static_cast<std::size_t>(out - ours.parts.data()), bytes_);
  theirs.full.each([&](Worker worker) { enter(worker, tier, right_id); });
  for (const Part& part : theirs.parts) enter(part.worker, tier, right_id);
}

// ------------------------------------------------------------- walking

const Depths& Tree::match(Names names, int levels) {
  const std::size_t words = (workers_.size() + 63) / 64;
  found_.matched.assign(words, 0);
  std::size_t depth = 0;
  while (depth < names.count) {
    Place place;
    if (!table_.find(names[depth], place)) break;
    const Run& run = runs_[place.run];
    if (depth == 0) begin_walk(run, place.offset, levels);
    const std::size_t length =
        common(run.names + place.offset, names.data + depth * sizeof(Name),
               std::min<std::size_t>(run.to - place.offset, names.count - depth));
    const Span span{place.offset, place.offset + length};
    bool any = false;
    for (int level = 0; level < levels; ++level) any = step(run, span, depth, level) || any;
    if (!any) return found_;  // deeper levels hold all that shallower ones do
    depth += length;
  }
  if (depth > 0)
    for (int level = 0; level < levels; ++level)
      each_bit(active_[level], [&](Worker worker) {
        found_.depth[level][worker] = static_cast<std::uint32_t>(depth);
      });
  return found_;
}

void Tree::begin_walk(const Run& run, std::size_t offset, int levels) {
  std::vector<Word>& matched = found_.matched;
  for (int level = 0; level < levels; ++level) {
    if (const Plane* plane = run.peek(level)) {
      unite(matched, plane->full);
      for (const Part& part : plane->parts)
        if (part.from <= offset && offset < part.to) set(matched, part.worker);
    }
    active_[level] = matched;
  }
  for (int level = 0; level < levels; ++level) found_.depth[level].assign(matched.size() * 64, 0);
  gone_.resize(matched.size());
}

// Of those that hold everything up to here, who holds `span` too, and where the others end.
bool Tree::step(const Run& run, Span span, std::size_t depth, int level) {
  std::vector<Word>& active = active_[level];
  std::size_t words = 0;
  const Word* full = level == 0 ? run.device.full.bits(words) : nullptr;
  if (full == nullptr) {
    std::fill(gone_.begin(), gone_.end(), 0);
    for (int tier = 0; tier <= level; ++tier)
      if (const Plane* plane = run.peek(tier)) unite(gone_, plane->full);
    full = gone_.data();
    words = gone_.size();
  }
  Word some_gone = 0;
  Word some_left = 0;
  for (std::size_t i = 0; i < active.size(); ++i) {
    const Word whole = i < words ? full[i] : 0;
    gone_[i] = active[i] & ~whole;
    active[i] &= whole;
    some_gone |= gone_[i];
    some_left |= active[i];
  }
  if (some_gone == 0) return some_left != 0;
  follow_parts(run, span, depth, level);
  each_bit(gone_, [&](Worker worker) {
    found_.depth[level][worker] = static_cast<std::uint32_t>(depth);
  });
  return std::any_of(active.begin(), active.end(), [](Word word) { return word != 0; });
}

// Takes those out of `gone_` that hold some of `span` at least.
void Tree::follow_parts(const Run& run, Span span, std::size_t depth, int level) {
  const auto follow = [&](Worker worker, std::size_t end) {
    if (end == span.from) return;
    unset(gone_, worker);
    if (end >= span.to)
      set(active_[level], worker);
    else
      found_.depth[level][worker] = static_cast<std::uint32_t>(depth + end - span.from);
  };
  if (level > 0) {
    each_bit(gone_, [&](Worker worker) { follow(worker, reach(run, worker, span.from, level)); });
    return;
  }
  for (const Part& part : run.device.parts)
    if (part.from <= span.from && span.from < part.to && test(gone_, part.worker))
      follow(part.worker, part.to);
}

// How far the worker's parts on tiers up to `level` go together, without a gap.
std::size_t Tree::reach(const Run& run, Worker worker, std::size_t from, int level) const {
  for (bool further = true; further;) {
    further = false;
    for (int tier = 0; tier <= level; ++tier) {
      const Plane* plane = run.peek(tier);
      const Part* part = plane == nullptr ? nullptr : plane->parts.find(worker);
      if (part == nullptr || part->from > from || part->to <= from) continue;
      from = part->to;
      further = true;
    }
  }
  return from;
}

}  // namespace pdserve::radix
