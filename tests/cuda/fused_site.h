// A fused call on one rank: its stages, matrices and expected results. For one program.
#pragma once

#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cuda/xla/fused_call.h"
#include "between_nodes.h"
#include "fakes/cublaslt_fake.h"
#include "fakes/xla_frames.h"
#include "jaxcomm/small_float.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr uint8_t kUnwritten = 0x5c;
constexpr int64_t kWorkspaceBytes = 64 + 256;  // 256 for the alignment

// Elements of the matrices, from -2 to 2.
int64_t RowsOf(int32_t rank, int round, int64_t row, int64_t column) {
  return (7 * rank + 3 * round + 5 * row + 11 * column + row * column) % 5 - 2;
}
int64_t WeightOf(int32_t rank, int64_t number, int64_t row, int64_t column) {
  return (3 * rank + 2 * number + 2 * row + 7 * column + row * column) % 5 - 2;
}

struct Type {
  XLA_FFI_DataType ffi;
  DType dtype;
};
constexpr Type kF16 = {XLA_FFI_DataType_F16, DType::kF16}, kBF16 = {XLA_FFI_DataType_BF16, DType::kBF16},
               kF32 = {XLA_FFI_DataType_F32, DType::kF32}, kF64 = {XLA_FFI_DataType_F64, DType::kF64};

// A row-major matrix. Its memory is that of an array of XLA.
struct Matrix {
  Matrix(Type of_type, int64_t num_rows, int64_t num_columns)
      : type(of_type), rows(num_rows), columns(num_columns), bytes(rows * columns * ItemBytes(type.dtype) + 1) {}

  void Set(int64_t row, int64_t column, int64_t value) {
    char* const to = bytes.data() + (row * columns + column) * ItemBytes(type.dtype);
    const auto narrow = static_cast<float>(value);
    const auto wide = static_cast<double>(value);
    const uint16_t half = type.dtype == DType::kF16 ? Float16::Encode(narrow) : BFloat16::Encode(narrow);
    const void* const from = ItemBytes(type.dtype) == 2  ? static_cast<const void*>(&half)
                             : type.dtype == DType::kF32 ? static_cast<const void*>(&narrow)
                                                         : &wide;
    std::memcpy(to, from, static_cast<size_t>(ItemBytes(type.dtype)));
  }
  template <typename F>
  void Fill(F value) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) Set(row, column, value(row, column));
    }
  }
  void Spoil() { std::memset(bytes.data(), kUnwritten, bytes.size()); }
  Array Of() { return {bytes.data(), {rows, columns}, type.ffi}; }

  Type type;
  int64_t rows, columns;
  std::vector<char> bytes;
};

struct Case {
  std::vector<int> hosts;
  bool scatters = false;
  int64_t chunks = 1, rows = 4, contracted = 3;
  std::vector<int64_t> columns = {5};
  int64_t sums = 0;  // the last columns are those of arrays with the rows of all ranks
  Type operands = kF32, result = kF32;
  bool keeps = false, tf32 = false;
  std::string op = "";  // empty: its usual name

  int32_t n() const { return static_cast<int32_t>(hosts.size()); }
  bool has_rows(size_t i) const { return i + static_cast<size_t>(sums) >= columns.size(); }
};

// The call on one rank, with XLA's arrays.
struct Site {
  Site(const Case& of, ncclComm_t comm, int32_t of_rank)
      : shape(of),
        rank(of_rank),
        x(of.operands, of.scatters ? of.n() * of.rows : of.rows, of.contracted),
        exchanged(of.scatters ? of.result : of.operands, of.n() * of.rows,
                  of.scatters ? of.columns[0] : of.contracted) {
    for (size_t i = 0; i < of.columns.size(); ++i) {
      weights.emplace_back(of.operands, of.has_rows(i) ? of.n() * of.rows : of.contracted, of.columns[i]);
      products.emplace_back(of.result, of.has_rows(i) ? of.contracted : of.n() * of.rows, of.columns[i]);
    }
    xla.device = fake::Of(comm).group->first_device + rank;
    xla.stream = OwnStream().handle();
    xla.nccl_comm = comm;
  }
  Attributes AttributesOf() const {
    Attributes call, all;
    call.AddText("algorithm", "");
    call.AddScalar<int64_t>("group_size", XLA_FFI_DataType_S64, shape.n());
    call.AddScalar<int64_t>("max_sms", XLA_FFI_DataType_S64, 2);
    call.AddText("op", !shape.op.empty() ? shape.op : shape.scatters ? "matmul_psum_scatter" : "all_gather_matmul");
    call.AddScalar<int64_t>("ranks_per_node", XLA_FFI_DataType_S64, shape.n());
    call.AddText("site", "here.py:1");
    all.AddDictionary("call", call);
    all.AddScalar<int64_t>("chunks", XLA_FFI_DataType_S64, shape.chunks);
    std::vector<int64_t> groups;
    for (int32_t r = 0; r < shape.n(); ++r) groups.push_back(r);
    all.AddArray("groups", groups);
    all.AddScalar<int64_t>("keeps", XLA_FFI_DataType_S64, shape.keeps);
    all.AddScalar<int64_t>("scatters", XLA_FFI_DataType_S64, shape.scatters);
    all.AddScalar<int64_t>("tf32", XLA_FFI_DataType_S64, shape.tf32);
    all.AddScalar<int64_t>("weights", XLA_FFI_DataType_S64, static_cast<int64_t>(shape.columns.size()) - shape.sums);
    return all;
  }
  std::string Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
    std::vector<Array> args = {{&number, {}, XLA_FFI_DataType_S32}, x.Of()}, rets;
    for (Matrix& weight : weights) {
      args.push_back(weight.Of());
      args.back().data = weight.bytes.data() + shift_bytes;
    }
    for (Matrix& product : products) rets.push_back(product.Of());
    rets.push_back(exchanged.Of());
    rets.push_back({workspace, {kWorkspaceBytes}, XLA_FFI_DataType_U8});
    return Invoke(handler, stage, xla, AttributesOf(), shape.operands.ffi, args, rets);
  }
  std::string Instantiate() { return Run(&CudaFusedInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE); }
  std::string Prepare() { return Run(&CudaFusedPrepare, XLA_FFI_ExecutionStage_PREPARE); }
  std::string Initialize() { return Run(&CudaFusedInitialize, XLA_FFI_ExecutionStage_INITIALIZE); }
  std::string Execute() { return Run(&CudaFusedExecute, XLA_FFI_ExecutionStage_EXECUTE); }
  // All stages before Execute.
  std::string Begin() {
    for (const std::string& error : {Instantiate(), Prepare(), Initialize()}) {
      if (!error.empty()) return error;
    }
    return "";
  }

  // XLA computes the operands just before the call, in memory that earlier work has used.
  void PushOperands(int round) {
    OwnStream().Push([this, round] {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      x.Fill([&](int64_t row, int64_t column) { return RowsOf(rank, round, row, column); });
      for (size_t i = 0; i < weights.size(); ++i) {
        weights[i].Fill(
            [&](int64_t row, int64_t column) { return WeightOf(rank, static_cast<int64_t>(i), row, column); });
      }
      for (Matrix& product : products) product.Spoil();
      exchanged.Spoil();
    });
  }
  // XLA uses the results just after the call, and reuses all memory.
  void PushUse() {
    OwnStream().Push([this] {
      results = products;
      results.push_back(exchanged);
      for (Matrix* matrix : {&x, &exchanged}) matrix->Spoil();
      for (Matrix& weight : weights) weight.Spoil();
    });
  }

  // Of the last use.
  void CheckResults(int round) const {
    const Case& of = shape;
    const auto product = [&](int32_t of_rank, int64_t row, int32_t weights_of, size_t i) {
      return [=](int64_t column) {
        int64_t sum = 0;
        for (int64_t k = 0; k < of.contracted; ++k) {
          sum += RowsOf(of_rank, round, row, k) * WeightOf(weights_of, static_cast<int64_t>(i), k, column);
        }
        return sum;
      };
    };
    Matrix last(exchanged.type, exchanged.rows, exchanged.columns);
    last.Spoil();
    for (int32_t r = 0; r < of.n(); ++r) {
      for (int64_t row = 0; row < of.rows; ++row) {
        for (int64_t c = 0; c < last.columns; ++c) {
          if (of.scatters) {
            last.Set(r * of.rows + row, c, product(r, rank * of.rows + row, r, 0)(c));
          } else if (r != rank || of.keeps) {
            last.Set(r * of.rows + row, c, RowsOf(r, round, row, c));
          }
        }
      }
    }
    CHECK(results.back().bytes == last.bytes);
    // Of x^T and an array with the rows of all ranks.
    const auto sum = [&](int64_t k, int64_t column, size_t i) {
      int64_t total = 0;
      for (int64_t row = 0; row < of.n() * of.rows; ++row) {
        const auto of_rank = static_cast<int32_t>(row / of.rows);
        total += RowsOf(of_rank, round, row % of.rows, k) * WeightOf(rank, static_cast<int64_t>(i), row, column);
      }
      return total;
    };
    for (size_t i = 0; i < of.columns.size() && !of.scatters; ++i) {
      Matrix expected(of.result, products[i].rows, of.columns[i]);
      expected.Spoil();
      expected.Fill([&](int64_t row, int64_t column) {
        if (of.has_rows(i)) return sum(row, column, i);
        return product(static_cast<int32_t>(row / of.rows), row % of.rows, rank, i)(column);
      });
      CHECK(results[i].bytes == expected.bytes);
    }
  }

  const Case shape;
  const int32_t rank;
  int64_t shift_bytes = 0;  // of the weights
  int32_t number = 0;       // the rank, which is not read
  Matrix x, exchanged;
  std::vector<Matrix> weights, products, results;
  alignas(16) char workspace[kWorkspaceBytes];
  CallOnDevice xla;
};

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
