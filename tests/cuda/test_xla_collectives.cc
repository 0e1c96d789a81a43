// Tests of ffi/cuda/xla/xla_collectives.* against the header of a jaxlib that has the extension, and on fakes of
// runtimes with and without it.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/cuda/xla/xla_collectives.h"
#include "../check.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace jaxcomm {
namespace {

// Each of jaxcomm's fields has the offset and the size of XLA's field.
#define SAME_FIELD(theirs, their_field, ours, our_field)                                         \
  static_assert(offsetof(theirs, their_field) == offsetof(ours, our_field), #theirs #our_field); \
  static_assert(sizeof(theirs::their_field) == sizeof(ours::our_field), #theirs #our_field)

static_assert(XLA_FFI_Extension_Collectives == xla_abi::kCollectives, "id");
static_assert(XLA_FFI_Extension_Collectives_MajorVersion == xla_abi::kCollectivesMajor, "version");
static_assert(XLA_FFI_GROUP_FLATTENED_ID == xla_abi::kFlattenedIds, "group mode");
static_assert(offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension) == xla_abi::kFindExtensionOffset, "function");

SAME_FIELD(XLA_FFI_Extension, struct_size, xla_abi::Extension, struct_size);
SAME_FIELD(XLA_FFI_Extension, id.extension_type, xla_abi::Extension, type);
SAME_FIELD(XLA_FFI_Extension, id.major_version, xla_abi::Extension, major_version);
SAME_FIELD(XLA_FFI_Extension, id.minor_version, xla_abi::Extension, minor_version);
SAME_FIELD(XLA_FFI_Extension, next, xla_abi::Extension, next);

using Find = XLA_FFI_InvokeContext_FindExtension_Args;
SAME_FIELD(Find, struct_size, xla_abi::FindExtensionArgs, struct_size);
SAME_FIELD(Find, extension_start, xla_abi::FindExtensionArgs, extension_start);
SAME_FIELD(Find, ctx, xla_abi::FindExtensionArgs, context);
SAME_FIELD(Find, extension_type, xla_abi::FindExtensionArgs, type);
SAME_FIELD(Find, extension, xla_abi::FindExtensionArgs, extension);
static_assert(sizeof(xla_abi::FindExtensionArgs) == XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE, "size");

SAME_FIELD(XLA_FFI_ReplicaGroup, ids, xla_abi::ReplicaGroup, ids);
SAME_FIELD(XLA_FFI_ReplicaGroup, size, xla_abi::ReplicaGroup, size);
static_assert(sizeof(XLA_FFI_ReplicaGroup) == sizeof(xla_abi::ReplicaGroup), "size");

#define SAME_ARGS(theirs)                                                   \
  SAME_FIELD(theirs, struct_size, xla_abi::GroupArgs, struct_size);         \
  SAME_FIELD(theirs, extension_start, xla_abi::GroupArgs, extension_start); \
  SAME_FIELD(theirs, group_mode, xla_abi::GroupArgs, group_mode);           \
  SAME_FIELD(theirs, groups, xla_abi::GroupArgs, groups);                   \
  SAME_FIELD(theirs, num_groups, xla_abi::GroupArgs, num_groups);           \
  SAME_FIELD(theirs, communication_id, xla_abi::GroupArgs, communication_id)
static_assert(offsetof(xla_abi::GetArgs, groups) == 0 && offsetof(xla_abi::RequestWindowArgs, groups) == 0 &&
                  offsetof(xla_abi::GetWindowArgs, groups) == 0,
              "first arguments");
SAME_ARGS(XLA_FFI_Communicator_Request_Args);
SAME_ARGS(XLA_FFI_Communicator_Get_Args);
SAME_FIELD(XLA_FFI_Communicator_Get_Args, communicator, xla_abi::GetArgs, communicator);
// XLA refuses argument structs that are smaller than its own.
static_assert(sizeof(xla_abi::GroupArgs) >= XLA_FFI_Communicator_Request_Args_STRUCT_SIZE, "size");
static_assert(sizeof(xla_abi::GetArgs) >= XLA_FFI_Communicator_Get_Args_STRUCT_SIZE, "size");

SAME_FIELD(XLA_FFI_Collectives_Extension, extension_base, xla_abi::Collectives, base);
SAME_FIELD(XLA_FFI_Collectives_Extension, state, xla_abi::Collectives, state);
SAME_FIELD(XLA_FFI_Collectives_Extension, request_communicator, xla_abi::Collectives, request_communicator);
SAME_FIELD(XLA_FFI_Collectives_Extension, get_communicator, xla_abi::Collectives, get_communicator);

SAME_FIELD(XLA_FFI_CollectiveMemoryRegion, buffer, xla_abi::Region, buffer);
SAME_FIELD(XLA_FFI_CollectiveMemoryRegion, byte_size, xla_abi::Region, bytes);
SAME_FIELD(XLA_FFI_CollectiveMemoryRegion, flags, xla_abi::Region, flags);
static_assert(sizeof(XLA_FFI_CollectiveMemoryRegion) == sizeof(xla_abi::Region), "size");
SAME_ARGS(XLA_FFI_Window_Request_Args);
SAME_FIELD(XLA_FFI_Window_Request_Args, regions, xla_abi::RequestWindowArgs, regions);
SAME_FIELD(XLA_FFI_Window_Request_Args, num_regions, xla_abi::RequestWindowArgs, num_regions);
SAME_ARGS(XLA_FFI_Window_Get_Args);
SAME_FIELD(XLA_FFI_Window_Get_Args, buffer, xla_abi::GetWindowArgs, buffer);
SAME_FIELD(XLA_FFI_Window_Get_Args, window, xla_abi::GetWindowArgs, window);
SAME_FIELD(XLA_FFI_Window_Get_Args, window_offset, xla_abi::GetWindowArgs, offset);
static_assert(sizeof(xla_abi::RequestWindowArgs) >= XLA_FFI_Window_Request_Args_STRUCT_SIZE, "size");
static_assert(sizeof(xla_abi::GetWindowArgs) >= XLA_FFI_Window_Get_Args_STRUCT_SIZE, "size");
SAME_FIELD(XLA_FFI_Collectives_Extension, request_window, xla_abi::CollectivesWithWindows, request_window);
SAME_FIELD(XLA_FFI_Collectives_Extension, get_window, xla_abi::CollectivesWithWindows, get_window);

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A runtime with the types of the real header.
struct Runtime {
  XLA_FFI_Api api = {};
  XLA_FFI_Collectives_Extension extension = {};
  bool provides = true;
  std::string refusal;  // of requests
  std::vector<std::vector<int64_t>> groups;
  std::vector<XLA_FFI_CollectiveMemoryRegion> regions;
  bool has_windows = true;
  int num_errors = 0;  // errors that have not been deleted
};
Runtime* runtime = nullptr;

const std::vector<int64_t> kIds = {0, 2, 3, 1};
const std::vector<std::vector<int64_t>> kGroups = {{0, 2}, {3, 1}};

XLA_FFI_Error* NewError() {
  ++runtime->num_errors;
  return reinterpret_cast<XLA_FFI_Error*>(runtime);
}

std::vector<std::vector<int64_t>> Copied(const XLA_FFI_ReplicaGroup* groups, size_t num_groups) {
  std::vector<std::vector<int64_t>> copied;
  for (size_t i = 0; i < num_groups; ++i) copied.emplace_back(groups[i].ids, groups[i].ids + groups[i].size);
  return copied;
}

Runtime MakeRuntime() {
  Runtime made;
  made.api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  made.api.api_version.minor_version = 4;
  made.api.XLA_FFI_Error_GetDetails = [](XLA_FFI_Error_GetDetails_Args* args) {
    args->message = runtime->refusal.c_str();
  };
  made.api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args*) { --runtime->num_errors; };
  made.api.XLA_FFI_InvokeContext_FindExtension = [](XLA_FFI_InvokeContext_FindExtension_Args* args) {
    CHECK(args->extension_type == XLA_FFI_Extension_Collectives);
    args->extension = runtime->provides ? &runtime->extension.extension_base : nullptr;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  // As in jaxlib 0.11.2, without the additions of 0.12.
  made.extension.extension_base.struct_size = offsetof(XLA_FFI_Collectives_Extension, request_window);
  made.extension.extension_base.id = {XLA_FFI_Extension_Collectives, 0, 1};
  made.extension.request_communicator = [](const XLA_FFI_Collectives_Extension* self,
                                           XLA_FFI_Communicator_Request_Args* args) -> XLA_FFI_Error* {
    CHECK(self == &runtime->extension && args->group_mode == XLA_FFI_GROUP_FLATTENED_ID);
    runtime->groups = Copied(args->groups, args->num_groups);
    return runtime->refusal.empty() ? nullptr : NewError();
  };
  made.extension.get_communicator = [](const XLA_FFI_Collectives_Extension*,
                                       XLA_FFI_Communicator_Get_Args* args) -> XLA_FFI_Error* {
    CHECK(Copied(args->groups, args->num_groups) == runtime->groups);
    args->communicator = reinterpret_cast<XLA_FFI_Communicator*>(runtime);
    return runtime->refusal.empty() ? nullptr : NewError();
  };
  return made;
}

Runtime MakeRuntimeWithWindows() {
  Runtime made = MakeRuntime();
  made.extension.extension_base.struct_size = XLA_FFI_Collectives_Extension_STRUCT_SIZE;
  made.extension.extension_base.id.minor_version = 2;
  made.extension.request_window = [](const XLA_FFI_Collectives_Extension* self,
                                     XLA_FFI_Window_Request_Args* args) -> XLA_FFI_Error* {
    CHECK(self == &runtime->extension && args->group_mode == XLA_FFI_GROUP_FLATTENED_ID);
    CHECK(args->struct_size >= XLA_FFI_Window_Request_Args_STRUCT_SIZE);
    CHECK(Copied(args->groups, args->num_groups) == kGroups);
    runtime->regions.assign(args->regions, args->regions + args->num_regions);
    return runtime->refusal.empty() ? nullptr : NewError();
  };
  made.extension.get_window = [](const XLA_FFI_Collectives_Extension*,
                                 XLA_FFI_Window_Get_Args* args) -> XLA_FFI_Error* {
    CHECK(Copied(args->groups, args->num_groups) == kGroups);
    CHECK(args->struct_size >= XLA_FFI_Window_Get_Args_STRUCT_SIZE);
    if (!runtime->refusal.empty()) return NewError();
    CHECK(runtime->regions.size() == 1 && args->buffer == runtime->regions[0].buffer);
    args->window = runtime->has_windows ? reinterpret_cast<XLA_FFI_Window*>(runtime) : nullptr;
    args->window_offset = 4096;
    return nullptr;
  };
  return made;
}

std::string Asked(Runtime& of) {
  runtime = &of;
  const XlaCollectives collectives(&of.api, nullptr);
  const DeviceGroups groups(kIds, 2);
  const Status requested = collectives.Request(groups);
  const StatusOr<void*> communicator = collectives.Get(groups);
  CHECK(of.num_errors == 0);
  CHECK(requested.ok() == communicator.ok());
  CHECK(!communicator.ok() || *communicator == &of);
  return requested.message();
}

TEST_CASE("communicators are provided") {
  Runtime runtime_of_0_11_2 = MakeRuntime();
  CHECK(Asked(runtime_of_0_11_2).empty());
  CHECK(runtime_of_0_11_2.groups == kGroups);  // ranks are in the order of the group
  Runtime refuses = MakeRuntime();
  refuses.refusal = "no device assignment";
  CHECK(Asked(refuses) == "XLA has no communicator for the group: no device assignment");
}

// Sends a request, then queries the window.
std::pair<std::string, std::string> AskedForWindow(Runtime& of) {
  runtime = &of;
  const XlaCollectives collectives(&of.api, nullptr);
  const DeviceGroups groups(kIds, 2);
  const char buffer = 0;
  const std::string requested = collectives.RequestWindows(groups, {{&buffer, 1000}}).message();
  const StatusOr<XlaCollectives::Window> got = collectives.GetWindow(groups, &buffer);
  CHECK(of.num_errors == 0);
  CHECK(!requested.empty() || (of.regions.size() == 1 && of.regions[0].buffer == &buffer));
  CHECK(!requested.empty() || (of.regions[0].byte_size == 1000 && of.regions[0].flags == 0));
  CHECK(!got.ok() || (got->window == &of && got->offset == 4096));
  return {requested, got.status().message()};
}

TEST_CASE("windows on XLA's buffers") {
  Runtime runtime_of_0_12 = MakeRuntimeWithWindows();
  CHECK(Asked(runtime_of_0_12).empty());
  CHECK(AskedForWindow(runtime_of_0_12) == std::make_pair(std::string(), std::string()));
  Runtime null = MakeRuntimeWithWindows();
  null.has_windows = false;
  CHECK(AskedForWindow(null).first.empty() && AskedForWindow(null).second == "XLA's window is null");
  Runtime refuses = MakeRuntimeWithWindows();
  refuses.refusal = "no such buffer";
  CHECK(AskedForWindow(refuses).first == "XLA makes no windows on its buffers: no such buffer");
  CHECK(AskedForWindow(refuses).second == "XLA has no window on its buffer: no such buffer");
  Runtime runtime_of_0_11_2 = MakeRuntime();
  CHECK(Has(AskedForWindow(runtime_of_0_11_2).first, "from jaxlib 0.12 on"));
  CHECK(Has(AskedForWindow(runtime_of_0_11_2).second, "from jaxlib 0.12 on"));
  Runtime too_small = MakeRuntimeWithWindows();
  too_small.extension.extension_base.struct_size = offsetof(XLA_FFI_Collectives_Extension, get_window);
  CHECK(Has(AskedForWindow(too_small).first, "from jaxlib 0.12 on"));
  Runtime none = MakeRuntimeWithWindows();
  none.provides = false;
  CHECK(Has(AskedForWindow(none).first, "provides no communicators"));
}

TEST_CASE("other runtimes are refused") {
  Runtime without_search = MakeRuntime();
  without_search.api.struct_size = xla_abi::kFindExtensionOffset;
  without_search.api.api_version.minor_version = 3;
  CHECK(Has(Asked(without_search), "FFI 0.3 has no extensions"));
  Runtime without_extension = MakeRuntime();
  without_extension.provides = false;
  CHECK(Has(Asked(without_extension), "CUDA plugin 0.11.2 or later"));
  Runtime next_major = MakeRuntime();
  next_major.extension.extension_base.id.major_version = 1;
  CHECK(Has(Asked(next_major), "version 1.1"));
  Runtime too_small = MakeRuntime();
  too_small.extension.extension_base.struct_size = offsetof(XLA_FFI_Collectives_Extension, get_communicator);
  CHECK(Has(Asked(too_small), "does not know"));
}

}  // namespace
}  // namespace jaxcomm
