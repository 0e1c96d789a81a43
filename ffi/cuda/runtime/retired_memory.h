// Memory of calls whose executables are gone.
//
// cudaFree waits for the kernels of the GPU. Such a kernel may wait for a peer, and the peer for a launch of the thread
// that destroys the executable. So destructors only put memory aside.
#pragma once

#include <cstdint>

namespace jaxcomm {
namespace cuda {

// `memory`: from cudaMalloc on the GPU `device`. Kernels may still use it.
void Retire(int32_t device, void* memory);

// Frees what was put aside for `device`. Called in the first run of a call, where the earlier work of all GPUs of the
// process has ended, and where calls allocate memory.
void FreeRetired(int32_t device);

}  // namespace cuda
}  // namespace jaxcomm
