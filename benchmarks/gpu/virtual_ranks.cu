// Collectives among virtual ranks of one GPU, beside copies of as many bytes in the same memory: what the executor
// makes of the memory's bandwidth, and what its signals cost. Writes JSON to the standard output.
//
//   virtual_ranks [repetitions]
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>

#include "../../ffi/plan/algorithms.h"
#include "../../tests/cuda/gpu.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

struct Timing {
  double median_us, least_us;
};

Timing Summary(std::vector<float>& milliseconds) {
  std::sort(milliseconds.begin(), milliseconds.end());
  return {milliseconds[milliseconds.size() / 2] * 1e3, milliseconds[0] * 1e3};
}

// Runs all of them in turn, `repetitions` times, and times each by events on the stream.
std::vector<Timing> Alternate(const std::vector<std::function<void(cudaStream_t)>>& runs, int repetitions) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<std::vector<float>> times(runs.size());
  for (int repetition = -3; repetition < repetitions; ++repetition) {  // the first three don't count
    for (size_t i = 0; i < runs.size(); ++i) {
      CHECK_CUDA(cudaEventRecord(begin, stream));
      runs[i](stream);
      CHECK_CUDA(cudaEventRecord(end, stream));
      CHECK_CUDA(cudaEventSynchronize(end));
      float elapsed = 0;
      CHECK_CUDA(cudaEventElapsedTime(&elapsed, begin, end));
      if (repetition >= 0) times[i].push_back(elapsed);
    }
  }
  std::vector<Timing> timings;
  for (auto& time : times) timings.push_back(Summary(time));
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return timings;
}

// Bytes that a program makes the memory read and write; all ranks.
int64_t Traffic(const Choice& choice, int64_t item_bytes) {
  int64_t bytes = 0;
  for (const Plan& plan : BuildAll(*choice.algorithm, choice.request)) {
    for (const Step& step : plan.steps) {
      if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) continue;
      const int64_t reads = step.kind == StepKind::kReduce ? step.num_sources : step.kind == StepKind::kZero ? 0 : 1;
      bytes += (reads + 1) * step.count * item_bytes;
    }
  }
  return bytes;
}

struct Cell {
  Collective collective;
  const char* algorithm;
  Geometry geometry;
  int64_t rank_bytes;  // of the larger of a rank's buffers
};

void Run(const Cell& cell, int repetitions, bool first) {
  const int32_t n = cell.geometry.num_ranks();
  const bool blocks = cell.collective == Collective::kAllToAll || cell.collective == Collective::kAllGather ||
                      cell.collective == Collective::kReduceScatter;
  const Operation operation{DType::kF32, ReduceOp::kSum};
  const int64_t item = ItemBytes(operation.dtype);
  const int64_t block_count = cell.rank_bytes / item / (blocks ? n : 1);
  const int32_t num_channels = NumChannels(block_count * item, MostChannels(n));
  Choice choice;
  choice.algorithm = FindAlgorithm(cell.collective, cell.algorithm);
  choice.request.collective = cell.collective;
  choice.request.geometry = cell.geometry;
  choice.request.block_count = block_count;
  choice.request.chunk_count = std::max<int64_t>((1 << 20) / item / num_channels, 1);
  DeviceMemory memory;
  VirtualRanks ranks(memory, cell.geometry, num_channels, 10'000'000'000);
  // Reports are read by the host at the end only.
  const VirtualRanks::Call call = ranks.Prepare(memory, choice, block_count, {}, operation, num_channels);
  const int64_t traffic = Traffic(choice, item);
  char* from = memory.Take(traffic / 2 + 16);
  char* to = memory.Take(traffic / 2 + 16);
  const std::vector<Timing> timings = Alternate(
      {[&](cudaStream_t stream) { LaunchVirtualRanks(call, kThreads, stream); },
       [&](cudaStream_t stream) {
         CHECK_CUDA(cudaMemcpyAsync(to, from, std::max<int64_t>(traffic / 2, 1), cudaMemcpyDeviceToDevice, stream));
       }},
      repetitions);
  std::vector<device::Report> reports(n);
  CHECK_CUDA(cudaMemcpy(reports.data(), ranks.reports(), n * sizeof(device::Report), cudaMemcpyDeviceToHost));
  for (const device::Report& report : reports) {
    if (report.state == device::Report::kNone) continue;
    std::fprintf(stderr, "%s/%s: rank %d gave up\n", Name(cell.collective), cell.algorithm, report.rank);
    std::exit(1);
  }
  std::printf(
      "%s    {\"op\": \"%s\", \"algorithm\": \"%s\", \"nodes\": %d, \"ranks_per_node\": %d, \"rank_bytes\": %lld, "
      "\"channels\": %d, \"memory_bytes\": %lld, \"median_us\": %.2f, \"least_us\": %.2f, \"copy_median_us\": %.2f, "
      "\"copy_least_us\": %.2f, \"of_copy\": %.3f}",
      first ? "" : ",\n", Name(cell.collective), cell.algorithm, cell.geometry.num_nodes, cell.geometry.ranks_per_node,
      static_cast<long long>(cell.rank_bytes), num_channels, static_cast<long long>(traffic), timings[0].median_us,
      timings[0].least_us, timings[1].median_us, timings[1].least_us, timings[1].median_us / timings[0].median_us);
  std::fflush(stdout);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm

int main(int argc, char** argv) {
  using namespace jaxcomm;
  using namespace jaxcomm::cuda;
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 50;
  cudaDeviceProp properties;
  int driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  std::printf("{\"device\": \"%s\", \"driver_cuda\": %d, \"runtime_cuda\": %d, \"cells\": [\n", properties.name, driver,
              CUDART_VERSION);
  const auto near = [](int32_t n) { return Geometry{1, n, false, true}; };
  const Geometry two_nodes{2, 4, false, true};
  std::vector<Cell> cells;
  for (const int64_t bytes : {int64_t{8}, int64_t{8} << 10, int64_t{1} << 20, int64_t{64} << 20}) {
    for (const int32_t n : {2, 8}) {
      cells.push_back({Collective::kAllReduce, "one_shot", near(n), bytes});
      cells.push_back({Collective::kAllReduce, "direct", near(n), bytes});
      cells.push_back({Collective::kAllReduce, "ring", near(n), bytes});
      cells.push_back({Collective::kAllToAll, "direct", near(n), std::max<int64_t>(bytes, 4 * n)});
      cells.push_back({Collective::kAllGather, "direct", near(n), std::max<int64_t>(bytes, 4 * n)});
      cells.push_back({Collective::kReduceScatter, "direct", near(n), std::max<int64_t>(bytes, 4 * n)});
    }
    cells.push_back({Collective::kAllToAll, "hierarchical", two_nodes, std::max<int64_t>(bytes, 32)});
    cells.push_back({Collective::kAllReduce, "hierarchical", two_nodes, bytes});
  }
  cells.push_back({Collective::kBarrier, "direct", near(8), 0});
  bool first = true;
  for (const Cell& cell : cells) {
    Run(cell, repetitions, first);
    first = false;
  }
  std::printf("\n]}\n");
  return 0;
}
