// What the custom calls of all back ends say: attributes and element types, from XLA's form to ours.
#pragma once

#include <optional>
#include <string_view>

#include "../common/dtype.h"
#include "../cpu/planner.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

// The attribute `call` that every collective has, a dictionary; two arrays come beside it, since JAX takes arrays at
// the top level only.
using Groups = ffi::Span<const int64_t>;     // logical device ids, group after group
using Processes = ffi::Span<const int32_t>;  // of these devices; empty: all are of one process

struct CallAttributes {
  std::string_view op;         // public name, for messages
  std::string_view site;       // file and line of the call, for messages
  std::string_view algorithm;  // empty: choose
  int64_t group_size;
  int64_t ranks_per_node;
  int64_t max_sms;  // of a GPU; 0: not said
};

CallSpec MakeSpec(Collective collective, const CallAttributes& call, Groups groups, Processes processes);

// Types of less than a byte arrive converted (jaxcomm/_lowering.py).
std::optional<DType> FromFfi(ffi::DataType type);

}  // namespace jaxcomm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxcomm::CallAttributes, ::xla::ffi::StructMember<std::string_view>("op"),
                                      ::xla::ffi::StructMember<std::string_view>("site"),
                                      ::xla::ffi::StructMember<std::string_view>("algorithm"),
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<int64_t>("ranks_per_node"),
                                      ::xla::ffi::StructMember<int64_t>("max_sms"));
