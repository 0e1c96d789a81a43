// The kernel of dispatch and combine, emulated: long series of calls of all kinds and sizes on one arena, with random
// routings, ranks that begin late, and thread blocks that run ahead. Slots are compared with the payload that the
// routing names, sums with those of the CPU. Wrong routings end on all ranks before a row moves.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/row_calls.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

void CheckDrawn(const NodeGroup& group, const Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = ExpectedOf(drawn);
  for (int32_t r = 0; r < group.n; ++r) {
    CHECK(expected[r].size() == drawn.y[r].size());
    const bool same = std::memcmp(expected[r].data(), drawn.y[r].data(), expected[r].size()) == 0;
    if (same && group.report(r).state == device::Report::kNone) continue;
    std::fprintf(stderr,
                 "%s of %d ranks, %d tokens, %d choices, %d experts, %d slots, rows of %lld bytes, %d channels, seed "
                 "%llu, call %zu: rank %d %s (report: state %llu, step %d, peer %d)\n",
                 drawn.combines ? "combine" : "dispatch", group.n, drawn.routed.tokens, drawn.routed.choices,
                 drawn.routed.experts, drawn.routed.capacity, static_cast<long long>(drawn.args[r].row_bytes),
                 drawn.args[r].num_channels, static_cast<unsigned long long>(seed), place, r,
                 same ? "aborted" : "has other bits", static_cast<unsigned long long>(group.report(r).state),
                 group.report(r).step, group.report(r).peer);
    std::exit(1);
  }
}

int num_calls = 0;

Drawn DrawCall(NodeGroup& group, std::mt19937_64& random) {
  Drawn drawn;
  const int32_t n = group.n, local = 1 + static_cast<int32_t>(random() % 3), experts = n * local;
  const int32_t token_counts[] = {0, 1, 3, 8, 17}, choice_counts[] = {1, 2, 3, 9};
  const int32_t tokens = token_counts[random() % 5], choices = choice_counts[random() % 4];
  const int32_t align = random() % 2 == 0 ? 1 : 4, slots = random() % 4 == 0 ? n * tokens * choices + 1 : 0;
  drawn.routed = Route(n, tokens, choices, experts, align, slots, static_cast<int32_t>(random() % 7),
                       DrawIds(n, tokens, choices, experts, random));
  drawn.combines = random() % 2 == 0;
  drawn.per_choice = random() % 3 == 0;
  constexpr DType kSums[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  const bool adds = drawn.combines && !drawn.per_choice;
  drawn.dtype = adds ? kSums[random() % 4] : random() % 2 == 0 ? DType::kU8 : DType::kF32;
  if (adds && choices == 1) drawn.weighted = true;
  if (adds && random() % 2 == 0) drawn.weighted = true;
  const int64_t counts[] = {1, 3, 4, 7, 16, 33, 64, 100};
  drawn.row_count = counts[random() % 8];
  const int64_t item = ItemBytes(drawn.dtype);
  Prepare(group, drawn, 1 + static_cast<int32_t>(random() % group.num_channels), random() % 3 == 0 ? item : 0, random);
  ++num_calls;
  return drawn;
}

void RunSeries(uint64_t seed, int32_t n, int length) {
  std::mt19937_64 random(seed);
  NodeGroup group(n, 1 + static_cast<int32_t>(random() % 3));
  std::vector<Drawn> series;
  for (int i = 0; i < length; ++i) series.push_back(DrawCall(group, random));
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 4, 8};
  Launch(calls, n, group.num_channels, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(group, series[i], seed, i);
}

TEST_CASE("dispatch and combine in any order on one arena") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 20; ++seed) {
    for (const int32_t n : {1, 2, 3, 5, 8}) RunSeries(seed, n, 4);
  }
  CHECK(num_calls == 400);
}

TEST_CASE("many series [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1300; ++seed) {
    for (const int32_t n : {1, 2, 3, 4, 8}) RunSeries(seed, n, 6);
  }
}

// A call of two ranks, two experts each, five tokens.
Drawn Small(NodeGroup& group, bool combines, uint64_t seed) {
  std::mt19937_64 random(seed);
  Drawn drawn;
  drawn.combines = combines;
  drawn.dtype = DType::kF32;
  drawn.row_count = 80;  // 320 bytes: several channels
  std::vector<std::vector<int32_t>> ids = {{0, 1, 2, 3, 0, 3, 1, 2, 2, 3}, {3, 1, 2, 1, 0, 2, 1, 3, 1, 0}};
  drawn.routed = Route(2, 5, 2, 4, 4, 0, 0, ids);
  Prepare(group, drawn, group.num_channels, 0, random);
  return drawn;
}

void SetTable(Drawn& drawn, int32_t rank, int32_t vector, int32_t expert, int32_t value) {
  drawn.routed.table[(rank * 4 + vector) * drawn.routed.experts + expert] = value;
  for (RowArgs& args : drawn.args) {
    std::memcpy(const_cast<int32_t*>(args.table), drawn.routed.table.data(), drawn.routed.table.size() * 4);
  }
}

bool Untouched(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == kUnwritten; });
}

// Both ranks report `step` about `peer`, nothing moves, and the next call does not run.
void CheckRefused(NodeGroup& group, Drawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen) {
  Drawn next = Small(group, true, 7);
  const Bytes arena(group.arena.base, group.arena.base + 2 * kArenaBytes);
  Launch({&drawn, &next}, 2, group.num_channels, 4, 3);
  for (int32_t r = 0; r < 2; ++r) {
    const device::Report& report = group.report(r);
    CHECK(report.state == device::Report::kComplete && report.rank == r);
    CHECK(report.step == step && report.peer == peer && report.expected == expected && report.seen == seen);
    CHECK(Untouched(drawn.y[r]) && Untouched(next.y[r]));
  }
  CHECK(std::memcmp(arena.data(), group.arena.base, arena.size()) == 0);
}

TEST_CASE("a rank with more rows than slots: all ranks report it before a row moves") {
  for (const bool combines : {false, true}) {
    NodeGroup group(2, 3);
    Drawn drawn = Small(group, combines, 1);
    const int32_t capacity = drawn.routed.capacity - 5;  // the last group of the fullest rank does not fit
    for (RowArgs& args : drawn.args) args.num_slots = capacity;
    int32_t fullest = 0, end = 0;
    for (int32_t e = 1; e < 4; e += 2) {
      const int32_t last = drawn.routed.table[(4 + 2) * 4 + e] + drawn.routed.table[(4 + 1) * 4 + e];
      if (last > end) fullest = e / 2, end = last;
    }
    CHECK(end > capacity);
    CheckRefused(group, drawn, kTooManyRows, fullest, end, capacity);
    CHECK(
        FailureText(group.report(0), "moe.dispatch at f.py:3", 30).find("rank " + std::to_string(fullest) + " gets") !=
        std::string::npos);
  }
}

TEST_CASE("an expert whose rows reach into those of the next one") {
  NodeGroup group(2, 2);
  Drawn drawn = Small(group, false, 1);
  const int32_t start = drawn.routed.table[2 * 4 + 1];   // of expert 1, at rank 0
  const int32_t last = drawn.routed.table[(4 + 2) * 4];  // of rank 1 for expert 0
  SetTable(drawn, 1, 1, 0, start - last + 1);
  CheckRefused(group, drawn, kTooManyRowsOfExpert, 0, start + 1, start);
  CHECK(FailureText(group.report(0), "moe.dispatch at f.py:3", 30)
            .find("an expert of rank 0 gets " + std::to_string(start + 1) + " rows, but has " + std::to_string(start) +
                  " slots") != std::string::npos);
}

// The table that jaxcomm.moe makes of these sizes: slices(). The sizes are part of both cumulative sums.
void SetSizes(Drawn& drawn, const std::vector<std::vector<int32_t>>& sizes) {
  const int32_t experts = drawn.routed.experts;
  for (int32_t r = 0; r < 2; ++r) {
    int32_t packed = 0;
    for (int32_t e = 0; e < experts; ++e) {
      const int32_t start = drawn.routed.table[2 * experts + e];
      SetTable(drawn, r, 0, e, packed);
      SetTable(drawn, r, 1, e, sizes[r][e]);
      if (r == 1) SetTable(drawn, 1, 2, e, start + sizes[0][e]);
      packed += sizes[r][e];
    }
  }
}

// As jaxcomm/moe/check.py marks them: the number of ids as the negative size of the first slice of the rank.
TEST_CASE("ids of experts that do not exist") {
  for (const bool combines : {false, true}) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      for (const int32_t unknown : {1, 6, 10}) {
        NodeGroup group(2, 2);
        Drawn drawn = Small(group, combines, 1);
        std::vector<std::vector<int32_t>> sizes(2);
        for (int32_t i = 0; i < 8; ++i) sizes[i / 4].push_back(drawn.routed.table[(i / 4 * 4 + 1) * 4 + i % 4]);
        sizes[rank][0] = -unknown;
        SetSizes(drawn, sizes);
        CheckRefused(group, drawn, kUnknownExperts, rank, unknown, 4);
        const std::string text = "rank " + std::to_string(rank) + " has " + std::to_string(unknown) + " expert ids";
        CHECK(FailureText(group.report(1), "moe.dispatch at f.py:3", 30).find(text) != std::string::npos);
      }
    }
  }
}

TEST_CASE("numbers of a report are signed") {
  device::Report report;
  report.step = kTooManyRows;
  report.expected = static_cast<uint64_t>(-3);
  CHECK(FailureText(report, "moe.dispatch at f.py:3", 30).find("up to row -3 of 0") != std::string::npos);
}

TEST_CASE("slices beyond the choices of a rank") {
  NodeGroup group(2, 2);
  Drawn drawn = Small(group, false, 1);
  SetTable(drawn, 0, 0, 3, 10);
  const uint64_t end = 10 + drawn.routed.table[4 + 3];
  CheckRefused(group, drawn, kUnknownRow, 0, end, 10);
}

TEST_CASE("slices that are not packed at their sender") {
  NodeGroup group(2, 2);
  Drawn drawn = Small(group, false, 1);
  const int32_t begin = drawn.routed.table[3] - 1;
  SetTable(drawn, 0, 0, 3, begin);
  CheckRefused(group, drawn, kUnknownRow, 0, begin + drawn.routed.table[4 + 3], 10);
}

// Never an address. The row counts as zero.
TEST_CASE("a list that names a row that does not exist") {
  for (const int32_t row : {-1, 5, 1 << 30}) {
    NodeGroup group(2, 1);
    Drawn drawn = Small(group, false, 1);
    const_cast<int32_t*>(drawn.args[1].index)[0] = row;
    Launch({&drawn}, 2, 1, 4, 3);
    CHECK(group.report(0).step == kUnknownRow || group.report(1).step == kUnknownRow);
  }
}

TEST_CASE("a slot or an expert of the routing that does not exist") {
  for (const auto& [slot, expert] : {std::pair{1 << 30, 0}, std::pair{0, 4}, std::pair{0, -1}, std::pair{11, 0}}) {
    NodeGroup group(2, 1);
    Drawn drawn = Small(group, true, 1);
    const_cast<int32_t*>(drawn.args[1].index)[2] = slot;
    const_cast<int32_t*>(drawn.args[1].expert)[2] = expert;
    Launch({&drawn}, 2, 1, 4, 3);
    CHECK(group.report(1).step == kUnknownRow && group.report(1).state == device::Report::kComplete);
  }
}

// The report of a wrong row ends waits of this rank. Hence it follows the last thread block of the call, and peers get
// the signals of all channels.
TEST_CASE("a wrong row at one rank does not end the call of the others") {
  for (const bool combines : {false, true}) {
    for (const uint64_t late : {0, 3000}) {
      NodeGroup group(2, 3);
      Drawn drawn = Small(group, combines, 1);
      CHECK(drawn.args[0].num_channels == 3);
      drawn.late = {0, late};
      if (combines) {
        const_cast<int32_t*>(drawn.args[0].index)[2] = 1 << 30;
        drawn.routed.slot[0][2] = drawn.routed.expert[0][2] = -1;
      } else {
        // The packed choice 0 of rank 0 goes to expert 0 of the same rank.
        const_cast<int32_t*>(drawn.args[0].index)[0] = 1 << 30;
      }
      std::vector<Bytes> expected = ExpectedOf(drawn);
      if (!combines) {
        const int64_t row = drawn.args[0].row_bytes;
        std::fill_n(expected[0].begin() + drawn.routed.table[2 * 4] * row, row, 0);
      }
      Launch({&drawn}, 2, 3, 4, 3);
      CHECK(group.report(0).state == device::Report::kComplete && group.report(0).step == kUnknownRow);
      CHECK(group.report(0).peer == 0 && group.report(0).expected == 1 << 30);
      CHECK(group.report(1).state == device::Report::kNone);
      CHECK(*drawn.args[0].comm.abort_flag != 0 && *drawn.args[1].comm.abort_flag == 0);
      for (int32_t r = 0; r < 2; ++r) {
        CHECK(std::memcmp(expected[r].data(), drawn.y[r].data(), expected[r].size()) == 0);
        CHECK(*drawn.args[r].state == 0);
      }
    }
  }
}

TEST_CASE("a rank that does not arrive") {
  for (const bool combines : {false, true}) {
    NodeGroup group(2, 2, 1'000'000);
    Drawn drawn = Small(group, combines, 1);
    size_t shared = static_cast<size_t>(RowSharedBytes(drawn.args[0], 4));
    emulation::Launch(
        2, 2, 4, 1,
        [&] {
          if (blockIdx.y == 1) return;
          RowCall(drawn.args[0], static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
        },
        shared);
    const device::Report& report = group.report(0);
    CHECK(report.state == device::Report::kComplete && report.step == kEntryBarrier && report.peer == 1);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
