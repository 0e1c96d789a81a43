// The calls of a user's target of examples/fused_rmsnorm: stages, operands and expected results. For one program.
#pragma once

#include "fakes/user_call.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../examples/fused_rmsnorm/fused_rmsnorm.cuh"
#include "../../ffi/cuda/runtime/own_communicators.h"

// Defined by the example.
extern "C" {
XLA_FFI_Error* FusedRmsnormInitializeF32(XLA_FFI_CallFrame*);
XLA_FFI_Error* FusedRmsnormExecuteF32(XLA_FFI_CallFrame*);
XLA_FFI_Error* FusedRmsnormInitializeBF16(XLA_FFI_CallFrame*);
XLA_FFI_Error* FusedRmsnormExecuteBF16(XLA_FFI_CallFrame*);
}

namespace fused_rmsnorm {
namespace {

thread_local int32_t channels_of_last_launch = 0;

}  // namespace

template <typename Codec>
cudaError_t Load() {
  return cudaSuccess;
}

template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t stream) {
  constexpr unsigned kThreads = 8;
  channels_of_last_launch = channels;
  return jaxcomm::fake::Launch(channels, kThreads, device::BlockSumBytes(kThreads), stream, [args] { Run(args); });
}

template cudaError_t Load<F32>();
template cudaError_t Load<BF16>();
template cudaError_t Launch<F32>(const Args<F32>& args, int32_t channels, cudaStream_t stream);
template cudaError_t Launch<BF16>(const Args<BF16>& args, int32_t channels, cudaStream_t stream);

}  // namespace fused_rmsnorm

namespace jaxcomm {
namespace {

using namespace fake;

// A call site of an executable.
struct Site : UserSite {
  explicit Site(const std::string& target = "fused_rmsnorm_F32")
      : UserSite(target, &FusedRmsnormInitializeF32, &FusedRmsnormExecuteF32, 2) {
    own.AddScalar("epsilon", XLA_FFI_DataType_F32, 1e-6F);
  }
  int64_t tokens = 5, hidden = 33;
  int64_t more_results = 0;  // tokens that only the results have
};

struct Operands {
  std::vector<float> x, residual, weight, out, new_residual;
  float* x_at = nullptr;  // where XLA has x, if not in the vector
};

float Value(int seed, int64_t i) { return static_cast<float>((seed * 37 + i * 11) % 17 - 8) / 4; }

Operands OperandsOf(const Site& site, int rank, int seed) {
  Operands operands;
  for (int64_t i = 0; i < site.tokens * site.hidden; ++i) {
    operands.x.push_back(Value(seed + 3 * rank, i));
    operands.residual.push_back(Value(seed + 100, i));
  }
  for (int64_t i = 0; i < site.hidden; ++i) operands.weight.push_back(Value(seed + 200, i));
  operands.out.assign(operands.x.size(), -1);
  operands.new_residual.assign(operands.x.size(), -1);
  return operands;
}

void CheckResults(const Site& site, const Operands& operands, int seed) {
  for (int64_t token = 0; token < site.tokens; ++token) {
    double squares = 0;
    for (int64_t i = token * site.hidden; i < (token + 1) * site.hidden; ++i) {
      float sum = operands.residual[i];
      for (int r = 0; r < site.num_ranks; ++r) sum += Value(seed + 3 * r, i);
      CHECK(operands.new_residual[i] == sum);
      squares += static_cast<double>(sum) * sum;
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(site.hidden) + 1e-6);
    for (int64_t i = 0; i < site.hidden; ++i) {
      const int64_t at = token * site.hidden + i;
      const double expected = operands.new_residual[at] * scale * operands.weight[i];
      CHECK(std::abs(operands.out[at] - expected) <= 1e-5 * (1 + std::abs(expected)));
    }
  }
}

std::vector<Array> ArgsOf(const Site& site, Operands& operands) {
  const std::vector<int64_t> matrix = {site.tokens, site.hidden};
  float* const x = operands.x_at != nullptr ? operands.x_at : operands.x.data();
  return {{x, matrix}, {operands.residual.data(), matrix}, {operands.weight.data(), {site.hidden}}};
}

std::vector<Array> RetsOf(const Site& site, Operands& operands) {
  const std::vector<int64_t> matrix = {site.tokens + site.more_results, site.hidden};
  return {{operands.out.data(), matrix}, {operands.new_residual.data(), matrix}};
}

// The stages Prepare and Initialize on one device.
std::string Initialize(const Site& site, CallOnDevice& execution, float* x_at = nullptr) {
  Operands none = OperandsOf(site, 0, 0);
  none.x_at = x_at;
  return site.Begin(execution, ArgsOf(site, none), RetsOf(site, none));
}

std::string Execute(const Site& site, CallOnDevice& execution, Operands& operands) {
  return site.Execute(execution, ArgsOf(site, operands), RetsOf(site, operands));
}

cuda::UserCall& On(const Site& site, int32_t device) {
  return *static_cast<cuda::UserCallState*>(site.state)->calls.at(device);
}

}  // namespace
}  // namespace jaxcomm
