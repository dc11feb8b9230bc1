// Work requests of RDMA as the C structures that libibverbs takes, filled from runs of bytes and
// posted a chain at a time. Twin: pdserve/transfer/rdma/work_requests.py, which says what it is for.
//
// Built without the headers of rdma-core: the structures below are its stable ABI (LP64, since
// IBVERBS_1.1), and the functions come in as addresses from the table of a device's context.
#include "bind_rdma.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace nb = nanobind;

namespace {

struct Sge {
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t key;
};

struct SendRequest {
  std::uint64_t id;
  SendRequest* next;
  Sge* list;
  int pieces;
  int opcode;
  unsigned flags;
  std::uint32_t word;  // in network order
  std::uint64_t remote_address;
  std::uint32_t remote_key;
  std::uint32_t other[19];
};
static_assert(sizeof(SendRequest) == 128 && offsetof(SendRequest, remote_key) == 48);

struct ReceiveRequest {
  std::uint64_t id;
  ReceiveRequest* next;
  Sge* list;
  int pieces;
};
static_assert(sizeof(ReceiveRequest) == 32);

struct Completion {
  std::uint64_t id;
  int status;
  int opcode;
  std::uint32_t vendor;
  std::uint32_t bytes;
  std::uint32_t word;  // in network order
  std::uint32_t pair;
  std::uint32_t source;
  unsigned flags;
  std::uint16_t key, lid;
  std::uint8_t level, path;
};
static_assert(sizeof(Completion) == 48);

using PostSend = int (*)(void*, SendRequest*, SendRequest**);
using PostReceive = int (*)(void*, ReceiveRequest*, ReceiveRequest**);
using Poll = int (*)(void*, int, Completion*);

constexpr int kWrite = 0, kWriteWithWord = 1;
constexpr unsigned kSignaled = 2;
constexpr int kPolled = 64;

// An array of int64 of Python's, held while it is read.
class Numbers {
 public:
  explicit Numbers(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    if (view_.len % 8) {
      PyBuffer_Release(&view_);
      throw nb::value_error("an array of int64 is needed");
    }
  }
  ~Numbers() { PyBuffer_Release(&view_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  std::int64_t size() const { return static_cast<std::int64_t>(view_.len) / 8; }
  const std::int64_t* data() const { return static_cast<const std::int64_t*>(view_.buf); }

 private:
  Py_buffer view_;
};

// A region as it was registered: address, bytes of a slice, the key of each slice.
class Slices {
 public:
  explicit Slices(const Numbers& numbers)
      : at_(numbers.data()), count_(numbers.size() - 2) {
    if (count_ < 1 || at_[1] <= 0) throw nb::value_error("an address, a slice and keys are needed");
  }
  // The key of the slice that `offset` is in; `left` becomes what of it follows, if that is less.
  std::uint32_t key(std::int64_t offset, std::int64_t& left) const {
    const std::int64_t place = count_ == 1 && offset < at_[1] ? 0 : offset / at_[1];
    if (offset < 0 || place >= count_) throw nb::value_error("a run leaves its region");
    left = std::min(left, (place + 1) * at_[1] - offset);
    return static_cast<std::uint32_t>(at_[2 + place]);
  }
  std::uint64_t address(std::int64_t offset) const {
    return static_cast<std::uint64_t>(at_[0]) + static_cast<std::uint64_t>(offset);
  }

 private:
  const std::int64_t* at_;
  std::int64_t count_;
};

class SendTable {
 public:
  explicit SendTable(int depth) {
    if (depth < 1) throw nb::value_error("a table has at least one entry");
    const auto count = static_cast<std::size_t>(depth);
    requests_.resize(count);
    pieces_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      requests_[i].next = i + 1 < count ? &requests_[i + 1] : nullptr;
      requests_[i].list = &pieces_[i];
    }
  }

  int depth() const { return static_cast<int>(requests_.size()); }

  nb::tuple fill(int at, int stop, nb::handle source, nb::handle destination, nb::handle length,
                 std::int64_t run, std::int64_t done, nb::handle ours, nb::handle theirs) {
    const Numbers from(source), to(destination), lengths(length), mine(ours), peers(theirs);
    const Slices here(mine), there(peers);
    const std::int64_t count = lengths.size();
    if (from.size() != count || to.size() != count || run < 0 || done < 0 || at < 0 ||
        stop > depth())
      throw nb::value_error("three arrays of one size, and entries of the table");
    const std::int64_t *s = from.data(), *d = to.data(), *n = lengths.data();
    for (; run < count && at < stop; ++at) {
      std::int64_t left = n[run] - done;
      if (left <= 0) throw nb::value_error("a run has at least one byte");
      SendRequest& request = requests_[static_cast<std::size_t>(at)];
      Sge& piece = pieces_[static_cast<std::size_t>(at)];
      piece.key = here.key(s[run] + done, left);
      piece.address = here.address(s[run] + done);
      request.remote_key = there.key(d[run] + done, left);
      request.remote_address = there.address(d[run] + done);
      if (left > UINT32_MAX >> 1) throw nb::value_error("a work request has at most 2 GiB");
      piece.length = static_cast<std::uint32_t>(left);
      request.pieces = 1;
      request.opcode = kWrite;
      done += left;
      if (done == n[run]) {
        ++run;
        done = 0;
      }
    }
    return nb::make_tuple(at, run, done);
  }

  void empty(int at, std::int64_t word, nb::handle theirs) {
    const Numbers peers(theirs);
    const Slices there(peers);
    SendRequest& request = entry(at);
    std::int64_t left = 1;
    request.remote_key = there.key(0, left);
    request.remote_address = there.address(0);
    request.pieces = 0;
    request.opcode = word < 0 ? kWrite : kWriteWithWord;
    request.word = htonl(static_cast<std::uint32_t>(word));
  }

  nb::tuple post(std::uint64_t function, std::uint64_t pair, int count, std::uint64_t first,
                 std::uint64_t every) {
    if (count < 1 || count > depth() || every == 0) throw nb::value_error("nothing to post");
    for (int i = 0; i < count; ++i) {
      SendRequest& request = requests_[static_cast<std::size_t>(i)];
      request.id = first + static_cast<std::uint64_t>(i);
      request.flags = request.id % every == 0 || i + 1 == count ? kSignaled : 0;
    }
    SendRequest& last = entry(count - 1);
    SendRequest *const next = last.next, *bad = nullptr;
    last.next = nullptr;
    const int error = reinterpret_cast<PostSend>(function)(reinterpret_cast<void*>(pair),
                                                           requests_.data(), &bad);
    last.next = next;
    const auto posted = error && bad ? static_cast<int>(bad - requests_.data()) : count;
    return nb::make_tuple(error, posted);
  }

  nb::tuple row(int at) {
    const SendRequest& r = entry(at);
    const Sge& piece = *r.list;
    return nb::make_tuple(r.id, r.opcode, r.flags, r.pieces, piece.address, piece.length, piece.key,
                          r.remote_address, r.remote_key, ntohl(r.word));
  }

 private:
  SendRequest& entry(int at) {
    if (at < 0 || at >= depth()) throw nb::value_error("no such entry");
    return requests_[static_cast<std::size_t>(at)];
  }

  std::vector<SendRequest> requests_;
  std::vector<Sge> pieces_;
};

int post_receives(std::uint64_t function, std::uint64_t pair, int count) {
  if (count < 1) throw nb::value_error("nothing to post");
  std::vector<ReceiveRequest> requests(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i + 1 < requests.size(); ++i) requests[i].next = &requests[i + 1];
  ReceiveRequest* bad = nullptr;
  return reinterpret_cast<PostReceive>(function)(reinterpret_cast<void*>(pair), requests.data(),
                                                 &bad);
}

nb::list poll_completions(std::uint64_t function, std::uint64_t queue) {
  Completion found[kPolled];
  const int count =
      reinterpret_cast<Poll>(function)(reinterpret_cast<void*>(queue), kPolled, found);
  if (count < 0) throw nb::value_error("the completion queue cannot be read");
  nb::list list;
  for (int i = 0; i < count; ++i) {
    const Completion& c = found[i];
    list.append(nb::make_tuple(c.id, c.status, c.opcode, ntohl(c.word), c.vendor));
  }
  return list;
}

}  // namespace

void bind_rdma(nb::module_& m) {
  nb::class_<SendTable>(m, "SendTable")
      .def(nb::init<int>(), nb::arg("depth"))
      .def_prop_ro("depth", &SendTable::depth)
      .def("fill", &SendTable::fill, nb::arg("at"), nb::arg("stop"), nb::arg("source"),
           nb::arg("destination"), nb::arg("length"), nb::arg("run"), nb::arg("done"),
           nb::arg("ours"), nb::arg("theirs"))
      .def("empty", &SendTable::empty, nb::arg("at"), nb::arg("word"), nb::arg("theirs"))
      .def("post", &SendTable::post, nb::arg("function"), nb::arg("pair"), nb::arg("count"),
           nb::arg("first"), nb::arg("every"))
      .def("row", &SendTable::row, nb::arg("at"));
  m.def("post_receives", &post_receives, nb::arg("function"), nb::arg("pair"), nb::arg("count"));
  m.def("poll_completions", &poll_completions, nb::arg("function"), nb::arg("queue"));
}
