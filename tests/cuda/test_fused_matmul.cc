// Algorithm "fused" of collective matmul by XLA's stages, with a fake of cuBLASLt. Each stream is a thread that pauses
// at random, and only events order two streams. All matrices have small integers, so products are exact in every type.
#include "fused_site.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

// Three runs, each followed by a synchronous call on XLA's stream, which uses the same counters and arena.
void RunCase(const Case& shape, bool symmetric_buffers = false) {
  state_type = &FusedCallState::id;
  Communicator::Configure(kLong, 3, "", symmetric_buffers);
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
// Sums over the rows of all ranks: x^T @ array, alone and beside products with weights.
ALONE_TEST_CASE("products of gathered rows are added up as the rows arrive") {
  const Case usual = {Hosts(1, 3)};
  RunCase(With(usual, [](Case& c) { c.sums = 1; }));
  RunCase(With(usual, [](Case& c) { c.chunks = 2, c.columns = {5, 1, 8}, c.sums = 2, c.keeps = true; }));
  RunCase(With(usual, [](Case& c) { c.hosts = {0}, c.chunks = 2, c.sums = 1; }));
  RunCase(With(usual, [](Case& c) { c.hosts = Hosts(2, 2), c.chunks = 4, c.sums = 1; }));
  RunCase(With(usual, [](Case& c) { c.operands = kBF16, c.columns = {2, 4}, c.sums = 1; }));
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
    if (scatters) continue;
    RunCase(With(usual, [](Case& c) { c.rows = 0, c.sums = 1; }));
    RunCase(With(usual, [](Case& c) { c.contracted = 0, c.sums = 1; }));
  }
}
ALONE_TEST_CASE("many fused products [full]") {
  for (int i = 0; i < 40; ++i) {
    Case shape = {i % 2 == 0 ? Hosts(1, 4) : Hosts(2, 2), i % 4 < 2};
    shape.chunks = 1 << i % 3;
    if (!shape.scatters) shape.columns = {5, 2}, shape.sums = i % 3;
    RunCase(shape);
  }
}

// XLA's buffers are in collective memory. Transfers of fused calls pass through jaxcomm's arena in any case.
// Their messages are those of the synchronous lane, of the highest priority (test_between_nodes.cc).
ALONE_TEST_CASE("transfers have another priority than their messages") {
  state_type = &FusedCallState::id;
  Communicator::Configure(kLong, 3);
  for (const int highest : {-1, -2, -5}) {
    highest_priority = highest;
    const Case shape = {Hosts(2, 1)};
    const Cluster cluster(shape.hosts);
    OnRanks(cluster, [&](ncclComm_t comm, int32_t rank) {
      Site site(shape, comm, rank);
      CHECK(Ok(fake::Get(comm))->send_recv_proxy() != nullptr && last_priority == highest);
      CHECK(site.Begin() == "");
      CHECK(last_priority == (highest == -5 ? -3 : 0));
    });
  }
}

ALONE_TEST_CASE("fused products with JAXCOMM_SYMMETRIC_BUFFERS=1") {
  for (const bool scatters : {false, true}) RunCase({Hosts(1, 3), scatters}, true);
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
    shape.sums = 1;  // also the product that adds
    Site other(shape, comm, rank);
    CHECK(other.Begin() == "");
    CHECK(num_products == 3 + 4);
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
    const Case sum = With(gather, [](Case& c) { c.sums = 1; });
    CHECK(Has(said(sum, [](Site& s) { s.weights[0].rows = 3; }), shape));
    CHECK(Has(said(sum, [](Site& s) { s.products[0].rows = 8; }), shape));
    CHECK(Has(said(With(scatter, [](Case& c) { c.sums = 1; }), [](Site&) {}), "unexpected shape of a scatter"));
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
      [](Case& c) { c.scatters = true; }, [](Case& c) { c.sums = 1; },
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
