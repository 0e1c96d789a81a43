// The kernel of all_to_all_v, emulated: long series of calls of all sizes on one arena, with random tables, ranks that
// begin late, and thread blocks that run ahead. Results are compared with the definition. Wrong tables end on all ranks
// before a row moves.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cuda/kernels/slices.cuh"
#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/drawn_rows.h"
#include "fakes/node_group.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

int num_calls = 0, num_read = 0, num_put = 0;
constexpr BulkStages kBulk = {4, 64};

// A call of all ranks.
struct Drawn {
  int32_t n = 1, per_pair = 1;
  int64_t row_bytes = 1, input_rows = 0, output_rows = 0;
  int64_t first_x = 0, first_y = 0;  // rows before the memory that x and y have
  std::vector<int64_t> table;        // (n, 4, per_rank)
  std::vector<Bytes> x, start;       // by rank: the operand, and the result before the call
  std::vector<SliceArgs> args;       // by rank
  std::vector<uint64_t> late;        // by rank: polls before the call begins

  int32_t NumChannels() const { return args[0].num_channels; }
  int32_t per_rank() const { return n * per_pair; }
  // 0: input_offsets, 1: send_sizes, 2: output_offsets, 3: recv_sizes
  int64_t& At(int32_t rank, int32_t vector, int32_t peer, int32_t i) {
    return table[(rank * 4 + vector) * per_rank() + peer * per_pair + i];
  }
};

// Random sizes and input offsets. Output offsets are packed in the order of senders, of slices, or at random.
void DrawTable(Drawn& drawn, std::mt19937_64& random) {
  const int32_t n = drawn.n, per_pair = drawn.per_pair;
  const uint64_t kind = random() % 6, order = random() % 3;
  const auto hot = static_cast<int32_t>(random() % n);
  // Up to four stripes, which several channels share.
  const int64_t longest = std::max<int64_t>((random() % 3 == 0 ? 12000 : 3000) / drawn.row_bytes, 2);
  drawn.table.assign(size_t(n) * 4 * drawn.per_rank(), 0);
  for (int32_t from = 0; from < n; ++from) {
    for (int32_t to = 0; to < n; ++to) {
      for (int32_t i = 0; i < per_pair; ++i) {
        auto size = static_cast<int64_t>(random() % (longest + 1));
        if (kind == 1) size = 1;
        if (kind == 2) size = to == hot ? size : 0;    // all to one
        if (kind == 3) size = from == hot ? size : 0;  // one to all
        if (kind == 4) size = 0;
        if (random() % 4 == 0) size = 0;
        drawn.At(from, 1, to, i) = drawn.At(to, 3, from, i) = size;
        drawn.input_rows = std::max(drawn.input_rows, size);
      }
    }
  }
  drawn.input_rows += static_cast<int64_t>(random() % 5);
  if (random() % 2 == 0) drawn.input_rows *= 2 * n * per_pair;  // more rows than the output has: peers put
  for (int32_t to = 0; to < n; ++to) {
    std::vector<std::pair<int32_t, int32_t>> arriving;
    for (int32_t k = 0; k < n * per_pair; ++k) {
      arriving.emplace_back(order == 1 ? k % n : k / per_pair, order == 1 ? k / n : k % per_pair);
    }
    if (order == 2) std::shuffle(arriving.begin(), arriving.end(), random);
    int64_t row = 0;
    for (const auto& [from, i] : arriving) {
      row += static_cast<int64_t>(random() % 3);  // a gap
      const int64_t size = drawn.At(from, 1, to, i);
      drawn.At(from, 2, to, i) = size > 0 ? row : static_cast<int64_t>(random() % 2000) - 1000;
      // Slices of the operand may overlap.
      drawn.At(from, 0, to, i) =
          size > 0 ? static_cast<int64_t>(random() % (drawn.input_rows - size + 1)) : int64_t{1} << 30;
      row += size;
    }
    drawn.output_rows = std::max(drawn.output_rows, row);
  }
  drawn.output_rows += static_cast<int64_t>(random() % 3);
}

// Copies the table to the memory of every rank.
void SetTable(NodeGroup& group, Drawn& drawn, bool wide) {
  const std::vector<int32_t> narrow(drawn.table.begin(), drawn.table.end());
  for (SliceArgs& args : drawn.args) {
    RowOperands operands;
    operands.table = wide ? static_cast<const void*>(group.memory.Upload(drawn.table)) : group.memory.Upload(narrow);
    operands.table_count = static_cast<int64_t>(drawn.table.size());
    operands.int64_table = wide;
    const StatusOr<SliceArgs> whole = WithBuffers(args, args.x, args.y, operands);
    CHECK(whole.ok());
    args = *whole;
  }
}

void Prepare(NodeGroup& group, Drawn& drawn, int32_t num_channels, int64_t x_shift, int64_t y_shift, bool wide,
             std::mt19937_64& random, bool bulk = false) {
  CallSpec spec;
  spec.collective = Collective::kAllToAllV;
  spec.group_size = group.n;
  spec.row_count = drawn.row_bytes;
  const int64_t x_bytes = drawn.input_rows * drawn.row_bytes, y_bytes = drawn.output_rows * drawn.row_bytes;
  for (int32_t r = 0; r < group.n; ++r) {
    const StatusOr<SliceArgs> made = MakeSliceArgs(spec, DType::kU8, x_bytes, y_bytes, num_channels);
    CHECK(made.ok());
    SliceArgs args = *made;
    args.num_channels = num_channels;  // as if there were enough bytes for all channels
    if (bulk) args.bulk = kBulk;
    args.comm = group.CommOf(r);
    args.x = group.memory.Take(x_bytes + x_shift) + x_shift;
    args.y = group.memory.Take(y_bytes + y_shift) + y_shift;
    CHECK(ArenaBytes(args) <= kArenaBytes);
    ++(Reads(args) ? num_read : num_put);
    drawn.args.push_back(args);
    const auto fill = [&](char* to, int64_t bytes) {
      for (int64_t i = 0; i < bytes; ++i) to[i] = static_cast<char>(random());
      return Bytes(to, to + bytes);
    };
    drawn.x.push_back(fill(const_cast<char*>(args.x), x_bytes));
    drawn.start.push_back(fill(args.y, y_bytes));
    drawn.late.push_back(random() % 4 == 0 ? random() % 200 : 0);
  }
  SetTable(group, drawn, wide);
}

// Rank `missing` never begins.
void Launch(const std::vector<Drawn*>& calls, const NodeGroup& group, unsigned threads, uint64_t seed,
            int32_t missing = -1) {
  std::vector<std::atomic<int32_t>> ended(group.n);  // thread blocks
  const auto run = [&] {
    RunInOrder(calls, ended, missing, [](Drawn& drawn, int32_t rank, int32_t channel) {
      SliceCall(drawn.args[rank], channel, device::DynamicShared()).Run();
    });
  };
  emulation::Launch(group.num_channels, group.n, threads, seed, run,
                    static_cast<size_t>(SliceSharedBytes(static_cast<int32_t>(threads), kBulk)));
}

// By the definition.
std::vector<Bytes> Exchanged(Drawn& drawn) {
  std::vector<Bytes> y = drawn.start;
  for (int32_t from = 0; from < drawn.n; ++from) {
    for (int32_t to = 0; to < drawn.n; ++to) {
      for (int32_t i = 0; i < drawn.per_pair; ++i) {
        const int64_t size = drawn.At(from, 1, to, i);
        if (size == 0) continue;
        std::copy_n(drawn.x[from].begin() + (drawn.At(from, 0, to, i) - drawn.first_x) * drawn.row_bytes,
                    size * drawn.row_bytes,
                    y[to].begin() + (drawn.At(from, 2, to, i) - drawn.first_y) * drawn.row_bytes);
      }
    }
  }
  return y;
}

void CheckDrawn(const NodeGroup& group, Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = Exchanged(drawn);
  for (int32_t r = 0; r < group.n; ++r) {
    const char* const begin = drawn.args[r].y + drawn.first_y * drawn.row_bytes;
    const bool same = std::memcmp(expected[r].data(), begin, expected[r].size()) == 0;
    CheckRank(same, group.report(r), std::to_string(group.n) + " ranks", r, seed, place);
  }
}

Drawn DrawCall(NodeGroup& group, std::mt19937_64& random) {
  Drawn drawn;
  drawn.n = group.n;
  drawn.per_pair = 1 + static_cast<int32_t>(random() % 3);
  constexpr int64_t kRowBytes[] = {1, 2, 7, 16, 33, 48, 100, 640};
  drawn.row_bytes = kRowBytes[random() % 8];
  DrawTable(drawn, random);
  const auto shift = [&] { return random() % 3 == 0 ? static_cast<int64_t>(random() % 16) : 0; };
  const int64_t x_shift = shift(), y_shift = shift();
  Prepare(group, drawn, 1 + static_cast<int32_t>(random() % group.num_channels), x_shift, y_shift, random() % 2 == 0,
          random, num_calls % 3 != 0);
  ++num_calls;
  return drawn;
}

void RunSeries(uint64_t seed, int32_t n, int length) {
  std::mt19937_64 random(seed);
  NodeGroup group(n, 1 + static_cast<int32_t>(random() % 5));
  std::vector<Drawn> series;
  for (int i = 0; i < length; ++i) series.push_back(DrawCall(group, random));
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 8, 40};
  Launch(calls, group, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(group, series[i], seed, i);
}

TEST_CASE("random tables in long series on one arena") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 20; ++seed) {
    for (const int32_t n : {1, 2, 3, 5}) RunSeries(seed, n, 4);
  }
  RunSeries(FirstSeed(), 8, 4);
  CHECK(num_calls == 324 && num_read > 300 && num_put > 300);
}

TEST_CASE("many series [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1300; ++seed) {
    for (const int32_t n : {1, 2, 3, 4, 8}) RunSeries(seed, n, 6);
  }
}

// Three ranks, two slices per pair, five rows each, one after the other.
Drawn Small(NodeGroup& group, bool wide, uint64_t seed) {
  std::mt19937_64 random(seed);
  Drawn drawn;
  drawn.n = 3, drawn.per_pair = 2, drawn.row_bytes = 320;
  drawn.input_rows = drawn.output_rows = 30;
  drawn.table.assign(3 * 4 * 6, 5);
  for (int32_t r = 0; r < 3; ++r) {
    for (int32_t peer = 0; peer < 3; ++peer) {
      for (int32_t i = 0; i < 2; ++i) {
        drawn.At(r, 0, peer, i) = 5 * (2 * peer + i);
        drawn.At(r, 2, peer, i) = 5 * (2 * r + i);
      }
    }
  }
  Prepare(group, drawn, group.num_channels, 0, 0, wide, random);
  return drawn;
}

// Both addresses of a slice for the rank itself are multiples of 16, but stripes of the arena are cut inside of a unit.
TEST_CASE("a slice that bulk copies can't cut") {
  std::mt19937_64 random(1);
  NodeGroup group(1, 2);
  Drawn drawn;
  drawn.n = drawn.per_pair = 1, drawn.row_bytes = 4;
  drawn.input_rows = drawn.output_rows = 2100;
  drawn.table = {3, 2048, 0, 2048};
  Prepare(group, drawn, 2, 4, 0, false, random, true);
  CHECK(reinterpret_cast<uintptr_t>(drawn.args[0].x + 12) % 16 == 0);
  Launch({&drawn}, group, 8, 1);
  CheckDrawn(group, drawn, 1, 0);
}

// One channel alone moves its stripes of every slice, and no other byte.
TEST_CASE("slices are cut over channels") {
  for (const bool puts : {false, true}) {
    NodeGroup group(3, 3);
    Drawn drawn = Small(group, false, 1);
    for (SliceArgs& args : drawn.args) args.input_rows += puts ? 1 : 0;  // which is not used
    emulation::Launch(
        1, 3, 8, 5, [&] { SliceCall(drawn.args[blockIdx.y], 1, device::DynamicShared()).Run(); },
        static_cast<size_t>(SliceSharedBytes(8)));
    const std::vector<Bytes> all = Exchanged(drawn);
    int64_t moved = 0;
    for (int32_t from = 0; from < 3; ++from) {
      for (int32_t to = 0; to < 3; ++to) {
        for (int32_t i = 0; i < 2; ++i) {
          for (int64_t byte = 0; byte < 5 * 320; ++byte) {
            const int64_t in = drawn.At(from, 0, to, i) * 320 + byte, out = drawn.At(from, 2, to, i) * 320 + byte;
            const bool own = (puts ? out : in) / kStripeBytes % 3 == 1;
            CHECK(drawn.args[to].y[out] == (own ? all[to][out] : drawn.start[to][out]));
            moved += own;
          }
        }
      }
    }
    CHECK(moved == 3 * 4096);
  }
}

// The begin of a buffer that has memory only behind its first `bytes` bytes.
char* Before(const char* memory, int64_t bytes) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(memory) - static_cast<uintptr_t>(bytes));
}

// In the result, and if peers put also in the operand and the arena.
TEST_CASE("rows behind 4 GiB") {
  for (const bool puts : {false, true}) {
    constexpr int64_t kRows = (int64_t{5} << 30) / 320;
    NodeGroup group(3, 3);
    Drawn drawn = Small(group, true, 1);
    for (int32_t from = 0; from < 3; ++from) {
      for (int32_t to = 0; to < 3; ++to) {
        for (int32_t i = 0; i < 2; ++i) drawn.At(from, 2, to, i) += kRows, drawn.At(from, 0, to, i) += puts ? kRows : 0;
      }
    }
    drawn.first_x = puts ? kRows : 0, drawn.first_y = kRows;
    SetTable(group, drawn, true);
    for (SliceArgs& args : drawn.args) {
      args.x = Before(args.x, drawn.first_x * 320), args.y = Before(args.y, kRows * 320);
      args.input_rows += puts ? kRows + 1 : 0, args.output_rows += kRows;
      if (puts) args.comm.arena.base = Before(args.comm.arena.base, kRows * 320);
    }
    Launch({&drawn}, group, 8, 1);
    CheckDrawn(group, drawn, 1, 0);
  }
}

struct Wrong {
  int32_t rank, vector, peer, i;
  int64_t value;
};

// All ranks report the same, the first wrong slice, nothing moves, and the next call does not run.
TEST_CASE("wrong tables") {
  const std::string equal = ", expected equal sizes of at least 0";
  const std::string operand = "slice 1 from rank 0 to rank 2: the operand has no rows ",
                    of_operand = " (input_offsets and send_sizes of rank 0)",
                    output = "slice 0 from rank 2 to rank 1: the output has no rows ",
                    of_output = " (output_offsets and send_sizes of rank 2)",
                    overlap = " on of the output of rank 1: slices must not overlap there";
  struct Row {
    std::vector<Wrong> changes;
    std::string text;
    bool wide = false;
  };
  const Row rows[] = {
      {{{1, 1, 2, 1, 6}},
       "slice 1 from rank 1 to rank 2: send_sizes is 6 at rank 1 and recv_sizes is 5 at rank 2" + equal},
      {{{0, 3, 2, 0, 4}, {2, 3, 1, 0, 4}},
       "slice 0 from rank 1 to rank 2: send_sizes is 5 at rank 1 and recv_sizes is 4 at rank 2" + equal,
       true},
      {{{2, 1, 0, 0, -1}, {0, 3, 2, 0, -1}},
       "slice 0 from rank 2 to rank 0: send_sizes is -1 at rank 2 and recv_sizes is -1 at rank 0" + equal},
      {{{0, 0, 2, 1, 26}}, operand + "[26, 31)" + of_operand},
      {{{0, 0, 2, 1, -1}}, operand + "[-1, 4)" + of_operand, true},
      // No sum overflows.
      {{{0, 0, 2, 1, INT64_MAX}}, operand + "[549755813887, 549755813892)" + of_operand, true},
      {{{0, 1, 2, 1, 31}, {2, 3, 0, 1, 31}, {0, 0, 2, 1, 0}}, operand + "[0, 31)" + of_operand},
      {{{2, 2, 1, 0, 26}}, output + "[26, 31)" + of_output, true},
      {{{2, 2, 1, 0, -5}}, output + "[-5, 0)" + of_output},
      // The first slice, whatever its problem.
      {{{2, 1, 1, 0, 7}, {0, 2, 1, 0, 100}},
       "slice 0 from rank 0 to rank 1: the output has no rows [100, 105) (output_offsets and send_sizes of rank 0)"},
      // The last row of one slice, and the first of the other.
      {{{2, 2, 1, 0, 19}}, "rank 1 writes rows from 15 on and rank 2 writes rows from 19" + overlap},
      {{{0, 2, 1, 0, 25}}, "rank 0 writes rows from 25 on and rank 2 writes rows from 25" + overlap, true},
      // Of one rank, around an empty slice.
      {{{0, 2, 1, 1, 3}}, "rank 0 writes rows from 0 on and rank 0 writes rows from 3" + overlap},
      {{{0, 1, 1, 1, 0}, {1, 3, 0, 1, 0}, {0, 2, 1, 1, 0}, {1, 2, 1, 0, 4}},
       "rank 0 writes rows from 0 on and rank 1 writes rows from 4" + overlap}};
  for (const Row& row : rows) {
    NodeGroup group(3, 3);
    Drawn drawn = Small(group, row.wide, 1), next = Small(group, false, 7);
    for (const Wrong& wrong : row.changes) drawn.At(wrong.rank, wrong.vector, wrong.peer, wrong.i) = wrong.value;
    SetTable(group, drawn, row.wide);
    const Bytes arena(group.arena.base, group.arena.base + 3 * kArenaBytes);
    Launch({&drawn, &next}, group, 4, 3);
    for (int32_t r = 0; r < 3; ++r) {
      CHECK(group.report(r).state == device::Report::kComplete && group.report(r).rank == r);
      const std::string found = FailureText(group.report(r), "ragged_all_to_all at f.py:3", 30);
      if (found != "ragged_all_to_all at f.py:3: " + row.text) std::fprintf(stderr, "%s\n", found.c_str());
      CHECK(found == "ragged_all_to_all at f.py:3: " + row.text);
      for (const Drawn* call : {&drawn, &next}) {
        CHECK(std::memcmp(call->args[r].y, call->start[r].data(), call->start[r].size()) == 0);
      }
    }
    CHECK(std::memcmp(arena.data(), group.arena.base, arena.size()) == 0);
  }
}

TEST_CASE("a rank that does not arrive") {
  NodeGroup group(3, 2, 1'000'000);
  Drawn drawn = Small(group, false, 1);
  Launch({&drawn}, group, 4, 1, 1);
  const device::Report& report = group.report(0);
  CHECK(report.state == device::Report::kComplete && report.step == kEntryBarrier && report.peer == 1);
}

TEST_CASE("tables that do not fit") {
  SliceArgs args;
  args.comm.local.size = 2;
  using Row = std::pair<int64_t, bool>;
  for (const auto& [count, fits] :
       {Row{16, true}, {8, false}, {12, false}, {15, false}, {32, true}, {int64_t{1} << 33, false}}) {
    RowOperands operands;
    operands.table_count = count;
    CHECK(WithBuffers(args, nullptr, nullptr, operands).ok() == fits);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
