// Levels of a cluster and comparisons of times, for the tests of the simulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "../../ffi/sim/topology.h"
#include "../check.h"

namespace jaxcomm {

inline void CheckClose(const std::string& what, double got, double expected, double relative = 1e-6) {
  const bool close = std::abs(got - expected) <= relative * std::abs(expected);
  if (!close) std::fprintf(stderr, "%s: %.12g, expected %.12g\n", what.c_str(), got, expected);
  CHECK(close);
}

// A step has an overhead of 0.4 us.
inline Level MakeLevel(const char* name, LevelKind kind, int64_t ranks, double bytes_per_s, double latency_s,
                       double taper = 1) {
  Level level;
  level.name = name;
  level.kind = kind;
  level.ranks = ranks;
  level.bytes_per_s = bytes_per_s;
  level.latency_s = latency_s;
  level.overhead_s = 4e-7;
  level.taper = taper;
  return level;
}

}  // namespace jaxcomm
