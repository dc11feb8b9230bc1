// What Python sees of native/src/radix. Calls are short and keep the GIL, which also guards the tree.
#include "bind_radix.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pdserve/radix/tree.hpp"

namespace nb = nanobind;

namespace {

using pdserve::radix::Counters;
using pdserve::radix::Depths;
using pdserve::radix::kTiers;
using pdserve::radix::Name;
using pdserve::radix::Names;
using pdserve::radix::Tree;
using pdserve::radix::Worker;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "names are compared as they come");

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

// A borrowed, contiguous view of any object with the buffer protocol.
class Buffer {
 public:
  Buffer(nb::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  Names names() const {
    require(view_.len % 8 == 0, "names must be whole little-endian u64 values");
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len) / 8};
  }
  const Py_buffer& view() const { return view_; }

 private:
  Py_buffer view_;
};

Worker worker_of(long long worker) {
  require(worker >= 0 && worker < 65536, "worker must be a slot from 0 to 65535");
  return static_cast<Worker>(worker);
}

int tier_of(long long tier) {
  require(tier >= 0 && tier < kTiers, "tier must be 0 (device), 1 (host), 2 (disk) or 3 (remote)");
  return static_cast<int>(tier);
}

// Python's ints for small numbers that are asked for again and again.
class Ints {
 public:
  ~Ints() {
    for (PyObject* made : made_) Py_XDECREF(made);
  }
  PyObject* operator[](std::size_t value) {  // borrowed
    if (value >= made_.size()) made_.resize(value + 1, nullptr);
    if (made_[value] == nullptr) made_[value] = PyLong_FromSize_t(value);
    if (made_[value] == nullptr) throw nb::python_error();
    return made_[value];
  }

 private:
  std::vector<PyObject*> made_;
};

class RadixTree {
 public:
  explicit RadixTree(long long max_blocks) : tree_(checked(max_blocks)) {}

  std::size_t stored(long long worker, long long tier, nb::handle parent, nb::handle names) {
    const Worker slot = worker_of(worker);
    const int level = tier_of(tier);
    Name name = 0;
    if (!parent.is_none()) {
      name = PyLong_AsUnsignedLongLong(parent.ptr());
      if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw nb::python_error();
        PyErr_Clear();
        throw nb::value_error("parent must be a u64 or None");
      }
    }
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    return tree_.stored(slot, level, parent.is_none() ? nullptr : &name, buffer.names());
  }

  std::size_t removed(long long worker, long long tier, nb::handle names) {
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    return tree_.removed(worker_of(worker), tier_of(tier), buffer.names());
  }

  std::size_t cleared(long long worker, long long tier) {
    return tree_.cleared(worker_of(worker), tier_of(tier));
  }

  std::size_t drop(long long worker) { return tree_.drop(worker_of(worker)); }

  nb::object match(nb::handle names) {
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    const Depths& found = tree_.match(buffer.names(), 1);
    nb::object out = nb::steal(PyDict_New());
    if (!out.is_valid()) throw nb::python_error();
    found.each([&](std::size_t worker) {
      if (PyDict_SetItem(out.ptr(), ints_[worker], ints_[found.depth[0][worker]]) != 0)
        throw nb::python_error();
    });
    return out;
  }

  nb::object match_as(nb::handle names, const nb::dict& shown) {
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    const Depths& found = tree_.match(buffer.names(), 1);
    nb::object out = nb::steal(PyDict_New());
    if (!out.is_valid()) throw nb::python_error();
    found.each([&](std::size_t worker) {
      // Ours while it is used: a key that hashes itself could empty the dict.
      const nb::object key = nb::borrow(PyDict_GetItemWithError(shown.ptr(), ints_[worker]));
      if (!key.is_valid()) {
        if (PyErr_Occurred()) throw nb::python_error();
        return;
      }
      PyObject* depth = ints_[found.depth[0][worker]];
      PyObject* there = PyDict_SetDefault(out.ptr(), key.ptr(), depth);
      if (there == nullptr) throw nb::python_error();
      if (there != depth && PyLong_AsSize_t(there) < found.depth[0][worker] &&
          PyDict_SetItem(out.ptr(), key.ptr(), depth) != 0)
        throw nb::python_error();
    });
    return out;
  }

  std::size_t match_into(nb::handle names, nb::handle depths) {
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    const Buffer target(depths, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
    require(target.view().itemsize == 4, "depths must be a writable buffer of u32 values");
    const Depths& found = tree_.match(buffer.names(), 1);
    auto* out = static_cast<std::uint32_t*>(target.view().buf);
    const std::size_t size = static_cast<std::size_t>(target.view().len) / 4;
    std::size_t count = 0;
    found.each([&](std::size_t worker) {
      require(worker < size, "depths is shorter than the slots in use");
      ++count;
    });
    std::fill(out, out + size, 0u);
    found.each([&](std::size_t worker) { out[worker] = found.depth[0][worker]; });
    return count;
  }

  nb::object match_tiers(nb::handle names) {
    const Buffer buffer(names, PyBUF_C_CONTIGUOUS);
    const Depths& found = tree_.match(buffer.names(), 3);
    nb::object out = nb::steal(PyDict_New());
    if (!out.is_valid()) throw nb::python_error();
    nb::object three;  // many workers have the same one: a new tuple for each would cost most
    std::uint32_t last[3] = {};
    found.each([&](std::size_t worker) {
      const std::uint32_t now[3] = {found.depth[0][worker], found.depth[1][worker],
                                    found.depth[2][worker]};
      if (!three.is_valid() || !std::equal(now, now + 3, last)) {
        three = nb::steal(PyTuple_Pack(3, ints_[now[0]], ints_[now[1]], ints_[now[2]]));
        if (!three.is_valid()) throw nb::python_error();
        std::copy(now, now + 3, last);
      }
      if (PyDict_SetItem(out.ptr(), ints_[worker], three.ptr()) != 0) throw nb::python_error();
    });
    return out;
  }

  std::size_t blocks(long long worker) const { return tree_.blocks(worker_of(worker)); }
  std::size_t size() const { return tree_.size(); }

  nb::tuple numbers() const {
    const Counters c = tree_.counters();
    return nb::make_tuple(c.runs, c.worker_blocks, c.bytes, c.dropped_full, c.unknown_removed);
  }

 private:
  static std::size_t checked(long long max_blocks) {
    require(max_blocks > 0, "max_blocks must be positive");
    return static_cast<std::size_t>(max_blocks);
  }

  Tree tree_;
  Ints ints_;
};

}  // namespace

void bind_radix(nb::module_& m) {
  nb::class_<RadixTree>(m, "RadixTree")
      .def(nb::init<long long>(), nb::arg("max_blocks"))
      .def("stored", &RadixTree::stored, nb::arg("worker"), nb::arg("tier"),
           nb::arg("parent").none(), nb::arg("names"))
      .def("removed", &RadixTree::removed, nb::arg("worker"), nb::arg("tier"), nb::arg("names"))
      .def("cleared", &RadixTree::cleared, nb::arg("worker"), nb::arg("tier"))
      .def("drop", &RadixTree::drop, nb::arg("worker"))
      .def("match", &RadixTree::match, nb::arg("names"))
      .def("match_into", &RadixTree::match_into, nb::arg("names"), nb::arg("depths"))
      .def("match_as", &RadixTree::match_as, nb::arg("names"), nb::arg("shown"))
      .def("match_tiers", &RadixTree::match_tiers, nb::arg("names"))
      .def("blocks", &RadixTree::blocks, nb::arg("worker"))
      .def("numbers", &RadixTree::numbers)
      .def("__len__", &RadixTree::size);
}
