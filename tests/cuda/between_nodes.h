// Shared parts of the tests of calls between nodes without GIN.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "fakes/cluster.h"

namespace jaxcomm {
namespace cuda {

inline constexpr double kLong = 10'000;  // seconds, for operations that must succeed

inline CallSpec SpecOf(Collective collective, int32_t num_ranks, const std::string& algorithm) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.site = "here.py:1";
  spec.collective = collective;
  spec.algorithm = algorithm;
  spec.group_size = num_ranks;
  spec.root = num_ranks / 2;
  for (int32_t r = 0; collective == Collective::kPermute && r < num_ranks; ++r) {
    spec.source_of.push_back((r + 1) % num_ranks);
  }
  return spec;
}

inline StatusOr<std::unique_ptr<DeviceCall>> Sum(Communicator& communicator, int64_t count) {
  return DeviceCall::Make(SpecOf(Collective::kAllReduce, communicator.size(), "hierarchical"), communicator,
                          DType::kS32, count, count);
}

}  // namespace cuda
}  // namespace jaxcomm
