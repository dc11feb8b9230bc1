// What Python sees of hash.cpp. Tokens come as a list or tuple of ints, or as any buffer
// of little-endian u32: a list is read here, once, without an array of Python's in between. The GIL
// is released while anything is hashed.
#include "bind_hash.hpp"

#include <cstring>
#include <vector>

#include "pdserve/hash.hpp"

namespace nb = nanobind;

namespace {

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

// Sets Python's own error for what is no u32.
std::uint32_t slow_token(PyObject* item) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(item);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw nb::python_error();
  if (value > 0xFFFFFFFFULL) {
    PyErr_SetString(PyExc_OverflowError, "a token id must be below 2**32");
    throw nb::python_error();
  }
  return static_cast<std::uint32_t>(value);
}

// Token ids are small, and small ints hold their value in their first digit.
inline std::uint32_t token(PyObject* item) {
#if PY_VERSION_HEX < 0x030C0000
  if (PyLong_CheckExact(item) && Py_SIZE(item) == 1)
    return static_cast<std::uint32_t>(reinterpret_cast<PyLongObject*>(item)->ob_digit[0]);
#else
  if (PyLong_CheckExact(item) && PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(item))) {
    const Py_ssize_t value = PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(item));
    if (value >= 0) return static_cast<std::uint32_t>(value);
  }
#endif
  return slow_token(item);
}

inline std::uint32_t little(std::uint32_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return __builtin_bswap32(x);
#else
  return x;
#endif
}

// The bytes of token ids, wherever they came from; borrowed where that is possible.
class Tokens {
 public:
  explicit Tokens(nb::handle object) {
    PyObject* const given = object.ptr();
    if (PyList_CheckExact(given) || PyTuple_CheckExact(given)) {
      read(given);
      return;
    }
    if (PyObject_GetBuffer(given, &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    held_ = true;
    if (view_.len % 4 != 0) {
      release();
      throw nb::value_error("tokens must be whole little-endian u32 values");
    }
  }
  ~Tokens() { release(); }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  const std::uint8_t* data() const {
    return held_ ? static_cast<const std::uint8_t*>(view_.buf)
                 : reinterpret_cast<const std::uint8_t*>(own_.data());
  }
  std::size_t size() const {
    return held_ ? static_cast<std::size_t>(view_.len) : own_.size() * sizeof(std::uint32_t);
  }

 private:
  // No call in here runs Python code, save the one that fails: the list cannot change meanwhile.
  void read(PyObject* given) {
    const std::size_t count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(given));
    own_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(given)) != count)
        throw nb::value_error("the tokens changed while they were read");
      own_[i] = little(token(PySequence_Fast_ITEMS(given)[i]));
    }
  }

  void release() {
    if (held_) PyBuffer_Release(&view_);
    held_ = false;
  }

  Py_buffer view_;
  bool held_ = false;
  std::vector<std::uint32_t> own_;
};

// A fresh bytes object, to be filled before other code sees it.
class Output {
 public:
  explicit Output(std::size_t size)
      : object_(nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)))) {
    if (!object_.is_valid()) throw nb::python_error();
  }
  std::uint8_t* data() const {
    return reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(object_.ptr()));
  }
  nb::bytes bytes() const { return nb::borrow<nb::bytes>(object_); }

 private:
  nb::object object_;
};

nb::bytes block_hashes(nb::handle tokens, std::size_t block_size, const nb::bytes& secret,
                       const nb::bytes& parent) {
  require(block_size > 0, "block_size must be positive");
  require(secret.size() > 0 && secret.size() <= pdserve::kMaxSecretBytes,
          "secret must hold 1 to 64 bytes");
  require(parent.size() == pdserve::kHashBytes, "parent must hold 16 bytes");
  const Tokens given(tokens);
  const std::size_t block_bytes = block_size * 4, count = given.size() / block_bytes;
  const Output out(count * pdserve::kHashBytes);
  const auto* key = reinterpret_cast<const std::uint8_t*>(secret.c_str());
  const auto* first = reinterpret_cast<const std::uint8_t*>(parent.c_str());
  {
    nb::gil_scoped_release unlocked;
    const pdserve::KeyedState keyed(key, secret.size());
    pdserve::block_hashes(given.data(), block_bytes, count, keyed, first, out.data());
  }
  return out.bytes();
}

// Reads ids in the machine's byte order, as Python's arrays have them. Compilers vectorise the loop.
std::uint32_t largest_id(nb::handle tokens) {
  const Tokens given(tokens);
  std::uint32_t most = 0;
  for (std::size_t at = 0; at < given.size(); at += sizeof(most)) {
    std::uint32_t id;
    std::memcpy(&id, given.data() + at, sizeof(id));
    most = id > most ? id : most;
  }
  return most;
}

nb::bytes short_names(nb::handle hashes) {
  Py_buffer view;
  if (PyObject_GetBuffer(hashes.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  const std::size_t size = static_cast<std::size_t>(view.len);
  if (size % pdserve::kHashBytes != 0) {
    PyBuffer_Release(&view);
    throw nb::value_error("hashes must be whole, 16 bytes each");
  }
  nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size / 2)));
  if (out.is_valid()) {
    char* const names = PyBytes_AS_STRING(out.ptr());
    const char* const full = static_cast<const char*>(view.buf);
    for (std::size_t i = 0; i < size / 16; ++i) std::memcpy(names + 8 * i, full + 16 * i, 8);
  }
  PyBuffer_Release(&view);
  if (!out.is_valid()) throw nb::python_error();
  return nb::borrow<nb::bytes>(out);
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("block_hashes", &block_hashes, nb::arg("tokens"), nb::arg("block_size"), nb::arg("secret"),
        nb::arg("parent"), "Digests of the full blocks in `tokens`, 16 bytes each, concatenated.");
  m.def("largest_id", &largest_id, nb::arg("tokens"), "The largest token id; 0 if there are none.");
  m.def("short_names", &short_names, nb::arg("hashes"), "The first half of each 16-byte hash.");
}
