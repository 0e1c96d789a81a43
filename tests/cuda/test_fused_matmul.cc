// Algorithm "fused" of collective matmul by XLA's stages, with a fake of cuBLASLt. Each stream is a thread that pauses
// at random, and only events order two streams. All matrices have small integers, so products are exact in every type.
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
  Type operands = kF32, result = kF32;
  bool keeps = false, tf32 = false;
  std::string op = "";  // empty: its usual name

  int32_t n() const { return static_cast<int32_t>(hosts.size()); }
};

// The call on one rank, with XLA's arrays.
struct Site {
  Site(const Case& of, ncclComm_t comm, int32_t of_rank)
      : shape(of),
        rank(of_rank),
        x(of.operands, of.scatters ? of.n() * of.rows : of.rows, of.contracted),
        exchanged(of.scatters ? of.result : of.operands, of.n() * of.rows,
                  of.scatters ? of.columns[0] : of.contracted) {
    for (const int64_t columns : of.columns) {
      weights.emplace_back(of.operands, of.contracted, columns);
      products.emplace_back(of.result, of.n() * of.rows, columns);
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
    for (size_t i = 0; i < of.columns.size() && !of.scatters; ++i) {
      Matrix expected(of.result, of.n() * of.rows, of.columns[i]);
      expected.Spoil();
      expected.Fill([&](int64_t row, int64_t column) {
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

// Three runs, each followed by a synchronous call on XLA's stream, which uses the same counters and arena.
void RunCase(const Case& shape) {
  state_type = &FusedCallState::id;
  Communicator::Configure(kLong, 3);
  const Cluster cluster(shape.hosts);
  OnRanks(cluster, [&](ncclComm_t comm, int32_t rank) {
    Site site(shape, comm, rank);
    CHECK(site.Begin() == "");
    Communicator& communicator = *Ok(fake::Get(comm));
    const char* const algorithm = shape.hosts.front() == shape.hosts.back() ? "direct" : "hierarchical";
    const CallSpec of_sum = SpecOf(Collective::kAllReduce, shape.n(), algorithm);
    const auto sum = Ok(DeviceCall::Make(of_sum, communicator, DType::kS32, 50, 50));
    std::vector<int32_t> own(50, rank + 1), total(50);
    for (int round = 0; round < 3; ++round) {
      site.PushOperands(round);
      CHECK(site.Execute() == "");
      site.PushUse();
      CHECK(sum->Launch(own.data(), total.data(), OwnStream().handle()).ok());
      if (round == 1) continue;  // the next run begins before this one ends
      Until([] { return OwnStream().num_running == 0; });
      site.CheckResults(round);
      CHECK(total == std::vector<int32_t>(50, shape.n() * (shape.n() + 1) / 2));
      CHECK(site.Prepare() == "" && site.Initialize() == "");
    }
    CHECK(communicator.Failure().ok());
  });
}

Case With(Case shape, void (*change)(Case&)) {
  change(shape);
  return shape;
}

ALONE_TEST_CASE("gathered rows are multiplied as they arrive") {
  const Case usual = {Hosts(1, 3)};
  RunCase(usual);
  RunCase(With(usual, [](Case& c) { c.chunks = 2, c.columns = {5, 1, 8}, c.keeps = true; }));
  RunCase(With(usual, [](Case& c) { c.hosts = {0}; }));
  RunCase(With(usual, [](Case& c) { c.hosts = Hosts(2, 2), c.chunks = 4; }));
}
ALONE_TEST_CASE("parts of products leave as they are complete") {
  const Case usual = {Hosts(1, 3), true};
  RunCase(usual);
  RunCase(With(usual, [](Case& c) { c.chunks = 2, c.columns = {8}; }));
  RunCase(With(usual, [](Case& c) { c.hosts = {0}; }));
  RunCase(With(usual, [](Case& c) { c.hosts = Hosts(2, 2), c.chunks = 4; }));
}
ALONE_TEST_CASE("fused products of all element types") {
  for (const bool scatters : {false, true}) {
    for (const auto& [operands, result] :
         {std::pair{kF16, kF16}, {kF16, kF32}, {kBF16, kBF16}, {kBF16, kF32}, {kF64, kF64}}) {
      Case shape = {Hosts(1, 2), scatters};
      shape.operands = operands;
      shape.result = result;
      RunCase(shape);
    }
  }
}
ALONE_TEST_CASE("fused products of empty matrices") {
  for (const bool scatters : {false, true}) {
    const Case usual = {Hosts(1, 2), scatters};
    RunCase(With(usual, [](Case& c) { c.rows = 0; }));
    RunCase(With(usual, [](Case& c) { c.contracted = 0; }));
    RunCase(With(usual, [](Case& c) { c.columns = {0}; }));
  }
}
ALONE_TEST_CASE("many fused products [full]") {
  for (int i = 0; i < 40; ++i) {
    Case shape = {i % 2 == 0 ? Hosts(1, 4) : Hosts(2, 2), i % 4 < 2};
    shape.chunks = 1 << i % 3;
    RunCase(shape);
  }
}

// With `of_rank` on one rank of two.
template <typename F>
void OnTwo(F of_rank) {
  state_type = &FusedCallState::id;
  Communicator::Configure(kLong, 3);
  const Cluster cluster(Hosts(1, 2));
  OnRanks(cluster, [&](ncclComm_t comm, int32_t rank) { of_rank(comm, rank); });
}

ALONE_TEST_CASE("how cuBLASLt multiplies") {
  struct Expected {
    Type type;
    bool tf32;
    int compute_type;
  };
  for (const Expected& expected : {Expected{kF32, true, 77}, Expected{kF32, false, 68}, Expected{kBF16, true, 68},
                                   Expected{kF16, true, 68}, Expected{kF64, true, 70}}) {
    // Chunks of 1 x 3 elements begin at multiples of 6 or 12 or 24 bytes, results at multiples of 8, 16 or 32.
    OnTwo([&](ncclComm_t comm, int32_t rank) {
      Case shape = {Hosts(1, 2)};
      shape.rows = shape.chunks = 2;
      shape.columns = {4};
      shape.operands = shape.result = expected.type;
      shape.tf32 = expected.tf32;
      Site site(shape, comm, rank);
      CHECK(site.Begin() == "");
      CHECK(last_product.compute_type == expected.compute_type);
      CHECK(last_product.workspace_bytes == 64);
      CHECK(last_product.alignment_bytes == static_cast<uint32_t>(ItemBytes(expected.type.dtype)));
    });
  }
}

// CUDA may load a kernel only when no other kernel of the process runs. No transfer has begun in Make().
ALONE_TEST_CASE("each product runs once before the first transfer") {
  OnTwo([](ncclComm_t comm, int32_t rank) {
    Case shape = {Hosts(1, 2)};
    shape.columns = {5, 1, 8};
    shape.chunks = 2;
    Site site(shape, comm, rank);
    CHECK(site.Instantiate() == "" && site.Prepare() == "");
    CHECK(num_products == 0);
    CHECK(site.Initialize() == "");
    CHECK(num_products == 3);
    CHECK(site.Initialize() == "");
    CHECK(num_products == 3);
  });
}

// Rows of 16 bytes of x, and of 12 bytes of results.
ALONE_TEST_CASE("results may begin at smaller multiples of bytes than operands") {
  for (const bool scatters : {false, true}) {
    Case shape = {Hosts(1, 2), scatters};
    shape.chunks = 4;
    shape.contracted = 4;
    shape.columns = {3};
    RunCase(shape);
  }
}

ALONE_TEST_CASE("arrays must have the alignment that cuBLASLt was promised") {
  OnTwo([](ncclComm_t comm, int32_t rank) {
    Case shape = {Hosts(1, 2)};
    shape.contracted = shape.columns[0] = 64;
    Site site(shape, comm, rank);
    CHECK(site.Begin() == "" && last_product.alignment_bytes == 16);
    site.shift_bytes = 8;
    CHECK(Has(site.Execute(), "an array is not aligned to 16 bytes"));
    Until([] { return OwnStream().num_running == 0; });
  });
}

// Transfers that have been enqueued end before XLA reuses their memory.
ALONE_TEST_CASE("a product that fails leaves no transfer behind") {
  OnTwo([](ncclComm_t comm, int32_t rank) {
    Site site({Hosts(1, 2)}, comm, rank);
    CHECK(site.Begin() == "");
    site.PushOperands(0);
    fault = {"cublasLtMatmul"};
    CHECK(
        Has(site.Execute(), "all_gather_matmul at here.py:1: cublasLtMatmul: cuBLAS status 13 (libcublasLt.so.fake)"));
    site.PushUse();
    Until([] { return OwnStream().num_running == 0; });
    const Matrix& exchanged = site.results.back();
    Matrix expected(exchanged.type, exchanged.rows, exchanged.columns);
    expected.Spoil();
    for (int64_t row = 0; row < 4; ++row) {
      for (int64_t c = 0; c < 3; ++c) expected.Set((1 - rank) * 4 + row, c, RowsOf(1 - rank, 0, row, c));
    }
    CHECK(exchanged.bytes == expected.bytes);
  });
}

ALONE_TEST_CASE("a product that fails in a scatter leaves no transfer behind") {
  OnTwo([](ncclComm_t comm, int32_t rank) {
    Site site({Hosts(1, 2), true}, comm, rank);
    CHECK(site.Begin() == "");
    site.PushOperands(0);
    fault = {"cublasLtMatmul"};
    CHECK(Has(site.Execute(), "matmul_psum_scatter at here.py:1: cublasLtMatmul: cuBLAS status 13"));
    site.PushUse();
    Until([] { return OwnStream().num_running == 0; });
    const Matrix& exchanged = site.results.back();
    Matrix expected(exchanged.type, exchanged.rows, exchanged.columns);
    expected.Spoil();
    std::memset(expected.bytes.data() + (1 - rank) * 4 * 5 * 4, 0xff, 4 * 5 * 4);
    CHECK(exchanged.bytes == expected.bytes);
  });
}

// The transfers of the other rank end, later calls on the communicator are right, and lost parts are NaN.
ALONE_TEST_CASE("after a product of one rank that fails, a scatter keeps ranks in step") {
  for (const int skipped : {0, 1}) {
    OnTwo([&](ncclComm_t comm, int32_t rank) {
      Case shape = {Hosts(1, 2), true};
      shape.chunks = 2;
      Site site(shape, comm, rank);
      CHECK(site.Begin() == "");
      Communicator& communicator = *Ok(fake::Get(comm));
      const auto sum =
          Ok(DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "direct"), communicator, DType::kS32, 50, 50));
      std::vector<int32_t> own(50, rank + 1), total(50);
      site.PushOperands(0);
      if (rank == 1) fault = {"cublasLtMatmul", skipped};
      const std::string error = site.Execute();
      CHECK(rank == 1 ? Has(error, "cublasLtMatmul: cuBLAS status 13") : error.empty());
      site.PushUse();
      CHECK(sum->Launch(own.data(), total.data(), OwnStream().handle()).ok());
      Until([] { return OwnStream().num_running == 0; });
      CHECK(total == std::vector<int32_t>(50, 3));
      CHECK(communicator.Failure().ok());
      if (rank == 1) return;
      // The rows of rank 1 come last. One chunk of them has 2 rows of 5 columns.
      const auto* const parts = reinterpret_cast<const float*>(site.results.back().bytes.data()) + 4 * 5;
      for (int i = 0; i < 4 * 5; ++i) CHECK(std::isnan(parts[i]) == (i >= 2 * 5 * skipped));
    });
  }
}

// The error of one rank reaches all, in Execute, before any transfer.
ALONE_TEST_CASE("a rank that can't multiply is an error on all ranks") {
  const std::pair<const char*, const char*> faults[] = {
      {"", "no cuBLASLt: none here"},
      {"cublasLtCreate", "cublasLtCreate: cuBLAS status 1"},
      {"no algorithm",
       "a product of float32[4, 3] and [3, 5] with result float32: libcublasLt.so.fake has no algorithm for it; pass "
       "another algorithm than \"fused\""},
      {"not supported", "libcublasLt.so.fake has no algorithm for it"},
      {"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoGetHeuristic: cuBLAS status 7"},
      {"cublasLtMatmulDescCreate", "cublasLtMatmulDescCreate: cuBLAS status 3"},
      {"cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutCreate: cuBLAS status 3"},
      {"cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceCreate: cuBLAS status 3"},
      {"cublasLtMatmulPreferenceSetAttribute", "cublasLtMatmulPreferenceSetAttribute: cuBLAS status 7"},
      {"cublasLtMatmul", "cublasLtMatmul: cuBLAS status 13"},
      {"cudaMalloc", "cudaMalloc: failed"},
      {"cudaEventCreate", "cudaEventCreate: failed"},
      {"cudaStreamCreate", "cudaStreamCreate: failed"},
  };
  for (const auto& [name, text] : faults) {
    Alone([call = std::string(name), said = std::string(text)] {
      OnTwo([&](ncclComm_t comm, int32_t rank) {
        Site site({Hosts(1, 2)}, comm, rank);
        Ok(fake::Get(comm));  // the fault is not of the communicator
        if (rank == 1 && call.empty()) has_cublaslt = false;
        if (rank == 1 && !call.empty()) fault = {call};
        CHECK(site.Begin() == "");
        const std::string error = site.Execute();
        CHECK(Has(error, rank == 1 ? said : "rank 1"));
        CHECK(Has(error, "all_gather_matmul at here.py:1"));
      });
    });
  }
}

ALONE_TEST_CASE("arguments of fused calls are checked") {
  OnTwo([](ncclComm_t comm, int32_t rank) {
    const auto said = [&](const Case& shape, void (*change)(Site&)) {
      Site site(shape, comm, rank);
      CHECK(site.Instantiate() == "" && site.Prepare() == "");
      change(site);
      return site.Initialize();
    };
    const Case gather = {Hosts(1, 2)}, scatter = {Hosts(1, 2), true};
    const char* const shape = "unexpected shape";
    CHECK(Has(said(gather, [](Site& s) { s.weights[0].rows = 4; }), shape));
    CHECK(Has(said(gather, [](Site& s) { s.weights[0].columns = 4; }), shape));
    CHECK(Has(said(gather, [](Site& s) { s.products[0].rows = 4; }), shape));
    CHECK(Has(said(gather, [](Site& s) { s.exchanged.rows = 4; }), shape));
    CHECK(Has(said(gather, [](Site& s) { s.exchanged.columns = 4; }), shape));
    CHECK(Has(said(gather, [](Site& s) { s.exchanged.type = kF64; }), shape));
    CHECK(Has(said(scatter, [](Site& s) { s.x.rows = 7; }), "unexpected shape of a scatter"));
    CHECK(Has(said(scatter, [](Site& s) { s.weights.push_back(s.weights[0]), s.products.push_back(s.products[0]); }),
              "unexpected shape of a scatter"));
    CHECK(Has(said(With(gather, [](Case& c) { c.chunks = 3; }), [](Site&) {}), "unexpected number of chunks"));
    CHECK(Has(said(With(gather, [](Case& c) { c.chunks = 0; }), [](Site&) {}), "unexpected number of chunks"));
    CHECK(Has(said(gather, [](Site& s) { s.weights.clear(); }), "unexpected number of operands"));
    CHECK(Has(said(gather, [](Site& s) { s.products[0].type = kBF16; }),
              "cuBLASLt does not multiply float32 and float32 with result bfloat16"));
    CHECK(Has(said(gather, [](Site& s) { s.weights[0].type = kF16; }), "does not multiply float32 and float16"));
    Site site(gather, comm, rank);
    CHECK(site.Instantiate() == "");
    CHECK(Has(site.Execute(), "XLA has not initialized the call on GPU"));
  });
}

// A fused call takes part in the comparison of the order of calls. Ranks that pass other shapes get an error.
ALONE_TEST_CASE("fused calls that differ between ranks are an error") {
  void (*const changes[])(Case&) = {
      [](Case& c) { c.chunks = 2; },      [](Case& c) { c.columns = {6}; },
      [](Case& c) { c.contracted = 4; },  [](Case& c) { c.operands = c.result = kF64; },
      [](Case& c) { c.rows = 8; },        [](Case& c) { c.keeps = true; },
      [](Case& c) { c.tf32 = true; },     [](Case& c) { c.result = kF32; },
      [](Case& c) { c.scatters = true; },
  };
  for (const auto& change : changes) {
    Alone([&] {
      OnTwo([&](ncclComm_t comm, int32_t rank) {
        Case shape = {Hosts(1, 2)};
        shape.op = "any";
        shape.operands = shape.result = kBF16;
        if (rank == 1) change(shape);
        Site site(shape, comm, rank);
        CHECK(site.Begin() == "");
        CHECK(Has(site.Execute(), "make this call with different shapes, types or arguments"));
      });
    });
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
