// A call of a collective, as its attributes describe it. The same for all back ends.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/collective.h"
#include "common/dtype.h"

namespace jaxcomm {

struct CallSpec {
  Collective collective = Collective::kBarrier;
  std::string op;         // public name, for messages
  std::string site;       // where the user called it, for messages
  std::string algorithm;  // empty: choose
  int64_t group_size = 1;
  int64_t ranks_per_node = 1;      // as declared; CUDA finds its own nodes
  int64_t max_sms = 0;             // of a GPU, each for a channel; 0: as many as there are
  std::vector<int64_t> groups;     // logical device ids, group after group
  std::vector<int32_t> processes;  // of these devices; empty: all are of this process
  int64_t input_run = 0;           // length of a run of a blocked input, in elements (cpu/copy.h); 0: block after block
  int64_t output_run = 0;
  ReduceOp reduce_op = ReduceOp::kSum;
  int32_t root = 0;                // broadcast: position in the group
  std::vector<int32_t> source_of;  // permute: position in the group, by position; -1: none

  // Start of every message about the call.
  std::string Where() const { return "jaxcomm: " + op + " at " + site; }
};

// The attributes of a custom call, in one list for all that decodes or hashes them. `visit(name, field)` takes the
// fields of a CallSpec whose collective is set.
//
// The dictionary `call`.
template <typename Spec, typename Visit>
void VisitCallAttributes(Spec& spec, const Visit& visit) {
  visit("op", spec.op);
  visit("site", spec.site);
  visit("algorithm", spec.algorithm);
  visit("group_size", spec.group_size);
  visit("ranks_per_node", spec.ranks_per_node);
  visit("max_sms", spec.max_sms);
}

// Beside it: arrays, which JAX takes at the top level only, and attributes of one collective or another.
template <typename Spec, typename Visit>
void VisitOtherAttributes(Spec& spec, const Visit& visit) {
  visit("groups", spec.groups);
  visit("processes", spec.processes);
  switch (spec.collective) {
    case Collective::kAllToAll:
      visit("input_run", spec.input_run);
      visit("output_run", spec.output_run);
      break;
    case Collective::kAllGather:
      visit("output_run", spec.output_run);
      break;
    case Collective::kReduceScatter:
      visit("input_run", spec.input_run);
      visit("reduce_op", spec.reduce_op);
      break;
    case Collective::kAllReduce:
      visit("reduce_op", spec.reduce_op);
      break;
    case Collective::kBroadcast:
      visit("root", spec.root);
      break;
    case Collective::kPermute:
      visit("source_of", spec.source_of);
      break;
    case Collective::kBarrier:
      break;
  }
}

// The same in all processes for the same call, and different for calls with different attributes.
uint64_t HashAttributes(const CallSpec& spec);

}  // namespace jaxcomm
