// The names of NCCL's GIN that gin_network.cuh uses and that both fakes of GIN share.
#pragma once

#include <cstdint>

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
}  // namespace cuda

using ncclGinSignal_t = uint32_t;
using ncclGinCounter_t = uint32_t;

// Memory of the same size on all ranks. The memory of consecutive ranks is `stride` bytes apart.
struct ncclWindow_vidmem {
  char* base;
  int64_t stride;
};
using ncclWindow_t = ncclWindow_vidmem*;

struct ncclDevComm;
struct ncclTeam {};  // the world
inline ncclTeam ncclTeamWorld(const ncclDevComm&) { return {}; }

struct ncclCoopThread {};
struct ncclGin_None {};
struct ncclGin_WeakCounterInc {
  ncclGinCounter_t counter;
};
struct ncclGin_StrongSignalInc {
  ncclGinSignal_t signal;
};
