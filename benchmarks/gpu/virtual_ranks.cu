// Collectives among virtual ranks of one GPU, beside a copy of as many bytes as must be read and written: what the
// executor makes of the memory's bandwidth, and what its signals cost. Prints a line of JSON per measurement.
//
//   virtual_ranks [seconds]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/channels.h"
#include "../../ffi/plan/staging.h"
#include "../../tests/cuda/gpu/gpu.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

// blockIdx.y is the rank. `times`, if given: when each thread block began and ended.
__global__ void __launch_bounds__(kThreads, 1)
    ExecuteOnVirtualRanks(const RankArgs* args, const PeerNetworkArgs* networks, uint64_t* times) {
  __shared__ __align__(16) char shared[sizeof(SharedArgs)];
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  if (times != nullptr && threadIdx.x == 0) times[2 * block] = device::NowNs();
  const SharedArgs& own = TakeArgs(shared, args, networks);
  PeerNetwork network(own.network);
  ChannelExecutor<PeerNetwork> executor(own.args, network, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  executor.Run();
  if (times != nullptr && threadIdx.x == 0) times[2 * block + 1] = device::NowNs();
}

// Small whole numbers: sums of all ranks are exact.
__host__ __device__ float Value(int64_t rank, int64_t element) { return static_cast<float>(rank * 16 + element % 13); }

__global__ void Fill(float* input, int64_t count, int32_t rank) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{blockDim.x} * gridDim.x) {
    input[i] = Value(rank, i);
  }
}

__global__ void CountWrong(const float* output, Collective collective, int64_t block, int64_t count, int32_t rank,
                           int32_t num_ranks, unsigned long long* wrong) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{blockDim.x} * gridDim.x) {
    float expected = 0;
    if (collective == Collective::kAllToAll) {
      expected = Value(i / block, rank * block + i % block);
    } else if (collective == Collective::kAllGather) {
      expected = Value(i / block, i % block);
    } else {
      const int64_t element = collective == Collective::kReduceScatter ? rank * block + i : i;
      for (int32_t r = 0; r < num_ranks; ++r) expected += Value(r, element);
    }
    if (output[i] != expected) atomicAdd(wrong, 1);
  }
}

// The default of JAXCOMM_MAX_SMS, which limits the channels of a GPU's calls.
constexpr int32_t kMostChannels = 32;

int32_t MostChannels(int32_t num_ranks, int64_t shared_bytes = 0) {
  int device = 0, processors = 0, per_processor = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, ExecuteOnVirtualRanks, kThreads,
                                                           static_cast<size_t>(shared_bytes)));
  return processors * per_processor / num_ranks;
}

cudaError_t LaunchVirtualRanks(const VirtualRanks::Call& call, uint64_t* times, cudaStream_t stream) {
  const dim3 grid(call.num_channels, static_cast<unsigned>(call.inputs.size()));
  const RankArgs* args = call.args;
  const PeerNetworkArgs* networks = call.network;
  void* parameters[] = {&args, &networks, &times};
  return cudaLaunchCooperativeKernel(ExecuteOnVirtualRanks, grid, dim3(kThreads), parameters, call.shared_bytes,
                                     stream);
}

double Median(std::vector<double>& values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Microseconds between two events around f on the stream.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  template <typename F>
  double Time(const F& f) {
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    f();
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds * 1e3;
  }

 private:
  const cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

struct Cell {
  Collective collective;
  const char* algorithm;
  Geometry geometry;
  int64_t rank_bytes;    // of the larger of a rank's buffers
  int32_t channels = 0;  // 0: as many as there is work for
  const char* what = "sweep";
  bool bulk = false;  // with bulk copies
};

// Several copies of the buffers of one call: between two uses of the same memory, all of the L2 cache is used for other
// memory.
class Prepared {
 public:
  Prepared(const Cell& cell, int64_t cache_bytes) : cell_(cell), n_(cell.geometry.num_ranks()) {
    const bool in_blocks = cell.collective == Collective::kAllToAll || cell.collective == Collective::kAllGather ||
                           cell.collective == Collective::kReduceScatter;
    const Operation operation{DType::kF32, ReduceOp::kSum};
    block_ = cell.rank_bytes / kItem / (in_blocks ? n_ : 1);
    const int32_t most = std::min(MostChannels(n_), kMostChannels);
    num_channels_ = cell.channels > 0 ? cell.channels : NumChannels(block_ * kItem, most);
    Choice choice(*FindAlgorithm(cell.collective, cell.algorithm), {});
    choice.request.collective = cell.collective;
    choice.request.geometry = cell.geometry;
    choice.request.block_count = ChannelCount(block_, kItem, num_channels_);
    choice.request.staged_count = StagedCount(*choice.algorithm, choice.request, kItem);
    choice.request.block_count = block_;
    choice.request.chunk_count = std::max<int64_t>((1 << 20) / kItem / num_channels_, 1);
    inputs_ = InputCount(choice.request);
    outputs_ = OutputCount(choice.request);
    const RankProgram program = MakeRankProgram(choice, block_, {}, kItem, num_channels_, 0);
    const bool staged = choice.request.staged_count > 0;
    arena_bytes_ =
        ((program.shares_input || staged ? inputs_ : 0) + (program.shares_output ? outputs_ : 0)) * n_ * kItem;
    const int64_t least = std::max<int64_t>(n_ * (inputs_ + outputs_) * kItem, 1);
    const int64_t sets = std::min<int64_t>(std::max<int64_t>(2 * cache_bytes / least, 1), 16);
    ranks_ = std::make_unique<VirtualRanks>(memory_, cell.geometry, num_channels_, 10'000'000'000);
    for (int64_t i = 0; i < sets; ++i) {
      calls_.push_back(ranks_->Prepare(memory_, choice, block_, {}, operation, num_channels_));
      copies_.push_back({memory_.Take(least / 2 + 16), memory_.Take(least / 2 + 16)});
      VirtualRanks::Call& call = calls_.back();
      // The kernel copies between XLA's buffers and what peers use, as in a call.
      for (int32_t r = 0; r < n_; ++r) {
        RankArgs& args = call.args_on_host[r];
        if (program.shares_input) args.copy_in = {call.inputs[r], memory_.Take(inputs_ * kItem)};
        if (program.shares_output) args.copy_out = {memory_.Take(outputs_ * kItem), call.outputs[r]};
        if (program.shares_input) call.inputs[r] = const_cast<char*>(args.copy_in.from);
        if (program.shares_output) call.outputs[r] = args.copy_out.to;
      }
      call.UseBulkCopies(memory_, cell.bulk ? kPlanStages : BulkStages{}, [](size_t) { return true; });
      for (int32_t r = 0; r < n_; ++r) {
        Fill<<<256, 256>>>(reinterpret_cast<float*>(call.inputs[r]), inputs_, r);
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  cudaError_t Launch(cudaStream_t stream, uint64_t* times = nullptr) {
    return LaunchVirtualRanks(calls_[num_launches_++ % calls_.size()], times, stream);
  }
  // Moves as many bytes as the inputs and outputs of all ranks have.
  void Copy(cudaStream_t stream) {
    const auto& [from, to] = copies_[num_copies_++ % copies_.size()];
    CHECK_CUDA(cudaMemcpyAsync(to, from, bytes() / 2, cudaMemcpyDeviceToDevice, stream));
  }
  // The least bytes of all ranks that memory must read and write.
  int64_t bytes() const { return n_ * (inputs_ + outputs_) * kItem; }
  // The bytes of all ranks that are copied into or out of an arena in addition.
  int64_t arena_bytes() const { return arena_bytes_; }
  int32_t num_channels() const { return num_channels_; }
  int32_t num_blocks() const { return num_channels_ * n_; }
  size_t num_sets() const { return calls_.size(); }

  // After all sets have been used.
  int64_t CountWrongElements() {
    auto* const wrong = reinterpret_cast<unsigned long long*>(memory_.Take(sizeof(unsigned long long)));
    for (size_t set = 0; set < std::min(calls_.size(), num_launches_); ++set) {
      for (int32_t r = 0; r < n_ && cell_.collective != Collective::kBarrier; ++r) {
        CountWrong<<<256, 256>>>(reinterpret_cast<const float*>(calls_[set].outputs[r]), cell_.collective, block_,
                                 outputs_, r, n_, wrong);
      }
    }
    unsigned long long count = 0;
    CHECK_CUDA(cudaMemcpy(&count, wrong, sizeof count, cudaMemcpyDeviceToHost));
    for (const device::Report& report : Reports(*ranks_)) count += report.state != device::Report::kNone;
    return static_cast<int64_t>(count);
  }

 private:
  static constexpr int64_t kItem = sizeof(float);
  const Cell cell_;
  const int32_t n_;
  DeviceMemory memory_;
  int64_t block_, inputs_, outputs_, arena_bytes_ = 0;
  int32_t num_channels_;
  std::unique_ptr<VirtualRanks> ranks_;
  std::vector<VirtualRanks::Call> calls_;
  std::vector<std::pair<char*, char*>> copies_;
  size_t num_launches_ = 0, num_copies_ = 0;
};

bool any_wrong = false;

void Print(const Cell& cell, Prepared& prepared, const std::string& more) {
  const int64_t wrong = prepared.CountWrongElements();
  any_wrong |= wrong > 0;
  std::printf(
      "{\"what\": \"%s\", \"op\": \"%s\", \"algorithm\": \"%s\", \"nodes\": %d, \"ranks_per_node\": %d, "
      "\"rank_bytes\": %lld, \"channels\": %d, \"bulk\": %d, \"sets\": %zu, \"wrong\": %lld, %s}\n",
      cell.what, Name(cell.collective), cell.algorithm, cell.geometry.num_nodes, cell.geometry.ranks_per_node,
      static_cast<long long>(cell.rank_bytes), prepared.num_channels(), cell.bulk ? 1 : 0, prepared.num_sets(),
      static_cast<long long>(wrong), more.c_str());
  std::fflush(stdout);
}

template <typename... Values>
std::string Format(const char* format, Values... values) {
  char text[512];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

// Beside a copy, in turns.
void MeasureBandwidth(const Cell& cell, int64_t cache_bytes, cudaStream_t stream) {
  Prepared prepared(cell, cache_bytes);
  Stopwatch stopwatch(stream);
  // Calls that take no longer than their launch are timed many at a time.
  const int together = prepared.bytes() < (8 << 20) ? 20 : 1;
  const int repetitions = prepared.bytes() < (int64_t{1} << 30) ? 15 : 7;
  std::vector<double> launches, copies;
  for (int repetition = -2; repetition < repetitions; ++repetition) {  // the first two don't count
    const double launch = stopwatch.Time([&] {
      for (int i = 0; i < together; ++i) CHECK_CUDA(prepared.Launch(stream));
    });
    const double copy = stopwatch.Time([&] {
      for (int i = 0; i < together; ++i) prepared.Copy(stream);
    });
    if (repetition < 0) continue;
    launches.push_back(launch / together);
    copies.push_back(copy / together);
  }
  const double launch = Median(launches), copy = Median(copies);
  Print(cell, prepared,
        Format("\"bytes\": %lld, \"arena_bytes\": %lld, \"median_us\": %.2f, \"least_us\": %.2f, \"copy_us\": %.2f, "
               "\"of_copy\": %.3f, "
               "\"gb_per_s\": %.1f",
               static_cast<long long>(prepared.bytes()), static_cast<long long>(prepared.arena_bytes()), launch,
               launches[0], copy, copy / launch, static_cast<double>(prepared.bytes()) / launch / 1e3));
}

// Without the launch: from the first thread block's begin to the last one's end.
void MeasureLatency(const Cell& cell, cudaStream_t stream) {
  Prepared prepared(cell, 0);
  DeviceMemory memory;
  const int32_t blocks = prepared.num_blocks();
  auto* const times = reinterpret_cast<uint64_t*>(memory.Take(2 * blocks * sizeof(uint64_t)));
  std::vector<uint64_t> read(2 * blocks);
  std::vector<double> inside;
  for (int repetition = -5; repetition < 200; ++repetition) {
    CHECK_CUDA(prepared.Launch(stream, times));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpy(read.data(), times, read.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
    uint64_t begin = ~uint64_t{0}, end = 0;
    for (int32_t block = 0; block < blocks; ++block) {
      begin = std::min(begin, read[2 * block]);
      end = std::max(end, read[2 * block + 1]);
    }
    if (repetition >= 0) inside.push_back(static_cast<double>(end - begin) / 1e3);
  }
  Print(cell, prepared, Format("\"kernel_us\": %.3f", Median(inside)));
}

Geometry OneNode(int32_t n) { return {1, n, false, true}; }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm

int main(int argc, char** argv) {
  using namespace jaxcomm;
  using namespace jaxcomm::cuda;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 150;
  const auto begin = std::chrono::steady_clock::now();
  const auto late = [&](double share) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > share * seconds;
  };
  cudaDeviceProp properties;
  int driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  std::printf(
      "{\"what\": \"device\", \"device\": \"%s\", \"driver_cuda\": %d, \"runtime_cuda\": %d, \"sms\": %d, "
      "\"l2_bytes\": %d}\n",
      properties.name, driver, CUDART_VERSION, properties.multiProcessorCount, properties.l2CacheSize);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const int64_t cache = properties.l2CacheSize;
  constexpr int64_t kMiB = 1 << 20;
  const struct {
    Collective collective;
    const char* algorithm;
  } kOps[] = {{Collective::kAllToAll, "direct"},
              {Collective::kAllGather, "direct"},
              {Collective::kAllReduce, "direct"},
              {Collective::kReduceScatter, "direct"}};
  for (const auto& [collective, algorithm] : kOps) {
    MeasureBandwidth({collective, algorithm, OneNode(8), 64 * kMiB, 0, "target"}, cache, stream);
  }
  for (const int32_t n : {2, 4, 8}) {
    for (const char* algorithm : {"one_shot", "direct", "recursive_doubling", "ring"}) {
      MeasureLatency({Collective::kAllReduce, algorithm, OneNode(n), 8, 0, "latency"}, stream);
    }
    MeasureLatency({Collective::kBarrier, "direct", OneNode(n), 0, 0, "latency"}, stream);
    MeasureLatency({Collective::kAllToAll, "direct", OneNode(n), 4 * n, 0, "latency"}, stream);
  }
  for (const auto& [collective, algorithm] : kOps) {
    for (int32_t channels = 1; channels <= MostChannels(8); channels *= 2) {
      MeasureBandwidth({collective, algorithm, OneNode(8), 64 * kMiB, channels, "channels"}, cache, stream);
    }
  }
  // Bulk copies beside loads and stores, with as many thread blocks.
  const int64_t shared_bytes = BulkSharedBytes(kPlanStages);
  if (properties.major >= 9 && static_cast<int64_t>(properties.sharedMemPerBlockOptin) >= shared_bytes) {
    CHECK_CUDA(cudaFuncSetAttribute(ExecuteOnVirtualRanks, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)));
    for (const auto& [collective, algorithm] : kOps) {
      for (int32_t channels = 1; channels <= MostChannels(8, shared_bytes); channels *= 2) {
        for (const bool bulk : {false, true}) {
          MeasureBandwidth({collective, algorithm, OneNode(8), 64 * kMiB, channels, "bulk", bulk}, cache, stream);
        }
      }
    }
  }
  for (const int64_t bytes : {64 * kMiB, kMiB}) {
    MeasureBandwidth({Collective::kAllToAll, "hierarchical", {2, 4, false, true}, bytes}, cache, stream);
    MeasureBandwidth({Collective::kAllReduce, "hierarchical", {2, 4, false, true}, bytes}, cache, stream);
    MeasureBandwidth({Collective::kAllReduce, "ring", OneNode(8), bytes}, cache, stream);
  }
  for (int64_t bytes = 1 << 10; bytes <= 256 * kMiB; bytes *= 4) {
    for (const int32_t n : {2, 4, 8}) {
      for (const auto& [collective, algorithm] : kOps) {
        if (late(1)) {
          std::printf("{\"what\": \"left out\", \"from_bytes\": %lld}\n", static_cast<long long>(bytes));
          return any_wrong ? 1 : 0;
        }
        MeasureBandwidth({collective, algorithm, OneNode(n), bytes}, cache, stream);
      }
      if (bytes <= kMiB) MeasureBandwidth({Collective::kAllReduce, "one_shot", OneNode(n), bytes}, cache, stream);
    }
  }
  return any_wrong ? 1 : 0;
}
