// JAXCOMM_ASSIGN_OR_RETURN, beside the macro of common/status.h.
#pragma once

#include "common/status.h"

// Leaves the calling function with the status of a StatusOr, unless that is success. Its value then initializes
// `declaration`.
#define JAXCOMM_ASSIGN_OR_RETURN(declaration, ...) JAXCOMM_ASSIGN_OR_RETURN_AT(__LINE__, declaration, (__VA_ARGS__))
#define JAXCOMM_ASSIGN_OR_RETURN_AT(line, ...) JAXCOMM_ASSIGN_OR_RETURN_BY(line, __VA_ARGS__)  // expands __LINE__
#define JAXCOMM_ASSIGN_OR_RETURN_BY(line, declaration, expression)              \
  auto jaxcomm_status_or_##line = expression;                                   \
  if (!jaxcomm_status_or_##line.ok()) return jaxcomm_status_or_##line.status(); \
  declaration = *std::move(jaxcomm_status_or_##line)
