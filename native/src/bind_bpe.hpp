#pragma once

#include <nanobind/nanobind.h>

void bind_bpe(nanobind::module_& m);
