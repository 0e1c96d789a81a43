// Windows on the operands and results of a user's call. Stages: Instantiate reads which ones the call lists. Prepare
// requests windows from XLA, in every run. Initialize finds the places of the buffers. Execute exchanges the places
// before the user's kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "cuda/xla/user_call.h"

namespace jaxcomm::cuda {

ffi::Error DecodeWindows(const ffi::Dictionary& attributes, UserCallState* state);

// The buffers that the call lists, in this run: operands, then results.
StatusOr<std::vector<XlaCollectives::Buffer>> BuffersOf(const UserCallState& state, ffi::RemainingArgs args,
                                                        ffi::RemainingRets rets);

// Stage Prepare. A refusal of XLA's is no error here: PlaceWindows() decides with all ranks.
Status RequestWindows(UserCallState& state, const XlaCollectives& collectives, ffi::RemainingArgs args,
                      ffi::RemainingRets rets);

// Stage Initialize, in every run. `first`: of the call on this device. That run is collective and decides for all runs,
// because a captured CUDA graph can't change from windows to none or back.
Status PlaceWindows(UserCallState& state, UserCall& call, bool first, const XlaCollectives& collectives, int32_t device,
                    cudaStream_t stream);

// An error with the reason if peers can't address the buffers.
Status CheckWindows(const UserCall& call);
Status FindWindow(const UserCall& call, const void* buffer, device::BufferWindow* window);

}  // namespace jaxcomm::cuda
