// The part of XLA's collectives extension that jaxcomm uses (id 129, in xla/ffi/api/collectives_c_api.h of jaxlib
// 0.11.2 and later), declared by layout: the module is built with the headers of jaxlib 0.10.2, which lack it.
// tests/cuda/test_xla_collectives.cc compares this with the real header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {
namespace xla_abi {

constexpr int64_t kCollectives = 129;
constexpr int32_t kCollectivesMajor = 0;  // minor 1: communicators; 2, from jaxlib 0.12 on: windows too

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major_version;
  int32_t minor_version;
  const Extension* next;
};

struct FindExtensionArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* context;
  int64_t type;
  const Extension* extension;  // out; null if there is none
};

// The field of XLA_FFI_Api after the last field of API 0.3. A runtime has it if its struct_size includes it.
using FindExtension = XLA_FFI_Error* (*)(FindExtensionArgs*);
constexpr size_t kFindExtensionOffset =
    offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(XLA_FFI_Api::XLA_FFI_DeviceOrdinal_Get);

constexpr int kFlattenedIds = 3;  // a group mode: ids are replica * number of partitions + partition

struct ReplicaGroup {
  const int64_t* ids;
  size_t size;
};

// The arguments of a request for communicators, and the first arguments of all other functions.
struct GroupArgs {
  size_t struct_size;
  void* extension_start;
  int group_mode;
  const ReplicaGroup* groups;
  size_t num_groups;
  int64_t communication_id;
};

struct GetArgs {
  GroupArgs groups;
  void* communicator;  // out; owned by XLA
};

struct Region {
  const void* buffer;
  size_t bytes;
  uint64_t flags;
};

struct RequestWindowArgs {
  GroupArgs groups;
  const Region* regions;
  size_t num_regions;
};

struct GetWindowArgs {
  GroupArgs groups;
  const void* buffer;
  void* window;   // out; owned by XLA
  size_t offset;  // out; of `buffer` in the window
};

struct Collectives {
  Extension base;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const Collectives*, GroupArgs*);  // Prepare
  XLA_FFI_Error* (*get_communicator)(const Collectives*, GetArgs*);        // Initialize, Execute
};

// Minor version 2. Its first member is that of minor version 1.
struct CollectivesWithWindows {
  Collectives communicators;
  XLA_FFI_Error* (*request_window)(const Collectives*, RequestWindowArgs*);  // Prepare, after request_communicator
  XLA_FFI_Error* (*get_window)(const Collectives*, GetWindowArgs*);          // Initialize, Execute
};

}  // namespace xla_abi
}  // namespace jaxcomm
