// The doubles of CUDA and NCCL that test_communicator.cc has, for tests in other files.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace jaxcomm {
namespace doubles {

// Calls `f` once per rank of a communicator, in a thread each; returns when all have.
void OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f);

// A kernel of the rank whose thread calls this. Once all ranks have come to theirs, they run emulated, in a grid of
// `channels` x ranks.
cudaError_t Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> kernel);

cudaStream_t NewStream();
void Wait(cudaStream_t stream);

}  // namespace doubles

void TestUserCalls();  // test_user_calls.cc

}  // namespace jaxcomm
