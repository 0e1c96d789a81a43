// all_to_all_v as XLA calls it: stages, operands, a CUDA graph whose table changes from replay to replay, a wrong
// table, and calls that GPUs refuse.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "../../ffi/cuda/program/call_program.h"
#include "fakes/machine.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr int kRanks = 2, kRows = 6, kRow = 5, kOutputRows = 8;

CallSpec SliceSpec() {
  CallSpec spec = SpecOf(Collective::kAllToAllV, kRanks);
  spec.row_count = kRow;
  return spec;
}

float Value(int32_t rank, int32_t row, int32_t i, int32_t run) {
  return static_cast<float>(1000 * rank + 100 * row + 10 * run + i);
}

// Rank r sends 1 + run % 2 rows to rank 0 and 3 - run % 2 rows to rank 1, from its first row on. At the receiver, rows
// of rank 1 follow those of rank 0, from row 1 on.
template <typename T>
std::vector<T> TableOf(int32_t run) {
  const T sizes[] = {static_cast<T>(1 + run % 2), static_cast<T>(3 - run % 2)};
  std::vector<T> table;
  for (int32_t r = 0; r < kRanks; ++r) {
    table.insert(table.end(), {0, sizes[0], /**/ sizes[0], sizes[1]});
    table.insert(table.end(), {static_cast<T>(1 + r * sizes[0]), static_cast<T>(1 + r * sizes[1])});
    table.insert(table.end(), {sizes[r], sizes[r]});
  }
  return table;
}

// A call on one device. The buffers keep their addresses, as in a CUDA graph. y is the operand `output` too.
template <typename T>
struct Site : FakeXla {
  Site(GpuCallState& of, Rank& rank, Stream& on) : FakeXla(of, on.handle(), rank.rank, &rank), rank(rank.rank) {
    dtype = XLA_FFI_DataType_F32;
    more.push_back({y.data(), kOutputRows * kRow, dtype});
    more.push_back({table.data(), static_cast<int64_t>(table.size()),
                    sizeof(T) == 8 ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32});
    Use(x.data(), kRows * kRow, y.data(), kOutputRows * kRow);
  }

  void Fill(int32_t run) {
    const std::vector<T> of_run = TableOf<T>(run);
    std::copy(of_run.begin(), of_run.end(), table.begin());
    std::fill(y.begin(), y.end(), -1.0F);
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t i = 0; i < kRow; ++i) x[row * kRow + i] = Value(rank, row, i, run);
    }
  }
  void Check(int32_t run) const {
    const int32_t sizes[] = {1 + run % 2, 3 - run % 2};
    for (int32_t row = 0; row < kOutputRows; ++row) {
      const int32_t from = (row - 1) / sizes[rank], at = (row - 1) % sizes[rank];
      for (int32_t i = 0; i < kRow; ++i) {
        const bool written = row >= 1 && from < kRanks;
        const float expected = written ? Value(from, (rank == 1 ? sizes[0] : 0) + at, i, run) : -1;
        CHECK(y[row * kRow + i] == expected);
      }
    }
  }

  const int32_t rank;
  std::vector<float> x = std::vector<float>(kRows * kRow), y = std::vector<float>(kOutputRows * kRow);
  std::vector<T> table = std::vector<T>(kRanks * 4 * kRanks);
};

// With the site of each rank, and its stream.
template <typename T, typename F>
void OnSites(F of_site, bool bulk_copy = false) {
  Communicator::Configure(20, 4, "", false, 0, 0, bulk_copy);
  auto* world = new World(kRanks);
  GpuCallState* const state = StateOf(SliceSpec());
  OnRanks(*world, [&](Rank& rank) {
    rank.number = rank.rank;
    Stream stream;
    Site<T> site(*state, rank, stream);
    of_site(rank, stream, site);
  });
}

template <typename T>
void ReplayWithOtherTables() {
  OnSites<T>([](Rank&, Stream& stream, Site<T>& site) {
    RunAndReplay(
        std::vector<Site<T>*>{&site}, stream, [&](int32_t run) { site.Fill(run); },
        [&](int32_t run) { site.Check(run); });
  });
}

ALONE_TEST_CASE("a CUDA graph whose table changes from replay to replay, of integers of 32 or 64 bits") {
  ReplayWithOtherTables<int32_t>();
  ReplayWithOtherTables<int64_t>();
}

// Rank 1's GPU has no bulk copies. Ranks need not agree.
TEST_CASE("bulk copies of one rank") {
  const std::string said = Alone([] {
    OnSites<int32_t>(
        [](Rank& rank, Stream& stream, Site<int32_t>& site) {
          compute_capability = rank.rank == 0 ? 9 : 8;
          site.Fill(0);
          CHECK(site.Prepare().empty() && site.Initialize().empty() && site.Execute().empty());
          fake::Wait(stream.handle());
          site.Check(0);
        },
        true);
    CHECK(most_shared_bytes == static_cast<size_t>(SliceSharedBytes(4, kSliceStages)));
  });
  CHECK(
      said ==
      "jaxcomm: JAXCOMM_BULK_COPY=1 has no effect on GPU 1: compute capability 8.0 with 232448 bytes of shared memory "
      "per thread block, code for 9.0; bulk copies need 9.0 and 150304 bytes\n");
}

ALONE_TEST_CASE("a wrong table: the next call of every rank raises") {
  OnSites<int32_t>([](Rank&, Stream& stream, Site<int32_t>& site) {
    site.Fill(0);
    site.table[3] = 2;  // rank 0 sends two rows to rank 1, which expects three
    CHECK(site.Prepare().empty() && site.Initialize().empty() && site.Execute().empty());
    fake::Wait(stream.handle());
    for (const float value : site.y) CHECK(value == -1);
    site.run = 1;
    const std::string said = site.Execute();
    CHECK(Has(said, "can't run, since a call before it failed"));
    CHECK(Has(said, "slice 0 from rank 0 to rank 1: send_sizes is 2 at rank 0 and recv_sizes is 3 at rank 1"));
  });
}

// The kernel still checks the table.
ALONE_TEST_CASE("rows for an empty output") {
  OnSites<int32_t>([](Rank&, Stream& stream, Site<int32_t>& site) {
    site.Fill(0);
    site.y_count = site.more[0].count = 0;
    CHECK(site.Prepare().empty() && site.Initialize().empty() && site.Execute().empty());
    fake::Wait(stream.handle());
    site.run = 1;
    CHECK(Has(site.Execute(), "the output has no rows [1, 2)"));
  });
}

ALONE_TEST_CASE("calls that GPUs refuse") {
  OnSites<int32_t>([](Rank& rank, Stream&, Site<int32_t>& site) {
    const auto refused = [&] { return site.Initialize(); };
    site.more[0].data = site.x.data();
    CHECK(Has(refused(), "the result must be aliased to the output operand"));
    site.more[0] = {site.y.data(), kOutputRows * kRow - 1, XLA_FFI_DataType_F32};
    CHECK(Has(refused(), "element types or sizes of the operands do not match"));
    site.more[0] = {site.y.data(), kOutputRows * kRow, XLA_FFI_DataType_S32};
    CHECK(Has(refused(), "element types or sizes of the operands do not match"));
    site.more[0].dtype = XLA_FFI_DataType_F32;
    ++site.more[1].count;
    CHECK(site.Initialize().empty());
    CHECK(Has(site.Execute(), "a table of 17 integers does not fit a group of 2 ranks"));
    site.more[1].dtype = XLA_FFI_DataType_U32;
    CHECK(Has(refused(), "element types or sizes of the operands do not match"));
    site.more.pop_back();
    CHECK(Has(refused(), "unexpected number of operands or results"));

    Communicator& communicator = *ValueOf(Get(rank));
    const auto made = [&](const CallSpec& spec, int64_t x, int64_t y) {
      return DeviceCall::Make(spec, communicator, DType::kF32, x, y).status();
    };
    CallSpec spec = SliceSpec();
    CHECK(Has(made(spec, kRows * kRow + 1, kRow), "rows of 5 elements do not fit the operands"));
    CHECK(Has(made(spec, kRow, kRow + 1), "rows of 5 elements do not fit the operands"));
    spec.algorithm = "pairwise";
    CHECK(Has(made(spec, kRow, kRow), "GPUs have algorithm 'direct' for groups inside a node"));
    spec.algorithm = "direct";
    CHECK(made(spec, kRow, kRow).ok());
    spec.row_count = 0;
    CHECK(made(spec, 0, 0).ok());  // no data: no kernel
  });
  RankPlacement placement = {0, 1};
  CHECK(Has(MakeCallProgram(SliceSpec(), DType::kF32, kRow, kRow, placement, 4).status(),
            "algorithm \"direct\" runs inside a node of GPUs, which NVLink connects; pass algorithm=\"xla\" (on GPUs, "
            "the ranks"));
}

// A result with places for the worst case needs no arena of its size.
ALONE_TEST_CASE("the arena has the rows of the operand or of the result, whichever are fewer") {
  for (const auto& [input_rows, output_rows, bytes] :
       {std::tuple{64, 640, 64 * 4 * kRow}, {640, 64, 64 * 4 * kRow}, {1, 1, 256}, {9, 0, 0}}) {
    const CallProgram call =
        ValueOf(MakeCallProgram(SliceSpec(), DType::kF32, input_rows * kRow, output_rows * kRow, {0, kRanks}, 32));
    CHECK(call.arena.bytes == bytes && !call.empty());
  }
}

// One long slice per peer occupies all thread blocks. Their number is odd, so that slices at multiples of a power of
// two occupy all of them too.
ALONE_TEST_CASE("the number of thread blocks follows from the bytes that a pair can exchange") {
  const auto channels = [](int64_t input_rows, int64_t output_rows, int64_t max_sms) {
    CallSpec spec = SliceSpec();
    spec.max_sms = max_sms;
    return ValueOf(MakeSliceArgs(spec, DType::kF32, input_rows * kRow, output_rows * kRow, 32)).num_channels;
  };
  constexpr int64_t kMany = (2 << 20) / (4 * kRow);
  CHECK(channels(kMany, 8 * kMany, 0) == 31 && channels(8 * kMany, kMany / 2, 0) == 31);
  CHECK(channels(kMany, kMany, 7) == 7 && channels(1, kMany, 0) == 1 && channels(0, 0, 0) == 1);
  CHECK(channels(kMany, kMany, 6) == 5 && channels(kMany, kMany, 2) == 2);
  CHECK(channels(kMany / 32 + 1, kMany, 0) == 2);  // 32 KiB for each rank
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
