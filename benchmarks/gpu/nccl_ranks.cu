// NCCL among several ranks of one GPU, in one process: what virtual_ranks.cu is to be compared with. Needs NCCL 2.30 or
// later and NCCL_MULTI_RANK_GPU_ENABLE=1. Prints a line of JSON per measurement.
//
//   nccl_ranks <libnccl.so.2> <ranks>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

void Die(const char* call, const char* why) {
  std::fprintf(stderr, "%s: %s\n", call, why);
  std::exit(1);
}

#define CHECK_CUDA(call)                                               \
  do {                                                                 \
    const cudaError_t status = (call);                                 \
    if (status != cudaSuccess) Die(#call, cudaGetErrorString(status)); \
  } while (false)
#define CHECK_NCCL(call)                                                \
  do {                                                                  \
    const ncclResult_t result = (call);                                 \
    if (result != ncclSuccess) Die(#call, nccl.GetErrorString(result)); \
  } while (false)

struct Nccl {
#define FUNCTIONS(X) \
  X(GetVersion)      \
  X(GetUniqueId)     \
  X(CommInitRank)    \
  X(GroupStart)      \
  X(GroupEnd)        \
  X(GetErrorString)  \
  X(AllReduce)       \
  X(AllGather)       \
  X(ReduceScatter)   \
  X(AlltoAll)
#define DECLARE(name) decltype(&::nccl##name) name = nullptr;
  FUNCTIONS(DECLARE)
#undef DECLARE
  explicit Nccl(const char* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) Die("dlopen", dlerror());
#define FIND(name)                                                       \
  name = reinterpret_cast<decltype(name)>(dlsym(library, "nccl" #name)); \
  if (name == nullptr) Die("nccl" #name, "is not in the library");
    FUNCTIONS(FIND)
#undef FIND
#undef FUNCTIONS
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) Die("usage", "nccl_ranks <libnccl.so.2> <ranks>");
  const Nccl nccl(argv[1]);
  const int n = std::atoi(argv[2]);
  int version = 0;
  CHECK_NCCL(nccl.GetVersion(&version));
  CHECK_CUDA(cudaSetDevice(0));
  ncclUniqueId id;
  CHECK_NCCL(nccl.GetUniqueId(&id));
  std::vector<ncclComm_t> comms(n);
  std::vector<cudaStream_t> streams(n);
  std::vector<cudaEvent_t> ends(n);
  std::vector<float*> from(n), to(n);
  constexpr size_t kMostBytes = 64 << 20;
  for (int r = 0; r < n; ++r) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    CHECK_CUDA(cudaEventCreateWithFlags(&ends[r], cudaEventDisableTiming));
    CHECK_CUDA(cudaMalloc(&from[r], kMostBytes));
    CHECK_CUDA(cudaMalloc(&to[r], kMostBytes));
    CHECK_CUDA(cudaMemset(from[r], 0, kMostBytes));
  }
  CHECK_NCCL(nccl.GroupStart());
  for (int r = 0; r < n; ++r) CHECK_NCCL(nccl.CommInitRank(&comms[r], n, id, r));
  CHECK_NCCL(nccl.GroupEnd());
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  // `size`: bytes of the larger of a rank's buffers.
  const struct {
    const char* name;
    std::function<ncclResult_t(int, size_t)> call;
  } ops[] = {
      {"all_to_all",
       [&](int r, size_t size) {
         return nccl.AlltoAll(from[r], to[r], size / 4 / n, ncclFloat, comms[r], streams[r]);
       }},
      {"all_gather",
       [&](int r, size_t size) {
         return nccl.AllGather(from[r], to[r], size / 4 / n, ncclFloat, comms[r], streams[r]);
       }},
      {"all_reduce",
       [&](int r, size_t size) {
         return nccl.AllReduce(from[r], to[r], size / 4, ncclFloat, ncclSum, comms[r], streams[r]);
       }},
      {"reduce_scatter",
       [&](int r, size_t size) {
         return nccl.ReduceScatter(from[r], to[r], size / 4 / n, ncclFloat, ncclSum, comms[r], streams[r]);
       }},
  };
  for (const size_t size : {size_t{1} << 10, size_t{1} << 16, size_t{1} << 20, size_t{1} << 24, kMostBytes}) {
    for (const auto& op : ops) {
      std::vector<float> times;
      for (int repetition = -3; repetition < 15; ++repetition) {
        // From when the first stream may begin until the last one has ended.
        CHECK_CUDA(cudaEventRecord(begin, streams[0]));
        for (int r = 1; r < n; ++r) CHECK_CUDA(cudaStreamWaitEvent(streams[r], begin, 0));
        CHECK_NCCL(nccl.GroupStart());
        for (int r = 0; r < n; ++r) CHECK_NCCL(op.call(r, size));
        CHECK_NCCL(nccl.GroupEnd());
        for (int r = 1; r < n; ++r) {
          CHECK_CUDA(cudaEventRecord(ends[r], streams[r]));
          CHECK_CUDA(cudaStreamWaitEvent(streams[0], ends[r], 0));
        }
        CHECK_CUDA(cudaEventRecord(end, streams[0]));
        CHECK_CUDA(cudaEventSynchronize(end));
        float milliseconds = 0;
        CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
        if (repetition >= 0) times.push_back(milliseconds * 1e3F);
      }
      std::sort(times.begin(), times.end());
      const char* ctas = std::getenv("NCCL_MAX_CTAS");
      std::printf(
          "{\"what\": \"nccl\", \"op\": \"%s\", \"ranks\": %d, \"rank_bytes\": %zu, \"median_us\": %.2f, "
          "\"least_us\": %.2f, \"version\": %d, \"max_ctas\": \"%s\"}\n",
          op.name, n, size, times[times.size() / 2], times[0], version, ctas ? ctas : "");
      std::fflush(stdout);
    }
  }
  return 0;
}
