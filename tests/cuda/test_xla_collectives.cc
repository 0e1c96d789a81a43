// The layout in ffi/cuda/xla/xla_collectives_abi.h against the header of a jaxlib that has the extension.
#include "../../ffi/cuda/xla/xla_collectives_abi.h"
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

SAME_FIELD(XLA_FFI_Extension, id.extension_type, xla_abi::Extension, type);
SAME_FIELD(XLA_FFI_Extension, id.major_version, xla_abi::Extension, major_version);
SAME_FIELD(XLA_FFI_Extension, id.minor_version, xla_abi::Extension, minor_version);
SAME_FIELD(XLA_FFI_Extension, next, xla_abi::Extension, next);

using Find = XLA_FFI_InvokeContext_FindExtension_Args;
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

// At run time, xla_fake.h takes the place of XLA: test_stages.cc and test_user_windows.cc.
TEST_CASE("the layout of XLA's extension is that of its header") {}

}  // namespace
}  // namespace jaxcomm
