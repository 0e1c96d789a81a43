// Python bindings of the plan layer, for tests and `jaxcomm.explain`.
#pragma once

#include <nanobind/nanobind.h>

#include "common/status.h"

namespace jaxcomm {

// The value. Raises ValueError if there is none.
template <typename T>
T Checked(StatusOr<T> made) {
  if (!made.ok()) throw nanobind::value_error(made.status().message().c_str());
  return *std::move(made);
}

void BindPlan(nanobind::module_& m);

}  // namespace jaxcomm
