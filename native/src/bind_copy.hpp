#pragma once

#include <nanobind/nanobind.h>

void bind_copy(nanobind::module_& m);
