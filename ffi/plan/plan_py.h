// Python bindings of the plan layer, for tests and `jaxcomm.explain`.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "common/collective.h"
#include "common/status.h"

namespace jaxcomm {

// The value. Raises ValueError if there is none.
template <typename T>
T Checked(StatusOr<T> made) {
  if (!made.ok()) throw nanobind::value_error(made.status().message().c_str());
  return *std::move(made);
}

// The value of a name. Raises ValueError if there is none.
template <typename Enum, size_t size>
Enum EnumOf(const char* const (&names)[size], const char* what, const std::string& name) {
  std::string expected;
  for (size_t i = 0; i < size; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
    expected += (i > 0 ? ", " : "") + std::string(names[i]);
  }
  throw nanobind::value_error((std::string(what) + ": got \"" + name + "\", expected one of " + expected).c_str());
}
constexpr const char* kScopeNames[] = {"process", "node", "network"};             // of Scope
constexpr const char* kProtocols[] = {"steps", "ll", "ll_two_shot", "multimem"};  // of Protocol
Collective CollectiveOf(const std::string& name);

void BindPlan(nanobind::module_& m);
void BindResolve(nanobind::module_& m);

}  // namespace jaxcomm
