// The bytes that dispatch reads from each rank, as the compiler reports the loads of the emulated kernel: the row of a
// token once, however many of its experts the reading rank has.
#include <set>

#include "fakes/memory_model.h"
#include "fakes/row_calls.h"
// Must follow it: see gin_cluster.h.
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kMaxRanks = 8;

// By reading rank and rank that is read.
struct Counts {
  const char* base = nullptr;
  int64_t rows_bytes = 0;  // of an arena, before the places
  int64_t rows[kMaxRanks][kMaxRanks] = {}, places[kMaxRanks][kMaxRanks] = {};
} counts;

void Count(const void* address, size_t bytes) {
  const int64_t offset = static_cast<const char*>(address) - counts.base;
  if (emulation::TheMachine().current == nullptr || offset < 0 || offset >= kMaxRanks * kRowArenaBytes) return;
  const bool row = offset % kRowArenaBytes < counts.rows_bytes;
  (row ? counts.rows : counts.places)[blockIdx.y][offset / kRowArenaBytes] += static_cast<int64_t>(bytes);
}

// The rows that rank `to` needs of rank `from`, and its choices.
struct Needed {
  int64_t rows = 0, choices = 0;
};
Needed Need(const Drawn& drawn, int32_t to, int32_t from) {
  const Routed& routed = drawn.routed;
  std::set<size_t> rows;
  int64_t choices = 0;
  for (size_t c = 0; c < routed.slot[from].size(); ++c) {
    if (routed.slot[from][c] < 0 || routed.RankOf(routed.expert[from][c]) != to) continue;
    ++choices;
    rows.insert(drawn.per_choice ? c : c / routed.choices);
  }
  return {static_cast<int64_t>(rows.size()), choices};
}

// Runs the call, and compares all reads.
void CheckReads(GinCluster& group, Drawn& drawn, unsigned threads, uint64_t seed) {
  const RowArgs& args = drawn.args[0].rows;
  counts = {};
  counts.base = group.arenas.base;
  counts.rows_bytes = ArenaRowsBytes(args);
  fake::read_observer = &Count;
  Launch(group, {&drawn}, threads, seed);
  fake::read_observer = nullptr;
  for (int32_t to = 0; to < group.n; ++to) {
    CHECK(group.reports[to].state == device::Report::kNone);
    for (int32_t from = 0; from < group.n; ++from) {
      const Needed needed = Need(drawn, to, from);
      const int64_t read = counts.rows[to][from];
      // A rank with one expert may read a row again for a token that names the expert twice.
      CHECK(read >= needed.rows * args.row_bytes && read <= needed.choices * args.row_bytes);
      if (drawn.routed.experts > group.n) CHECK(read == needed.rows * args.row_bytes);
      if (to == from) continue;  // it makes its own list
      // Each thread block reads the list, and may read the choices of the last token of a turn again.
      const int64_t list = needed.choices * args.num_channels * static_cast<int64_t>(sizeof(RowPlace));
      CHECK(counts.places[to][from] >= list && counts.places[to][from] <= 2 * list);
    }
  }
}

TEST_CASE("dispatch reads each row once per rank that needs it") {
  int grouped = 0;
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 40; ++seed) {
    std::mt19937_64 random(seed);
    const int32_t sizes[] = {1, 2, 3, 5, 8}, choice_counts[] = {1, 2, 3, 9};
    const int32_t n = sizes[seed % 5], experts = n * (1 + static_cast<int32_t>(random() % 3));
    const int32_t tokens = static_cast<int32_t>(random() % 18), choices = choice_counts[random() % 4];
    const auto made = MakeCluster(0, n, 1 + static_cast<int32_t>(random() % 3), seed);
    GinCluster& group = *made;
    Drawn drawn;
    drawn.routed = Route(n, tokens, choices, experts, 1, 0, 0, DrawIds(n, tokens, choices, experts, random));
    drawn.per_choice = random() % 4 == 0;
    drawn.row_count = 1 + static_cast<int64_t>(random() % 500);
    Prepare(group, drawn, group.num_channels, 0, random);
    grouped += GroupsPlaces(drawn.args[0].rows) ? 1 : 0;
    CheckReads(group, drawn, 16, seed);
  }
  CHECK(grouped > 10);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
