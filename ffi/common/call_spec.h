// The description of a call, decoded from its attributes. The same for all back ends.
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
  std::string site;       // the user's file and line, for messages
  std::string algorithm;  // empty: select one
  int64_t group_size = 1;
  int64_t ranks_per_node = 1;      // as declared; CUDA determines its own nodes
  int64_t max_sms = 0;             // limit on channels, one per SM of a GPU; 0: no limit
  int64_t asynchronous = 0;        // not 0: XLA's threads do no work of the call (CPU)
  int64_t number = 0;              // of a started call among equal ones of a program (CUDA)
  std::vector<int64_t> groups;     // logical device ids, group after group
  std::vector<int32_t> processes;  // of these devices; empty: all belong to this process
  std::vector<int32_t> devices;    // their ids in JAX, if there are several processes of CPUs; empty: unknown
  // Elements of a block that are contiguous in memory (BlockLayout in cpu/copy.h). 0: all.
  int64_t input_contiguous_count = 0;
  int64_t output_contiguous_count = 0;
  int64_t row_count = 0;    // all_to_all_v, dispatch, combine: elements of a row
  int64_t choices = 0;      // dispatch, combine: choices of a token
  int64_t num_experts = 0;  // dispatch, combine: of all ranks
  int64_t per_choice = 0;   // dispatch, combine: not 0: each choice has a row of its own
  int64_t home = 0;         // combine: not 0: rows are added in the order of the choices, whatever their nodes
  int64_t weighted = 0;     // combine: not 0: each choice has a weight
  ReduceOp reduce_op = ReduceOp::kSum;
  int32_t root = 0;                // broadcast: position in the group
  std::vector<int32_t> source_of;  // permute: position in the group, by position; -1: none
  std::vector<int64_t> sources;    // reshard: the box of each rank (DecodeBoxes in plan/boxes.h)
  std::vector<int64_t> destinations;
  std::vector<int64_t> input_shape;  // reshard: of the arrays that hold the boxes; empty: the arrays are the boxes
  std::vector<int64_t> output_shape;
  int64_t timeout_ms = 0;  // reshard: limit of the wait for other ranks; 0: JAXCOMM_TIMEOUT_S
  int64_t numbered = 0;    // reshard: not 0: an operand has the number of the call, in place of XLA's run id

  // Start of every message about the call.
  std::string Where() const { return "jaxcomm: " + op + " at " + site; }
};

// The attributes of a custom call, listed once for decoding and for hashing. Both functions call visit(name, field) for
// fields of a CallSpec whose collective is set.
//
// Attributes in the dictionary `call`.
template <typename Spec, typename Visit>
void VisitCallAttributes(Spec& spec, const Visit& visit) {
  visit("op", spec.op);
  visit("site", spec.site);
  visit("algorithm", spec.algorithm);
  visit("group_size", spec.group_size);
  visit("ranks_per_node", spec.ranks_per_node);
  visit("max_sms", spec.max_sms);
  visit("asynchronous", spec.asynchronous);
  visit("number", spec.number);
}

// Attributes at the top level: arrays, which JAX does not accept in a dictionary, and those that the traits of the
// collective list.
template <typename Spec, typename Visit>
void VisitOtherAttributes(Spec& spec, const Visit& visit) {
  visit("groups", spec.groups);
  visit("processes", spec.processes);
  visit("devices", spec.devices);
  const CollectiveTraits& traits = TraitsOf(spec.collective);
  const auto visit_if_taken = [&](const char* name, auto& field) {
    if (traits.Takes(name)) visit(name, field);
  };
  visit_if_taken("input_contiguous_count", spec.input_contiguous_count);
  visit_if_taken("output_contiguous_count", spec.output_contiguous_count);
  visit_if_taken("row_count", spec.row_count);
  visit_if_taken("choices", spec.choices);
  visit_if_taken("num_experts", spec.num_experts);
  visit_if_taken("per_choice", spec.per_choice);
  visit_if_taken("home", spec.home);
  visit_if_taken("weighted", spec.weighted);
  visit_if_taken("reduce_op", spec.reduce_op);
  visit_if_taken("root", spec.root);
  visit_if_taken("source_of", spec.source_of);
  visit_if_taken("sources", spec.sources);
  visit_if_taken("destinations", spec.destinations);
  visit_if_taken("input_shape", spec.input_shape);
  visit_if_taken("output_shape", spec.output_shape);
  visit_if_taken("timeout_ms", spec.timeout_ms);
  visit_if_taken("numbered", spec.numbered);
}

// A hash of all attributes, equal in all processes.
uint64_t HashAttributes(const CallSpec& spec);

}  // namespace jaxcomm
