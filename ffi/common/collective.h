// The collectives.
#pragma once

#include <cstdint>

namespace jaxcomm {

enum class Collective : uint8_t {
#define JAXCOMM_COLLECTIVE(enumerator, name, handler) enumerator,
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
};

// The name in collectives.def.
constexpr const char* Name(Collective collective) {
  switch (collective) {
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) \
  case Collective::enumerator:                    \
    return #name;
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  }
  return "?";
}

// Plans of these collectives are over lists of rows, which are known at run time only.
constexpr bool OfLists(Collective collective) {
  return collective == Collective::kAllToAllV || collective == Collective::kDispatch ||
         collective == Collective::kCombine;
}

constexpr bool Reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}

}  // namespace jaxcomm
