// The kernel of route_and_dispatch, emulated: long series of calls of all shapes on one arena, with random ids, ranks
// that begin late, and thread blocks that run ahead. Routing and rows are compared with their definition. Wrong ids end
// on all ranks before a slot is written.
#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/drawn_rows.h"
#include "fakes/node_group.h"
#include "fakes/seed.h"
#include "fakes/virtual_route_and_dispatch.h"

namespace jaxcomm {
namespace cuda {
namespace {

using Ids = std::vector<std::vector<int32_t>>;  // by rank

struct Group : NodeGroup {
  Group(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs)
      : NodeGroup(n, num_channels, timeout_ns, 4 << 20) {}
};

// A call of all ranks. Threads of the kernel bring x, take y away and spoil x, as XLA's kernels do.
struct Drawn {
  Routed routed;
  RouteAndDispatchShape shape;
  std::vector<RouteAndDispatchArgs> args;  // by rank
  std::vector<MoeFields> fields;
  std::vector<Bytes> x, y;     // brought and taken
  std::vector<uint64_t> late;  // polls before the call begins

  int32_t NumChannels() const { return args[0].num_channels; }
};

// The buffers of a call. `channels`: as many as the row has pieces of 128 bytes, at most this number.
void Prepare(Group& group, Drawn& drawn, const Ids& ids, int32_t channels, int64_t shift, std::mt19937_64& random) {
  CallSpec spec;
  spec.group_size = group.n;
  const StatusOr<RouteAndDispatchArgs> made = MakeRouteAndDispatchArgs(spec, drawn.shape, group.num_channels);
  CHECK(made.ok());
  const int64_t x_bytes = drawn.shape.tokens * drawn.shape.row_bytes;
  const int64_t y_bytes = drawn.shape.capacity * drawn.shape.row_bytes;
  drawn.fields.assign(group.n, UnwrittenFields(drawn.shape, group.n));
  for (int32_t r = 0; r < group.n; ++r) {
    RouteAndDispatchArgs args = *made;
    SpreadOver(channels, args);
    CHECK(ArenaBytes(args) <= group.arena.stride);
    args = WithComm(args, group.CommOf(r));
    static_cast<RouteAndDispatchBuffers&>(args) = BuffersOf(drawn.fields[r]);
    args.ids = group.memory.Upload(ids[r]);
    args.x = group.memory.Take(x_bytes + shift) + shift;
    args.y = group.memory.Take(y_bytes + shift) + shift;
    drawn.args.push_back(args);
    drawn.x.emplace_back(x_bytes);
    for (char& byte : drawn.x.back()) byte = static_cast<char>(random());
    drawn.y.emplace_back(y_bytes);
    drawn.late.push_back(random() % 4 == 0 ? random() % 300 : 0);
  }
}

// Rank `missing` never begins.
void Launch(const std::vector<Drawn*>& calls, const Group& group, unsigned threads, uint64_t seed,
            int32_t missing = -1) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(group.n);
  for (const Drawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RouteAndDispatchSharedBytes(drawn->args[0])));
  }
  const auto run = [&] {
    RunInOrder(calls, ended, missing, [](Drawn& drawn, int32_t rank, int32_t channel) {
      const RouteAndDispatchArgs& args = drawn.args[rank];
      RunAndSpoil(args, channel, drawn.x[rank], drawn.y[rank],
                  [&] { RouteAndDispatchCall(args, channel, device::DynamicShared()).Run(); });
    });
  };
  emulation::Launch(group.num_channels, group.n, threads, seed, run, shared);
}

void CheckDrawn(const Group& group, const Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = Dispatched(drawn.routed, drawn.x, drawn.shape.row_bytes);
  for (int32_t r = 0; r < group.n; ++r) {
    const bool same = expected[r] == drawn.y[r] && drawn.fields[r] == FieldsOf(drawn.routed, drawn.shape, r);
    CheckRank(same, group.report(r), std::to_string(group.n) + " ranks", r, seed, place);
  }
}

int num_calls = 0;

Drawn DrawCall(Group& group, std::mt19937_64& random) {
  Drawn drawn;
  const int32_t n = group.n, experts = n * (1 + static_cast<int32_t>(random() % 3));
  const int32_t token_counts[] = {1, 1, 3, 8, 19}, choice_counts[] = {1, 2, 3, 9};
  const int32_t tokens = token_counts[random() % 5], choices = choice_counts[random() % 4];
  const int32_t slots = random() % 4 == 0 ? n * tokens * choices + 1 : 0;
  const int32_t align = random() % 2 == 0 || slots > 0 ? 1 : 4;
  const int64_t row_bytes[] = {1, 2, 7, 8, 24, 130, 256, 300, 392};
  const Ids ids = DrawIds(n, tokens, choices, experts, random, 7);
  const int32_t spare = slots > 0 ? 0 : static_cast<int32_t>(random() % 7);
  drawn.routed = Route(n, tokens, choices, experts, align, slots, spare, ids);
  drawn.routed.capacity = std::max(drawn.routed.capacity, 1);
  drawn.shape = ShapeOf(drawn.routed, align, slots, row_bytes[random() % 9]);
  const int64_t shifts[] = {0, 0, 1, 2, 4, 8};
  Prepare(group, drawn, ids, 1 + static_cast<int32_t>(random() % group.num_channels), shifts[random() % 6], random);
  ++num_calls;
  return drawn;
}

void RunSeries(uint64_t seed, int32_t n, int length) {
  std::mt19937_64 random(seed);
  Group group(n, 1 + static_cast<int32_t>(random() % 3));
  std::vector<Drawn> series;
  for (int i = 0; i < length; ++i) series.push_back(DrawCall(group, random));
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 4, 8};
  Launch(calls, group, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(group, series[i], seed, i);
}

TEST_CASE("calls of all shapes on one arena") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 20; ++seed) {
    for (const int32_t n : {1, 2, 3, 5, 8}) RunSeries(seed, n, 5);
  }
  CHECK(num_calls == 500);
}

TEST_CASE("many series [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1300; ++seed) {
    for (const int32_t n : {1, 2, 3, 4, 8}) RunSeries(seed, n, 8);
  }
}

// A call of two ranks, two experts each, five tokens, rows of three pieces.
Drawn Small(Group& group, uint64_t seed, int32_t align = 4, int32_t slots = 0, int32_t unknown = 0,
            int32_t first_id = 0) {
  std::mt19937_64 random(seed);
  Drawn drawn;
  Ids ids = {{first_id, 0, 2, 3, 1, 3, 0, 2, 2, 3}, {3, 0, 2, 0, 1, 2, 0, 3, 0, 1}};
  drawn.routed = Route(2, 5, 2, 4, align, slots, 0, ids);
  drawn.shape = ShapeOf(drawn.routed, align, slots, 320);
  for (int32_t i = 0; i < unknown; ++i) ids[1][3 * i] = 4;
  Prepare(group, drawn, ids, group.num_channels, 0, random);
  return drawn;
}

// Runs the calls one after the other, from exchange number `epoch` on, with flags in all slots: flag(set).
template <typename Flag>
void RunFrom(Group& group, std::vector<Drawn>& series, uint64_t epoch, unsigned threads, uint64_t seed, Flag flag) {
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  for (int32_t r = 0; r < group.n; ++r) {
    const device::LlSlots& slots = series[0].args[r].comm.ll_slots;
    std::fill_n(slots.epochs, group.num_channels, epoch - 1);
    auto* const lines = slots.pad.At<device::LlLine>(r);
    for (int64_t i = 0; i < int64_t{4} * slots.num_units; ++i) {
      lines[i].halves[0] = lines[i].halves[1] = flag(i / (2 * slots.num_units)) << 32 | 0x5c5c;
    }
  }
  Launch(calls, group, threads, seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(group, series[i], seed, i);
  for (int32_t c = 0; c < group.num_channels; ++c) {
    CHECK(series[0].args[1].comm.ll_slots.epochs[c] == epoch + series.size() - 1);
  }
}

// Flags repeat after 2^32 exchanges: flags of that age must be gone, also where only calls of other shapes look.
TEST_CASE("flags that repeat") {
  constexpr uint64_t kSwept = device::kExchangesBetweenSweeps / 2;
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 6; ++seed) {
    Group group(2, 3);
    std::mt19937_64 random(seed);
    // Exchanges kSwept - 2 .. kSwept + 5. The third and the fourth are swept. The flags of the last two are there. All
    // others have few slots, and send no row.
    std::vector<Drawn> series;
    for (uint64_t i = 0; i < 6; ++i) {
      const Ids ids = {{0}, {1}};
      Drawn drawn;
      drawn.routed = Route(2, 1, 1, 2, 1, 0, 0, ids);
      drawn.shape = ShapeOf(drawn.routed, 1, 0, 130);
      Prepare(group, drawn, ids, 1 + static_cast<int32_t>(seed % 3), 0, random);
      series.push_back(std::move(drawn));
    }
    for (int i = 0; i < 2; ++i) series.push_back(Small(group, seed));
    RunFrom(group, series, kSwept - 2, 8, seed, [](uint64_t set) { return kSwept + 4 + set; });
  }
}

TEST_CASE("epochs beyond 32 bits") {
  Group group(2, 2);
  std::vector<Drawn> series;
  for (uint64_t i = 0; i < 5; ++i) series.push_back(Small(group, i));
  RunFrom(group, series, (uint64_t{1} << 32) - 2, 4, 1, [](uint64_t) { return uint64_t{99}; });  // as sweeps leave them
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Both ranks report `step` about `peer`, no slot is written, and the next call does not run.
void CheckRefused(Group& group, Drawn& drawn, int32_t step, int32_t peer, int64_t expected, int64_t seen,
                  const std::string& text) {
  for (uint64_t seed = 1; seed < 6; ++seed) {
    Drawn next = Small(group, 7);
    const bool first = seed == 1;
    Launch(first ? std::vector<Drawn*>{&drawn, &next} : std::vector<Drawn*>{&next}, group, 4, seed);
    for (int32_t r = 0; r < 2; ++r) {
      const device::Report& report = group.report(r);
      CHECK(report.state == device::Report::kComplete && report.rank == r);
      CHECK(report.step == step && report.peer == peer);
      CHECK(static_cast<int64_t>(report.expected) == expected && static_cast<int64_t>(report.seen) == seen);
      for (const Drawn* call : {&drawn, &next}) {
        CHECK(std::all_of(call->y[r].begin(), call->y[r].end(), [](char byte) { return byte == kUnwritten; }));
        CHECK(call->fields[r] == EmptyFields(call->shape, 2));
      }
    }
  }
  CHECK(Has(FailureText(group.report(0), "moe.route_and_dispatch at f.py:3", 30), text));
}

TEST_CASE("a rank with more rows than slots") {
  Group group(2, 3);
  Drawn drawn = Small(group, 1);
  const int32_t demand = FieldsOf(drawn.routed, drawn.shape, 1).demand[0];
  CHECK(demand == drawn.routed.capacity && demand > FieldsOf(drawn.routed, drawn.shape, 0).demand[0] + 1);
  for (RouteAndDispatchArgs& args : drawn.args)
    args.capacity = demand - 1;  // the padding of the last group does not fit
  CheckRefused(group, drawn, kTooManyRows, 1, demand, demand - 1, "rank 1 gets more rows");
}

TEST_CASE("an expert with more rows than slots") {
  Group group(2, 2);
  Drawn drawn = Small(group, 1, 1, 7);
  const int32_t rows = FieldsOf(drawn.routed, drawn.shape, 0).group_counts[0];
  CHECK(rows == 7);
  for (RouteAndDispatchArgs& args : drawn.args) args.slots = 5, args.capacity = 10;
  CheckRefused(group, drawn, kTooManyRowsOfExpert, 0, rows, 5, "an expert of rank 0 gets 7 rows");
}

TEST_CASE("ids of experts that do not exist") {
  for (const int32_t unknown : {1, 4}) {
    Group group(2, 2);
    Drawn drawn = Small(group, 1, 4, 0, unknown);
    for (RouteAndDispatchArgs& args : drawn.args) args.capacity = 1;  // and too few slots
    CheckRefused(group, drawn, kUnknownExperts, 1, unknown, 4,
                 "rank 1 has " + std::to_string(unknown) + " expert ids that are not below num_experts=4");
  }
}

TEST_CASE("ids outside of 16 bits are unknown or none") {
  Group group(2, 2);
  Drawn drawn = Small(group, 1);
  const_cast<int32_t*>(drawn.args[0].ids)[0] = 65536;
  CheckRefused(group, drawn, kUnknownExperts, 0, 1, 4, "rank 0 has 1 expert ids");
  Group other(2, 2);
  Drawn none = Small(other, 1, 4, 0, 0, -1);
  const_cast<int32_t*>(none.args[0].ids)[0] = -65536;
  Launch({&none}, other, 4, 1);
  CheckDrawn(other, none, 1, 0);
}

TEST_CASE("a rank that does not arrive") {
  constexpr uint64_t kTimeoutNs = 20'000'000;
  for (const int32_t missing : {0, 1}) {
    Group group(2, 2, kTimeoutNs);
    Drawn before = Small(group, 1), drawn = Small(group, 2), next = Small(group, 3);
    Launch({&before}, group, 4, 1);
    CheckDrawn(group, before, 1, 0);
    const uint64_t begin = emulation::NowNs();
    Launch({&drawn, &next}, group, 4, 1, missing);
    CHECK(emulation::NowNs() - begin >= kTimeoutNs && emulation::NowNs() - begin < 2 * kTimeoutNs);
    const int32_t r = 1 - missing;
    const device::Report& report = group.report(r);
    CHECK(report.state == device::Report::kComplete && report.step == kLlExchange && report.peer == missing);
    CHECK(report.expected == 2 && report.seen == 1);
    for (const Drawn* call : {&drawn, &next}) CHECK(call->fields[r] == EmptyFields(call->shape, 2));
  }
}

TEST_CASE("sizes that the kernel does not take") {
  CallSpec spec;
  spec.group_size = 8;
  RouteAndDispatchShape shape;
  shape.tokens = 32, shape.choices = 8, shape.num_experts = 256, shape.capacity = 2048, shape.row_bytes = 14336;
  const StatusOr<RouteAndDispatchArgs> args = MakeRouteAndDispatchArgs(spec, shape, 32);
  CHECK(args.ok() && args->num_channels == 28 && args->piece_bytes == 512);
  CHECK(RouteAndDispatchSharedBytes(*args) == 8 * 256 * 4 + (8 * 257 + 3 * 256) * 4);
  CHECK(ArenaBytes(*args) == 256 + int64_t{2} * 8 * 28 * (64 + 32 * 64) * 16);
  spec.max_sms = 3;
  const StatusOr<RouteAndDispatchArgs> limited = MakeRouteAndDispatchArgs(spec, shape, 32);
  CHECK(limited->num_channels == 3 && limited->num_epochs == 32);  // the arena is that of calls without a limit
  spec.max_sms = 0;
  using Of = RouteAndDispatchShape;
  const char* const unfit = "do not fit each other";
  const char* const large = "too large for one exchange";  // the arena, or with 37 choices shared memory
  for (const auto& [field, value, text] : std::initializer_list<std::tuple<int64_t Of::*, int64_t, const char*>>{
           {&Of::tokens, 0, unfit},
           {&Of::choices, 0, unfit},
           {&Of::capacity, 0, unfit},
           {&Of::align, 0, unfit},
           {&Of::row_bytes, 0, unfit},
           {&Of::num_experts, 255, unfit},
           {&Of::slots, 65, unfit},
           {&Of::capacity, int64_t{1} << 31, unfit},
           {&Of::num_experts, 32768, large},
           {&Of::choices, 37, large},
           {&Of::choices, 36, ""},
           {&Of::row_bytes, int64_t{64} << 10, large},
           {&Of::row_bytes, int64_t{62} << 10, ""}}) {
    RouteAndDispatchShape other = shape;
    other.*field = value;
    const Status status = MakeRouteAndDispatchArgs(spec, other, 32).status();
    CHECK(status.ok() == (*text == 0) && Has(status.message(), text));
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
