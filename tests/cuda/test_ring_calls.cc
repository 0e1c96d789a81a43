// The handlers of examples/all_gather_matmul on fakes of XLA, CUDA and NCCL, stage by stage as XLA calls them. Their
// kernel runs emulated. Of several nodes: test_node_ring_calls.cc.
#include "fakes/user_call.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <string>
#include <utility>
#include <vector>

#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"

// Defined by the example.
extern "C" {
XLA_FFI_Error* AllGatherMatmulInitializeF32(XLA_FFI_CallFrame*);
XLA_FFI_Error* AllGatherMatmulExecuteF32(XLA_FFI_CallFrame*);
}

namespace all_gather_matmul {

template <typename Codec>
cudaError_t Load() {
  return cudaSuccess;
}

template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t stream) {
  return jaxcomm::fake::Launch(channels, 4 * device::kWarpThreads, 0, stream, [args] { Run(args); });
}

template cudaError_t Load<F32>();
template cudaError_t Load<BF16>();
template cudaError_t Launch<F32>(const Args<F32>& args, int32_t channels, cudaStream_t stream);
template cudaError_t Launch<BF16>(const Args<BF16>& args, int32_t channels, cudaStream_t stream);

}  // namespace all_gather_matmul

namespace jaxcomm {
namespace {

using namespace fake;

// A call site of an executable.
struct Site : UserSite {
  Site(int64_t tokens, int64_t hidden, int64_t columns, int num_ranks)
      : UserSite("all_gather_matmul_F32", &AllGatherMatmulInitializeF32, &AllGatherMatmulExecuteF32, num_ranks),
        tokens(tokens),
        hidden(hidden),
        columns(columns) {
    CHECK(Instantiate().empty());
  }
  int64_t tokens, hidden, columns;
};

// Small integers: sums are exact.
float Value(int seed, int64_t i) { return static_cast<float>((seed * 7 + i * 5) % 11 - 5); }

struct Operands {
  Operands(const Site& site, int rank, int seed) {
    for (int64_t i = 0; i < site.tokens * site.hidden; ++i) x.push_back(Value(seed + rank, i));
    for (int64_t i = 0; i < site.hidden * site.columns; ++i) w.push_back(Value(seed + 50 + rank, i));
    y.assign(static_cast<size_t>(site.num_ranks * site.tokens * site.columns), -1);
  }
  std::vector<float> x, w, y;
};

std::vector<Array> ArgsOf(const Site& site, Operands& operands) {
  return {{operands.x.data(), {site.tokens, site.hidden}}, {operands.w.data(), {site.hidden, site.columns}}};
}
std::vector<Array> RetsOf(const Site& site, Operands& operands, int64_t missing_rows = 0) {
  return {{operands.y.data(), {site.num_ranks * site.tokens - missing_rows, site.columns}}};
}

void CheckResults(const Site& site, const Operands& operands, int rank, int seed) {
  for (int64_t row = 0; row < site.num_ranks * site.tokens; ++row) {
    const int owner = static_cast<int>(row / site.tokens);
    for (int64_t column = 0; column < site.columns; ++column) {
      float sum = 0;
      for (int64_t k = 0; k < site.hidden; ++k) {
        sum += Value(seed + owner, row % site.tokens * site.hidden + k) *
               Value(seed + 50 + rank, k * site.columns + column);
      }
      CHECK(operands.y[row * site.columns + column] == sum);
    }
  }
}

// Two call sites share the target's arena; the second makes a larger one, and the first keeps its own.
ALONE_TEST_CASE("the ring, stage by stage") {
  for (const int n : {1, 2, 3}) {
    cuda::Communicator::Configure(20, 3);
    const Site small(40, 9, 5, n), large(17, 3000, 3, n);
    OnDevices(n, [&](int rank, CallOnDevice& execution) {
      std::vector<std::pair<const Site*, Operands>> calls;
      for (const Site* site : {&small, &large, &small, &small, &large}) {
        const auto seed = static_cast<int>(calls.size());
        calls.emplace_back(site, Operands(*site, rank, seed));
        Operands& operands = calls.back().second;
        CHECK(site->Begin(execution, ArgsOf(*site, operands), RetsOf(*site, operands)).empty());
      }
      for (auto& [site, operands] : calls) {
        CHECK(site->Execute(execution, ArgsOf(*site, operands), RetsOf(*site, operands)).empty());
      }
      fake::Wait(execution.stream);
      for (size_t i = 0; i < calls.size(); ++i) {
        CheckResults(*calls[i].first, calls[i].second, rank, static_cast<int>(i));
      }
      Operands& operands = calls[0].second;
      CHECK(Has(small.Execute(execution, ArgsOf(small, operands), RetsOf(small, operands, 1)),
                "all_gather_matmul: x, w and y have shapes that do not fit"));
    });
  }
}

}  // namespace
}  // namespace jaxcomm
