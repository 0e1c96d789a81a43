// Instantiates the kernels, one per type.
#include "all_gather_matmul.cuh"
#include "node_ring.cuh"

namespace all_gather_matmul {

template cudaError_t Load<F32>();
template cudaError_t Load<BF16>();
template cudaError_t Launch<F32>(const Args<F32>& args, int32_t channels, cudaStream_t stream);
template cudaError_t Launch<BF16>(const Args<BF16>& args, int32_t channels, cudaStream_t stream);

template cudaError_t LoadOnNodes<F32>();
template cudaError_t LoadOnNodes<BF16>();
template cudaError_t LaunchOnNodes<F32>(const NodeArgs<F32>&, int32_t, const ncclDevComm&, cudaStream_t);
template cudaError_t LaunchOnNodes<BF16>(const NodeArgs<BF16>&, int32_t, const ncclDevComm&, cudaStream_t);

}  // namespace all_gather_matmul
