// What Python sees of native/. Checks arguments, releases the GIL, calls the plain C++ below it.
// The stub pdserve/_native.pyi must say the same; pdserve/accel.py is the only importer.
#include <nanobind/nanobind.h>

#include <string>

#include "bind_cpu.hpp"
#include "bind_radix.hpp"
#include "pdserve/hash.hpp"

namespace nb = nanobind;

namespace {

// A borrowed, contiguous, read-only view of any object with the buffer protocol.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

nb::bytes block_hashes(nb::handle tokens, std::size_t block_size, const nb::bytes& secret,
                       const nb::bytes& parent) {
  require(block_size > 0, "block_size must be positive");
  require(secret.size() > 0 && secret.size() <= pdserve::kMaxSecretBytes,
          "secret must hold 1 to 64 bytes");
  require(parent.size() == pdserve::kHashBytes, "parent must hold 16 bytes");
  const Buffer buffer(tokens);
  require(buffer.size() % 4 == 0, "tokens must be whole little-endian u32 values");

  const std::size_t block_bytes = block_size * 4;
  const std::size_t count = buffer.size() / block_bytes;
  nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, count * pdserve::kHashBytes));
  if (!out.is_valid()) throw nb::python_error();
  // Nobody else holds `out` yet, so filling it in place without the GIL is safe.
  auto* digests = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  const auto* key = reinterpret_cast<const std::uint8_t*>(secret.c_str());
  const auto* first = reinterpret_cast<const std::uint8_t*>(parent.c_str());
  {
    nb::gil_scoped_release unlocked;
    const pdserve::KeyedState keyed(key, secret.size());
    pdserve::block_hashes(buffer.data(), block_bytes, count, keyed, first, digests);
  }
  return nb::borrow<nb::bytes>(out);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Compiled twins of pdserve's hot loops; see pdserve/accel.py.";
  m.def("block_hashes", &block_hashes, nb::arg("tokens"), nb::arg("block_size"), nb::arg("secret"),
        nb::arg("parent"),
        "Digests of the full blocks in `tokens` (little-endian u32), 16 bytes each, concatenated.");
  bind_cpu(m);
  bind_radix(m);
}
