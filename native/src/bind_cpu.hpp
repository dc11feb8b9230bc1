#pragma once

#include <nanobind/nanobind.h>

// Adds CpuModel and what belongs to it to the extension.
void bind_cpu(nanobind::module_& m);
