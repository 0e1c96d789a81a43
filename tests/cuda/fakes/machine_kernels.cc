// Launches of jaxcomm's kernels on the machine of machine.h, where they run emulated.
#include "machine.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include "../../../ffi/cuda/kernels/executor.cuh"
#include "../../../ffi/cuda/kernels/launch.h"
#include "../../../ffi/cuda/kernels/ll.cuh"
#include "../../../ffi/cuda/kernels/multimem.cuh"
#include "../../../ffi/cuda/kernels/rail_combine.cuh"
#include "../../../ffi/cuda/kernels/rail_dispatch.cuh"
#include "../../../ffi/cuda/kernels/route_and_dispatch.cuh"
#include "../../../ffi/cuda/kernels/rows.cuh"
#include "../../../ffi/cuda/kernels/slices.cuh"
#include "peer_network.cuh"
#include "reductions.h"

namespace jaxcomm {
namespace cuda {

using fake::own;

namespace {

int32_t Channel() { return static_cast<int32_t>(blockIdx.x); }

// In place of a kernel that is one Call(args, channel, shared memory) per thread block.
template <typename Call, typename Args>
cudaError_t LaunchCalls(const Args& args, int64_t shared_bytes, cudaStream_t stream) {
  if (!fake::is_loaded<Args>) return cudaErrorUnknown;
  return fake::Launch(args.num_channels, 4, static_cast<size_t>(shared_bytes), stream, [args] {
    if constexpr (std::is_constructible_v<Call, Args, int32_t>) {
      Call(args, Channel()).Run();
    } else {
      Call(args, Channel(), device::DynamicShared()).Run();
    }
  });
}

}  // namespace

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  if (!fake::is_loaded<RankArgs>) return cudaErrorUnknown;
  if (!fake::plan_shared.Allows(BulkSharedBytes(args.bulk))) return cudaErrorInvalidValue;
  return fake::Launch(num_channels, 4, static_cast<size_t>(BulkSharedBytes(args.bulk)), stream, [args] {
    NoNetwork network;
    ChannelExecutor<NoNetwork> executor(args, network, Channel(), device::DynamicShared());
    executor.Run();
  });
}

cudaError_t Launch(const ExchangeOffsetsArgs& args, cudaStream_t stream) {
  if (!fake::is_loaded<ExchangeOffsetsArgs>) return cudaErrorUnknown;
  return fake::Launch(1, 4, 0, stream, [args] { ExchangeOffsets(args); });
}

// A network that addresses all ranks' memory replaces GIN. test_gin.cc and test_rows.cc test GIN itself.
namespace {

device::Comm OverMemory(device::Comm comm) {
  fake::World& world = *fake::own->world;
  const auto words = static_cast<size_t>(comm.signals.num_channels) * world.n;
  std::lock_guard<std::mutex> lock(world.mutex);
  world.remote_pads.resize(words * world.n);
  world.remote_sent.resize(world.n, std::vector<uint64_t>(words));
  comm.signals.pad = {reinterpret_cast<char*>(world.remote_pads.data()),
                      static_cast<int64_t>(words * sizeof(uint64_t))};
  comm.signals.sent = world.remote_sent[own->rank].data();
  return comm;
}

device::Window OverMemory(void* window, int64_t offset) {
  if (window == nullptr) return {};
  const fake::Registered& registered = *static_cast<fake::Registered*>(window);
  return {registered.rank->world->memory[own->rank] + registered.begin + offset, fake::World::kStride};
}

}  // namespace

namespace gin {

cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& gin, const ncclDevComm&, int32_t num_channels,
                      cudaStream_t stream) {
  if (!fake::gin_shared.Allows(BulkSharedBytes(args.bulk))) return cudaErrorInvalidValue;
  PeerNetworkArgs peers;
  peers.comm = OverMemory(gin.comm);
  peers.input = OverMemory(gin.input.window, gin.input.offset);
  peers.output = OverMemory(gin.output.window, gin.output.offset);
  peers.scratch = OverMemory(gin.scratch.window, gin.scratch.offset);
  for (int32_t c = 0; c < gin.comm.signals.num_channels; ++c) CHECK(gin.puts[c] == 0);
  return fake::Launch(num_channels, 4, static_cast<size_t>(BulkSharedBytes(args.bulk)), stream, [args, peers] {
    PeerNetwork network(peers);
    ChannelExecutor<PeerNetwork>(args, network, Channel(), device::DynamicShared()).Run();
  });
}

cudaError_t LaunchInterNodeRows(const InterNodeRowArgs& args, const ncclDevComm&, cudaStream_t stream) {
  if (!fake::is_loaded<InterNodeRowArgs>) return cudaErrorUnknown;
  const auto shared_bytes = static_cast<size_t>(RailSharedBytes(args.rows, 4));
  const device::Comm comm = OverMemory(args.gin.comm);
  const device::Window arena = OverMemory(args.gin.arena, 0);
  return fake::Launch(args.rows.num_channels, 4, shared_bytes, stream, [args, comm, arena] {
    const PeerGin gin(comm, arena);
    if (args.rows.combines) {
      RailCombine<PeerGin>(args, gin, Channel(), device::DynamicShared()).Run();
    } else {
      RailDispatch<PeerGin>(args, gin, Channel(), device::DynamicShared()).Run();
    }
  });
}

}  // namespace gin

cudaError_t Launch(const LlArgs& args, cudaStream_t stream) {
  ++own->num_ll;
  return LaunchCalls<LlCall>(args, 0, stream);
}

cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream) {
  ++own->num_multimem;
  return LaunchCalls<MultimemCall>(args, 0, stream);
}

cudaError_t Launch(const RowArgs& args, cudaStream_t stream) {
  return LaunchCalls<RowCall>(args, RowSharedBytes(args, 4), stream);
}

cudaError_t Launch(const RouteAndDispatchArgs& args, cudaStream_t stream) {
  return LaunchCalls<RouteAndDispatchCall>(args, RouteAndDispatchSharedBytes(args), stream);
}

cudaError_t Launch(const SliceArgs& args, cudaStream_t stream) {
  if (!fake::slice_shared.Allows(SliceSharedBytes(kSliceThreads, args.bulk))) return cudaErrorInvalidValue;
  return LaunchCalls<SliceCall>(args, SliceSharedBytes(4, args.bulk), stream);
}

}  // namespace cuda
}  // namespace jaxcomm
