#pragma once

#include <nanobind/nanobind.h>

void bind_hash(nanobind::module_& m);
