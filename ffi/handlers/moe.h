// Shared by the handlers of jaxcomm.moe that send nothing.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "handlers/call.h"
#include "plan/routing.h"

namespace jaxcomm {

// Decodes attributes that are 64-bit integers.
inline ffi::Error DecodeNumbers(const ffi::Dictionary& attributes,
                                std::initializer_list<std::pair<const char*, int64_t*>> numbers) {
  for (const auto& [name, number] : numbers) {
    const auto value = attributes.get<int64_t>(name);
    if (!value) return ffi::Error::InvalidArgument(std::string("attribute ") + name + " is missing");
    *number = *value;
  }
  return ffi::Error::Success();
}

// A device in the group of a call.
struct Member {
  CallSpec spec;
  int64_t group = 0;
  int32_t own = 0;  // its position in the group

  const int64_t* ranks() const { return spec.groups.data() + group * spec.group_size; }  // of the group
};

// The attributes of a call without Instantiate, as seen by the device `rank`. Fails if the device is in no group.
inline ffi::ErrorOr<Member> DecodeMember(const ffi::Dictionary& attributes, ffi::Buffer<ffi::S32> rank,
                                         std::initializer_list<std::pair<const char*, int64_t*>> numbers = {}) {
  ffi::ErrorOr<CallSpec> spec = DecodeCall(Collective::kBarrier, attributes);
  if (!spec) return ffi::Unexpected(spec.error());
  ffi::Error decoded = DecodeNumbers(attributes, numbers);
  if (decoded.failure()) return ffi::Unexpected(std::move(decoded));
  const std::vector<int64_t>& groups = spec->groups;
  const auto slot = std::find(groups.begin(), groups.end(), rank.typed_data()[0]) - groups.begin();
  if (slot == static_cast<int64_t>(groups.size())) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(spec->Where() + ": this rank is not in any group"));
  }
  const int64_t size = spec->group_size;
  return Member{*std::move(spec), slot / size, static_cast<int32_t>(slot % size)};
}

// Fails the run on all ranks, also in other processes.
inline ffi::Error FailRun(ffi::RunId run, const CallSpec& spec, const std::string& text) {
  const std::string message = spec.Where() + ": " + text;
  RunFailures::Get().Fail(run.run_id, InvalidArgumentError(message));
  return ffi::Error::InvalidArgument(message);
}

// The first arguments of these handlers. The buffer holds the logical id of this device.
inline auto BindAttributes() { return ffi::Ffi::Bind().Attrs().Arg<ffi::Buffer<ffi::S32>>(); }

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
