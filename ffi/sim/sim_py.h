// Python bindings of the simulator.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxcomm {

void BindSim(nanobind::module_& m);

}  // namespace jaxcomm
