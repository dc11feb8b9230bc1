// What Python sees of native/, a file per part: each checks its arguments, releases the GIL and calls
// the plain C++ below it.
// The stub pdserve/_native.pyi must say the same; pdserve/accel.py is the only importer.
#include <nanobind/nanobind.h>

#include "bind_bpe.hpp"
#include "bind_copy.hpp"
#include "bind_cpu.hpp"
#include "bind_hash.hpp"
#include "bind_layout.hpp"
#include "bind_radix.hpp"
#include "bind_rdma.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  // An interpreter that ends by Ctrl-C leaves objects to the operating system: no news for users.
  nb::set_leak_warnings(false);
  m.doc() = "Compiled twins of pdserve's hot loops; see pdserve/accel.py.";
  bind_bpe(m);
  bind_copy(m);
  bind_cpu(m);
  bind_hash(m);
  bind_layout(m);
  bind_radix(m);
  bind_rdma(m);
}
