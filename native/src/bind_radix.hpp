#pragma once

#include <nanobind/nanobind.h>

// Adds RadixTree to the extension.
void bind_radix(nanobind::module_& m);
