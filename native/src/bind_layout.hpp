#pragma once

#include <nanobind/nanobind.h>

void bind_layout(nanobind::module_& m);
