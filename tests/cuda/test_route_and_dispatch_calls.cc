// route_and_dispatch as XLA calls it: attributes, stages, operands, a CUDA graph whose ids change from replay to
// replay, calls of other shapes on the same arena, ids that are refused, and calls that GPUs refuse.
#include "fakes/machine.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/cuda/xla/route_and_dispatch_call.h"
#include "fakes/virtual_route_and_dispatch.h"
#include "fakes/xla_fake.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr int kRanks = 2;
constexpr float kUnset = -1;

struct Shape {
  int32_t tokens = 3, choices = 2, experts = 4, capacity = 16, row = 5, align = 1, slots = 0;
};

// One of two routings.
Routed RoutingOf(const Shape& shape, int32_t run) {
  std::vector<std::vector<int32_t>> ids(kRanks);
  for (int32_t r = 0; r < kRanks; ++r) {
    for (int32_t c = 0; c < shape.tokens * shape.choices; ++c) {
      ids[r].push_back((7 * c + 3 * r + run % 2 * (c + 2)) % (shape.experts + 1) - 1);
    }
  }
  Routed routed = Route(kRanks, shape.tokens, shape.choices, shape.experts, 1, 0, 0, ids);
  CHECK(routed.capacity <= shape.capacity);
  routed.capacity = shape.capacity;
  return routed;
}

// A call on one device, with XLA's arrays, which keep their addresses.
struct Site : CallOnDevice {
  Site(Rank& of, Stream& on, const Shape& shape = {}) : rank(of), shape(shape) {
    device = rank.device();
    stream = on.handle();
    nccl_comm = &rank;
    state_type = &RouteAndDispatchState::id;
    x.resize(shape.tokens * shape.row);
    rows.resize(shape.capacity * shape.row, kUnset);
    ids.resize(shape.tokens * shape.choices);
    sizes = ShapeOf(RoutingOf(shape, 0), 1, 0, shape.row * 4);
    fields = UnwrittenFields(sizes, kRanks);
  }

  Attributes AttributesOf() const {
    Attributes call, all;
    const auto add = [](Attributes& to, const char* name, int64_t value) {
      to.AddScalar(name, XLA_FFI_DataType_S64, value);
    };
    call.AddText("algorithm", "");
    add(call, "group_size", kRanks);
    add(call, "max_sms", max_sms);
    call.AddText("op", "moe.route_and_dispatch");
    add(call, "ranks_per_node", kRanks);
    call.AddText("site", "here.py:1");
    add(all, "align", shape.align);
    all.AddDictionary("call", call);
    add(all, "capacity", shape.capacity);
    add(all, "choices", shape.choices);
    all.AddArray("groups", std::vector<int64_t>{0, 1});
    add(all, "num_experts", shape.experts);
    add(all, "slots", shape.slots);
    add(all, "tokens", shape.tokens);
    return all;
  }
  std::string Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
    const std::vector<int64_t> choices = {shape.tokens, shape.choices}, local = {shape.experts / kRanks};
    std::vector<Array> args = {
        {&number, {}}, {ids.data(), choices}, {x.data(), {shape.tokens, shape.row}, XLA_FFI_DataType_F32}};
    std::vector<Array> rets = {{fields.slot.data(), choices},
                               {fields.expert.data(), choices},
                               {fields.group_sizes.data(), local},
                               {fields.group_counts.data(), local},
                               {fields.demand.data(), {}},
                               {fields.dropped.data(), {}},
                               {fields.table.data(), {kRanks, shape.experts}},
                               {rows.data(), {shape.capacity, shape.row}, XLA_FFI_DataType_F32}};
    if (change) change(args, rets);
    return Invoke(handler, stage, *this, AttributesOf(), XLA_FFI_DataType_S32, args, rets);
  }
  std::string Instantiate() { return Run(&CudaRouteAndDispatchInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE); }
  std::string Prepare() { return Run(&CudaRouteAndDispatchPrepare, XLA_FFI_ExecutionStage_PREPARE); }
  std::string Initialize() { return Run(&CudaRouteAndDispatchInitialize, XLA_FFI_ExecutionStage_INITIALIZE); }
  std::string Execute() { return Run(&CudaRouteAndDispatchExecute, XLA_FFI_ExecutionStage_EXECUTE); }
  // All stages before Execute.
  std::string Begin() {
    for (const std::string& error : {Instantiate(), Prepare(), Initialize()}) {
      if (!error.empty()) return error;
    }
    return "";
  }

  std::vector<Bytes> Payloads(int32_t run) const { return FloatPayloads(kRanks, shape.tokens, shape.row, run); }
  void Fill(int32_t run) {
    const Routed routed = RoutingOf(shape, run);
    std::copy(routed.expert[rank.rank].begin(), routed.expert[rank.rank].end(), ids.begin());
    const Bytes own = Payloads(run)[rank.rank];
    std::memcpy(x.data(), own.data(), own.size());
    std::fill(rows.begin(), rows.end(), kUnset);
    const MoeFields unwritten = UnwrittenFields(sizes, kRanks);
    std::copy(unwritten.slot.begin(), unwritten.slot.end(), fields.slot.begin());
    std::copy(unwritten.table.begin(), unwritten.table.end(), fields.table.begin());
  }
  void Check(int32_t run) const {
    const Routed routed = RoutingOf(shape, run);
    CHECK(fields == FieldsOf(routed, sizes, rank.rank));
    const Bytes expected = Dispatched(routed, Payloads(run), sizes.row_bytes)[rank.rank];
    CHECK(std::memcmp(rows.data(), expected.data(), expected.size()) == 0);
  }

  Rank& rank;
  const Shape shape;
  int64_t max_sms = 0;
  void (*change)(std::vector<Array>& args, std::vector<Array>& rets) = nullptr;
  int32_t number = 0;  // the rank, which is not read
  RouteAndDispatchShape sizes;
  MoeFields fields;
  std::vector<int32_t> ids;
  std::vector<float> x, rows;
};

// body(rank, stream, site) on each rank of the world.
template <typename Body>
void OnSites(World& world, const Body& body) {
  OnRanks(world, [&](Rank& rank) {
    rank.number = rank.rank;
    Stream stream;
    Site site(rank, stream);
    body(rank, stream, site);
  });
}

ALONE_TEST_CASE("calls of two shapes in a CUDA graph, with ids that change from replay to replay") {
  Communicator::Configure(20, 4);
  OnSites(*new World(kRanks), [](Rank& rank, Stream& stream, Site& first) {
    Shape other;
    other.tokens = 1, other.choices = 3, other.experts = 2, other.capacity = 6, other.row = 70;
    Site second(rank, stream, other);
    const std::vector<Site*> sites = {&first, &second};
    for (Site* site : sites) CHECK(site->Begin().empty());
    RunAndReplay(
        sites, stream,
        [&](int32_t run) {
          for (Site* site : sites) site->Fill(run);
        },
        [&](int32_t run) {
          for (const Site* site : sites) site->Check(run);
        });
  });
}

ALONE_TEST_CASE("an id that no expert has: the next call of every rank raises") {
  Communicator::Configure(20, 4);
  OnSites(*new World(kRanks), [](Rank& rank, Stream& stream, Site& site) {
    CHECK(site.Begin().empty());
    site.Fill(0);
    if (rank.rank == 0) site.ids[0] = 4;
    CHECK(site.Execute().empty());
    fake::Wait(stream.handle());
    CHECK(std::all_of(site.rows.begin(), site.rows.end(), [](float row) { return row == kUnset; }));
    CHECK(site.fields == EmptyFields(site.sizes, kRanks));
    site.run = 1;
    const std::string said = site.Execute();
    CHECK(Has(said, "can't run, since a call before it failed: moe.route_and_dispatch at here.py:1"));
    CHECK(Has(said, "rank 0 has 1 expert ids that are not below num_experts=4"));
  });
}

ALONE_TEST_CASE("calls that GPUs refuse") {
  Communicator::Configure(20, 4);
  OnSites(*new World(kRanks), [](Rank& rank, Stream& stream, Site& site) {
    CHECK(site.Instantiate().empty() && site.Prepare().empty());
    CHECK(Has(site.Execute(), "XLA has not initialized the call on GPU"));
    const char* const sizes = "the sizes of operands and results do not fit the attributes";
    using Arrays = std::vector<Array>;
    const std::pair<const char*, void (*)(Arrays&, Arrays&)> table[] = {
        {"unexpected number of operands or results", [](Arrays&, Arrays& rets) { rets.pop_back(); }},
        {"ids of 32 bits", [](Arrays& args, Arrays&) { args[1].dtype = XLA_FFI_DataType_S64; }},
        {"the routing must have integers of 32 bits",
         [](Arrays&, Arrays& rets) { rets[0].dtype = XLA_FFI_DataType_S64; }},
        {sizes, [](Arrays& args, Arrays&) { --args[1].dims[0]; }},
        {sizes, [](Arrays& args, Arrays&) { --args[2].dims[1]; }},
        {sizes, [](Arrays&, Arrays& rets) { --rets[6].dims[1]; }},
        {sizes, [](Arrays&, Arrays& rets) { --rets[7].dims[0]; }}};
    for (const auto& [text, change] : table) {
      site.change = change;
      CHECK(Has(site.Initialize(), text));
    }
    // Different shapes on the ranks.
    for (const auto& [field, change] : {std::pair{&Shape::tokens, 1},
                                        {&Shape::choices, 1},
                                        {&Shape::experts, 2},
                                        {&Shape::capacity, 1},
                                        {&Shape::row, 1},
                                        {&Shape::align, 3},
                                        {&Shape::slots, 8}}) {
      Shape shape;
      shape.*field += rank.rank * change;
      Site uneven(rank, stream, shape);
      CHECK(uneven.Begin().empty());
      CHECK(Has(uneven.Execute(), "the hash of the shapes must be the same on all ranks"));
    }
    // Different limits on thread blocks.
    Site limited(rank, stream);
    limited.max_sms = 1 + rank.rank;
    CHECK(limited.Begin().empty());
    CHECK(Has(limited.Execute(), "make this call with different shapes, types or arguments"));
    // More than the kernel takes: on one rank, and on all.
    for (const bool all : {false, true}) {
      Shape large;
      if (all || rank.rank == 1) large.experts = 40'000, large.capacity = 12;
      Site one(rank, stream, large);
      CHECK(one.Begin().empty());
      const std::string said = one.Execute();
      CHECK(Has(said, all || rank.rank == 1 ? "too large for one exchange of LL messages" : "rank 1 of the group"));
    }
    CHECK(rank.made != nullptr);
  });
}

ALONE_TEST_CASE("GPUs of several nodes") {
  Communicator::Configure(20, 4);
  auto* world = new World(kRanks);
  world->num_lsa_teams = 2;
  world->gin = NCCL_GIN_TYPE_PROXY;
  OnSites(*world, [](Rank&, Stream&, Site& site) {
    CHECK(site.Begin().empty());
    const std::string said = site.Execute();
    CHECK(Has(said, "moe.route_and_dispatch runs inside a node on GPUs; the GPUs of this group form 2 nodes"));
    CHECK(Has(said, "pass algorithm=\"xla\" and on_overflow=\"drop\""));
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
