#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

// A buffer of Python's, held while its bytes are used.
class Held {
 public:
  Held(nanobind::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }
  ~Held() { PyBuffer_Release(&view_); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  std::int64_t size() const { return static_cast<std::int64_t>(view_.len); }

 private:
  Py_buffer view_;
};

// An array of int64, held.
class Numbers {
 public:
  Numbers(nanobind::handle object, int flags = 0) : held_(object, PyBUF_C_CONTIGUOUS | flags) {
    if (held_.size() % 8) throw nanobind::value_error("an array of int64 is needed");
  }
  std::int64_t size() const { return held_.size() / 8; }
  std::int64_t* data() const { return held_.as<std::int64_t>(); }

 private:
  Held held_;
};
