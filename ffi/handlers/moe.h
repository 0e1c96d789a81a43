// Shared by the handlers of jaxcomm.moe that send nothing.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "handlers/call.h"
#include "plan/routing.h"

namespace jaxcomm {

// Attributes that are integers of 64 bits, by name.
inline ffi::Error DecodeNumbers(const ffi::Dictionary& attributes,
                                std::initializer_list<std::pair<const char*, int64_t*>> numbers) {
  for (const auto& [name, number] : numbers) {
    const auto value = attributes.get<int64_t>(name);
    if (!value) return ffi::Error::InvalidArgument(std::string("attribute ") + name + " is missing");
    *number = *value;
  }
  return ffi::Error::Success();
}

// The ranks of the group of a device, and its place among them; null if the device is in no group.
struct Member {
  const int64_t* ranks = nullptr;
  int32_t own = 0;
};

inline Member MemberOf(const CallSpec& spec, int32_t rank) {
  for (size_t i = 0; i < spec.groups.size(); ++i) {
    if (spec.groups[i] != rank) continue;
    const auto slot = static_cast<int64_t>(i);
    return {spec.groups.data() + slot / spec.group_size * spec.group_size,
            static_cast<int32_t>(slot % spec.group_size)};
  }
  return {};
}

inline ffi::Error NotAMember(const CallSpec& spec) {
  return ffi::Error::InvalidArgument(spec.Where() + ": this rank is not in any group");
}

constexpr size_t kRoutingFields = 7;

// The first results: the fields of a routing.
inline ffi::ErrorOr<RoutingFields> DecodeFields(const CallSpec& spec, ffi::RemainingRets results,
                                                const ExpertLayout& layout, int64_t num_choices) {
  RoutingFields fields;
  const int64_t total = layout.num_experts, local = total / layout.num_ranks;
  const std::pair<int32_t**, int64_t> sizes[kRoutingFields] = {{&fields.slot, num_choices},
                                                               {&fields.expert, num_choices},
                                                               {&fields.group_sizes, local},
                                                               {&fields.group_counts, local},
                                                               {&fields.demand, 1},
                                                               {&fields.dropped, 1},
                                                               {&fields.table, layout.num_ranks * total}};
  for (size_t i = 0; i < kRoutingFields; ++i) {
    auto field = results.get<ffi::Buffer<ffi::S32>>(i);
    if (!field) return ffi::Unexpected(field.error());
    if (static_cast<int64_t>((*field)->element_count()) != sizes[i].second) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(spec.Where() + ": a result has a wrong size"));
    }
    *sizes[i].first = (*field)->typed_data();
  }
  return fields;
}

}  // namespace jaxcomm
