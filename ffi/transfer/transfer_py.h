#pragma once

#include <nanobind/nanobind.h>

namespace jaxcomm {

// Adds the endpoints to the Python module.
void BindTransfer(nanobind::module_ m);

}  // namespace jaxcomm
