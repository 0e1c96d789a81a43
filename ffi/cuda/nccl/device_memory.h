// Memory of GPUs that outlives calls: the flag of aborts, and memory of calls whose executables are gone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"

namespace jaxcomm::cuda {

// Memory of the current GPU, with a copy of `data`.
StatusOr<char*> CopyToGpu(const void* data, size_t bytes, double timeout_s);

// The flag that all kernels of this process on one GPU check before they begin (device::Comm::abort_flag). `device`
// must be the current GPU. The flag lives as long as the process.
StatusOr<uint64_t*> AbortFlag(int device, double timeout_s);

// Puts memory aside that the GPU `device` may still use: from cudaMalloc, or from cudaHostAlloc if `on_host`.
// Destructors free none: cudaFree waits for the kernels of the GPU. Such a kernel may wait for a peer, and the peer for
// a launch of the thread that destroys the executable.
void Retire(int32_t device, void* memory, bool on_host = false);

// Frees what was put aside for `device`. Called in the first run of a call, where the earlier work of all GPUs of the
// process has ended, and where calls allocate memory.
void FreeRetired(int32_t device);

}  // namespace jaxcomm::cuda
