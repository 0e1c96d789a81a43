// dispatch and combine as XLA calls them: stages, operands, a CUDA graph whose routing changes from replay to replay,
// a wrong routing, and calls that GPUs refuse.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fakes/machine.h"
#include "fakes/virtual_rows.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr int kRanks = 2, kTokens = 3, kChoices = 2, kExperts = 4, kCapacity = 16, kRow = 5;

// One of two routings. Every token goes to the experts of both ranks.
Routed RoutingOf(int32_t run) {
  const std::vector<std::vector<int32_t>> ids = {{0, 3, 1, 2, 1, 3}, {2, 1, 3, 0, -1, 1}};
  const std::vector<std::vector<int32_t>> others = {{3, 3, -1, 2, 0, 1}, {1, 1, 1, 1, 0, 2}};
  Routed routed = Route(kRanks, kTokens, kChoices, kExperts, 1, 0, 0, run % 2 == 0 ? ids : others);
  CHECK(routed.capacity <= kCapacity);
  routed.capacity = kCapacity;
  return routed;
}

CallSpec RowSpec(Collective collective) {
  CallSpec spec = SpecOf(collective, kRanks);
  spec.row_count = kRow;
  spec.choices = kChoices;
  spec.num_experts = kExperts;
  return spec;
}

// The buffers of a layer on one device, which keep their addresses, as in a CUDA graph.
struct Buffers {
  std::vector<float> x = std::vector<float>(kTokens * kRow), rows = std::vector<float>(kCapacity * kRow, -1),
                     y = std::vector<float>(kTokens * kRow, -1), weights = std::vector<float>(kTokens * kChoices);
  std::vector<int32_t> table = std::vector<int32_t>(kRanks * 4 * kExperts),
                       order = std::vector<int32_t>(kTokens * kChoices), slot = order, expert = order;

  void Fill(const Routed& routed, int32_t rank, int32_t run) {
    table = routed.table;
    const std::vector<int32_t> rows_of = RowsOf(routed, rank, false);
    std::copy(rows_of.begin(), rows_of.end(), order.begin());
    slot = routed.slot[rank];
    expert = routed.expert[rank];
    const Bytes payload = FloatPayloads(kRanks, kTokens, kRow, run)[rank];
    std::memcpy(x.data(), payload.data(), payload.size());
    for (int32_t t = 0; t < kTokens; ++t) {
      for (int32_t k = 0; k < kChoices; ++k) weights[t * kChoices + k] = static_cast<float>(1 + t + 3 * k);
    }
  }

  // The experts of this test return the rows as they are.
  void Check(const Routed& routed, int32_t rank, int32_t run) const {
    const Bytes expected = Dispatched(routed, FloatPayloads(kRanks, kTokens, kRow, run), kRow * 4)[rank];
    CHECK(std::memcmp(rows.data(), expected.data(), expected.size()) == 0);
    for (int32_t t = 0; t < kTokens; ++t) {
      float sum = 0;
      for (int32_t k = 0; k < kChoices; ++k) sum += routed.slot[rank][t * kChoices + k] < 0 ? 0 : 1 + t + 3 * k;
      for (int32_t i = 0; i < kRow; ++i) CHECK(y[t * kRow + i] == sum * x[t * kRow + i]);
    }
  }
};

// A dispatch or a combine on one device.
struct Site : FakeXla {
  Site(GpuCallState& of, Rank& rank, Stream& on, Buffers& buffers) : FakeXla(of, on.handle(), rank.rank, &rank) {
    const bool combines = of.spec.collective == Collective::kCombine;
    dtype = XLA_FFI_DataType_F32;
    const auto integers = [&](const std::vector<int32_t>& values) {
      more.push_back({values.data(), static_cast<int64_t>(values.size()), XLA_FFI_DataType_S32});
    };
    integers(combines ? buffers.slot : buffers.order);
    if (combines) {
      integers(buffers.expert);
      more.push_back({buffers.weights.data(), kTokens * kChoices, XLA_FFI_DataType_F32});
    }
    integers(buffers.table);
    std::vector<float>&from = combines ? buffers.rows : buffers.x, &to = combines ? buffers.y : buffers.rows;
    Use(from.data(), static_cast<int64_t>(from.size()), to.data(), static_cast<int64_t>(to.size()));
  }
  const GpuCallState& call() const { return *static_cast<GpuCallState*>(state); }
};

// body(rank, stream, buffers, dispatch, combine) on each rank of the world. `change`: of the calls' specification.
template <typename Change, typename Body>
void OnLayers(World& world, const Change& change, const Body& body) {
  Communicator::Configure(20, 4);
  GpuCallState* const dispatch = StateOf(RowSpec(Collective::kDispatch));
  GpuCallState* const combine = StateOf(RowSpec(Collective::kCombine));
  for (GpuCallState* state : {dispatch, combine}) change(state->spec);
  OnRanks(world, [&](Rank& rank) {
    rank.number = rank.rank;
    Stream stream;
    Buffers buffers;
    Site first(*dispatch, rank, stream, buffers), second(*combine, rank, stream, buffers);
    body(rank, stream, buffers, first, second);
  });
}

void Unchanged(CallSpec&) {}

ALONE_TEST_CASE("a layer in a CUDA graph, with a routing that changes from replay to replay") {
  OnLayers(*new World(kRanks), Unchanged, [](Rank& rank, Stream& stream, Buffers& buffers, Site& first, Site& second) {
    RunAndReplay(
        std::vector<Site*>{&first, &second}, stream, [&](int32_t run) { buffers.Fill(RoutingOf(run), rank.rank, run); },
        [&](int32_t run) { buffers.Check(RoutingOf(run), rank.rank, run); });
  });
}

// Nodes of equal size. The routing changes from run to run, and the last one is wrong.
void LayerAmongNodes(int num_nodes, bool sums_at_source) {
  auto* world = new World(kRanks);
  world->num_lsa_teams = num_nodes;
  if (num_nodes > 1) world->gin = NCCL_GIN_TYPE_GDAKI;
  const auto change = [&](CallSpec& spec) {
    spec.algorithm = "hierarchical";
    if (spec.collective != Collective::kCombine) return;
    spec.weighted = 1;
    spec.home = sums_at_source ? 1 : 0;
  };
  OnLayers(*world, change, [&](Rank& rank, Stream& stream, Buffers& buffers, Site& site, Site& second) {
    for (int32_t run = 0; run < 3; ++run) {
      const Routed routed = RoutingOf(run);
      buffers.Fill(routed, rank.rank, run);
      for (Site* each : {&site, &second}) {
        each->run = run;
        CHECK(each->Prepare().empty() && each->Initialize().empty());
      }
      CHECK(site.Execute().empty() && second.Execute().empty());
      CHECK(stream.queue.size() == 2);
      fake::Wait(stream.handle());
      buffers.Check(routed, rank.rank, run);
    }
    // Without tokens there is no arena.
    const GpuCallState &dispatch = site.call(), &combine = second.call();
    Communicator& communicator = dispatch.calls.at(rank.device())->communicator();
    CHECK(DeviceCall::Make(dispatch.spec, communicator, DType::kF32, 0, kCapacity * kRow).ok());
    CHECK(DeviceCall::Make(combine.spec, communicator, DType::kF32, kCapacity * kRow, 0).ok());
    const auto refused = [](Site& of, size_t operand, int64_t count, XLA_FFI_DataType type, const std::string& text) {
      const FakeXla::Operand right = of.more[operand];
      of.more[operand] = {right.data, count, type};
      CHECK(Has(of.Execute(), text));
      of.more[operand] = right;
    };
    const auto integers = XLA_FFI_DataType_S32, floats = XLA_FFI_DataType_F32;
    refused(site, 0, 5, integers, "32 integers and a routing of 5 choices do not fit 2 ranks, 4 experts and 6 choices");
    refused(site, 1, 31, integers, "31 integers and a routing of 6 choices do not fit");
    refused(site, 1, 32, XLA_FFI_DataType_S64, "the routing must have integers of 32 bits");
    refused(second, 1, 5, integers, "the sizes or types of experts, weights and slots do not match");
    refused(second, 2, 5, floats, "the sizes or types of experts, weights and slots do not match");
    refused(second, 2, 6, XLA_FFI_DataType_F64, "the sizes or types of experts, weights and slots do not match");
    if (num_nodes > 1) refused(second, 2, 0, floats, "the operand of weights does not fit the attribute `weighted`");
    buffers.table[(4 + 2) * kExperts + 3] += kCapacity;  // of the slice of rank 1 for its own last expert
    site.run = 3;
    CHECK(site.Execute().empty());
    fake::Wait(stream.handle());
    site.run = 4;
    CHECK(Has(site.Execute(), "rank 1 gets more rows for its experts than it has places for"));
  });
}

ALONE_TEST_CASE("a layer between nodes over GIN") { LayerAmongNodes(2, false); }
ALONE_TEST_CASE("a layer between nodes over GIN, with sums at the source rank") { LayerAmongNodes(2, true); }
ALONE_TEST_CASE("a layer between hosts that turn out to be one node") { LayerAmongNodes(1, false); }

// The slots of rank 1 do not suffice, or there are none.
void TooManyRows(bool without_slots) {
  OnLayers(*new World(kRanks), Unchanged, [&](Rank& rank, Stream& stream, Buffers& buffers, Site& site, Site&) {
    Routed routed = RoutingOf(0);
    for (int32_t r = 0; r < kRanks && !without_slots; ++r) {
      for (int32_t e = 2; e < kExperts; ++e) routed.table[(r * 4 + 2) * kExperts + e] += kCapacity - 2;
    }
    buffers.Fill(routed, rank.rank, 0);
    if (without_slots) site.y_count = 0;
    CHECK(site.Prepare().empty() && site.Initialize().empty() && site.Execute().empty());
    fake::Wait(stream.handle());
    for (const float row : buffers.rows) CHECK(row == -1);
    site.run = 1;
    const std::string said = site.Execute();
    CHECK(Has(said, "can't run, since a call before it failed"));
    CHECK(without_slots || Has(said, "rank 1 gets more rows for its experts than it has places for"));
    CHECK(Has(said, "pass more capacity or slots, or on_overflow=\"drop\""));
  });
}

ALONE_TEST_CASE("too many rows: the next call of every rank raises") { TooManyRows(false); }
ALONE_TEST_CASE("a dispatch without slots moves nothing, but the next call of every rank raises") { TooManyRows(true); }

ALONE_TEST_CASE("calls that GPUs refuse") {
  Communicator::Configure(20, 4);
  OnRanks(*new World(kRanks), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    const auto made = [&](const CallSpec& spec, DType dtype, int64_t x, int64_t y) {
      return DeviceCall::Make(spec, communicator, dtype, x, y).status();
    };
    CallSpec spec = RowSpec(Collective::kCombine);
    CHECK(Has(made(spec, DType::kS32, kCapacity * kRow, kTokens * kRow), "GPUs do not add rows of"));
    CHECK(Has(made(spec, DType::kF32, kCapacity * kRow + 1, kTokens * kRow), "do not fit the operands"));
    CHECK(Has(made(spec, DType::kF32, kCapacity * kRow, kTokens * kRow + 1), "do not fit the operands"));
    CallSpec many = spec;
    many.row_count = 1;
    CHECK(Has(MakeRowArgs(many, DType::kF32, 1, int64_t{1} << 30, 4).status(), "more than 2^31 rows, choices or exp"));
    many.num_experts = 3;
    CHECK(Has(MakeRowArgs(many, DType::kF32, 1, 1, 4).status(), "2 choices and 3 experts do not fit the operands"));
    CallSpec one = spec;
    one.choices = 1;
    CHECK(made(one, DType::kS32, kCapacity * kRow, kTokens * kRow).ok());  // copies
    one.weighted = 1;
    CHECK(Has(made(one, DType::kS32, kCapacity * kRow, kTokens * kRow), "GPUs do not add rows of"));
    CallSpec longest = spec;
    longest.row_count = int64_t{4} << 28;  // 4 thread blocks with 2^30 bytes each
    CHECK(MakeRowArgs(longest, DType::kF32, 2 * longest.row_count, longest.row_count, 4).ok());
    longest.max_sms = 3;
    CHECK(Has(MakeRowArgs(longest, DType::kF32, 2 * longest.row_count, longest.row_count, 4).status(),
              "are too long for 3 thread blocks"));
    longest.max_sms = 0;
    ++longest.row_count;
    CHECK(Has(MakeRowArgs(longest, DType::kF32, 2 * longest.row_count, longest.row_count, 4).status(),
              "are too long for 4 thread blocks"));
    spec.algorithm = "hierarchical";
    CHECK(made(spec, DType::kF32, kCapacity * kRow, kTokens * kRow).ok());  // "direct"
    const auto between = [&](Collective collective, const char* algorithm) {
      CallSpec of_nodes = RowSpec(collective);
      of_nodes.algorithm = algorithm;
      return MakeCallProgram(of_nodes, DType::kF32, kTokens * kRow, kCapacity * kRow, {0, 1}, 4).status();
    };
    CHECK(between(Collective::kDispatch, "hierarchical").ok() && between(Collective::kCombine, "hierarchical").ok());
    // XLA's own collective does not raise.
    const char* const advice = "pass algorithm=\"xla\", and on_overflow=\"drop\" to moe.route";
    // Without a name, Python has taken the GPUs for one node.
    for (const char* const algorithm : {"", "direct"}) {
      CHECK(Has(between(Collective::kCombine, algorithm), "runs inside a node of GPUs"));
      CHECK(Has(between(Collective::kCombine, algorithm), advice));
    }
    spec.algorithm = "hierarchical";
    spec.collective = Collective::kDispatch;
    CHECK(made(spec, DType::kF32, kTokens * kRow, kCapacity * kRow).ok());  // "direct"
    spec = RowSpec(Collective::kDispatch);
    spec.num_experts = 1 << 20;
    CHECK(Has(made(spec, DType::kF32, kTokens * kRow, kCapacity * kRow),
              "exceed the shared memory of jaxcomm's kernels"));
    spec = RowSpec(Collective::kDispatch);
    CHECK(made(spec, DType::kF32, 0, 0).ok());  // no rows: no kernel
    CHECK(Has(made(RowSpec(Collective::kCombine), DType::kF32, kCapacity * kRow, rank.rank == 0 ? kRow : 0),
              "the hash of the shapes of the rows"));
    const int64_t tokens = kTokens + rank.rank;
    CHECK(Has(made(spec, DType::kF32, tokens * kRow, kCapacity * kRow), "the hash of the shapes of the rows"));
    CHECK(Has(made(spec, DType::kF32, kTokens * kRow, tokens * kRow), "the hash of the shapes of the rows"));
    const DType dtype = rank.rank == 0 ? DType::kF32 : DType::kF16;
    CHECK(Has(made(spec, dtype, kTokens * kRow, kCapacity * kRow), "the hash of the shapes of the rows"));
    spec.choices = 1 + rank.rank;
    CHECK(Has(made(spec, DType::kF32, kTokens * kRow, kCapacity * kRow), "the hash of the shapes of the rows"));
    spec.choices = kChoices;
    spec.row_count = 1024;  // 32 KiB for each rank: the rows of 16 choices in all
    CHECK(ValueOf(MakeRowArgs(spec, DType::kF32, 8 * 1024, 1024, 32)).num_channels == 2);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
