#pragma once

#include <nanobind/nanobind.h>

void bind_rdma(nanobind::module_& m);
