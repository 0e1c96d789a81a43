// Python bindings of the plan layer, for tests and `jaxcomm.explain`.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxcomm {

void BindPlan(nanobind::module_& m);

}  // namespace jaxcomm
