// The kernel of dispatch and combine, emulated: long series of calls of all kinds and sizes on one arena, with random
// routings, ranks that begin late, and thread blocks that run ahead. Slots are compared with the payload that the
// routing names, sums with those of the CPU. Wrong routings end on all ranks before a row moves.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cpu/combine_rows.h"
#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/emulated.h"
#include "fakes/seed.h"
#include "fakes/virtual_rows.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr int64_t kArenaBytes = 1 << 20;

struct Group {
  explicit Group(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs)
      : n(n), num_channels(num_channels), ranks(memory, {1, n, true, true}, num_channels, timeout_ns) {
    arena = {memory.Take(n * kArenaBytes), kArenaBytes};
  }

  device::Comm CommOf(int32_t rank) const {
    device::Comm comm = ranks.CommOfNode(rank);
    comm.arena = arena;
    comm.arena_bytes = kArenaBytes;
    return comm;
  }
  const device::Report& report(int32_t rank) const { return ranks.reports()[rank]; }

  HostMemory memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  device::Window arena;
};

// A call of all ranks. Threads of the kernel bring x, take y away and spoil both, as XLA's kernels do.
struct Drawn {
  Routed routed;
  bool combines = false, per_choice = false, weighted = false;
  DType dtype = DType::kU8;
  int64_t row_count = 1;
  std::vector<RowArgs> args;  // by rank
  std::vector<Bytes> x, y;    // by rank: brought and taken
  std::vector<std::vector<char>> weights;
  std::vector<uint64_t> late;  // by rank: polls before the call begins
};

std::vector<std::vector<int32_t>> DrawIds(int32_t n, int32_t tokens, int32_t choices, int32_t experts,
                                          std::mt19937_64& random) {
  const uint64_t kind = random() % 5;
  std::vector<std::vector<int32_t>> ids(n);
  for (int32_t r = 0; r < n; ++r) {
    for (int32_t c = 0; c < tokens * choices; ++c) {
      int32_t e = static_cast<int32_t>(random() % experts);
      if (kind == 1) e = experts / 2;                                     // one hot expert
      if (kind == 2 && r == 0) e = -1;                                    // a rank that sends nothing
      if (kind == 3 && random() % 2 == 0) e = -1;                         // choices without an expert
      if (kind == 4) e = static_cast<int32_t>(random() % (experts / n));  // one hot rank
      ids[r].push_back(e);
    }
  }
  return ids;
}

template <typename T>
const T* Upload(Group& group, const std::vector<T>& values) {
  return group.memory.Upload(values);
}

// The buffers of a call with this routing.
void Prepare(Group& group, Drawn& drawn, int32_t num_channels, int64_t shift, std::mt19937_64& random) {
  const Routed& routed = drawn.routed;
  CallSpec spec;
  spec.collective = drawn.combines ? Collective::kCombine : Collective::kDispatch;
  spec.group_size = group.n;
  spec.row_count = drawn.row_count;
  spec.choices = routed.choices;
  spec.num_experts = routed.experts;
  spec.per_choice = drawn.per_choice ? 1 : 0;
  const int64_t rows = int64_t{routed.tokens} * (drawn.per_choice ? routed.choices : 1);
  const int64_t payload = rows * drawn.row_count, slots = routed.capacity * drawn.row_count;
  const int64_t item = ItemBytes(drawn.dtype);
  for (int32_t r = 0; r < group.n; ++r) {
    StatusOr<RowArgs> made = MakeRowArgs(spec, drawn.dtype, drawn.combines ? slots : payload,
                                         drawn.combines ? payload : slots, num_channels);
    CHECK(made.ok());
    RowArgs args = *made;
    // As if there were enough bytes for all channels.
    const int64_t lines = (args.row_bytes + 127) / 128, per_channel = (lines + num_channels - 1) / num_channels;
    args.piece_bytes = per_channel * 128;
    args.num_channels = static_cast<int32_t>((lines + per_channel - 1) / per_channel);
    args.comm = group.CommOf(r);
    CHECK(ArenaBytes(args) <= kArenaBytes);
    const int64_t x_bytes = (drawn.combines ? slots : payload) * item,
                  y_bytes = (drawn.combines ? payload : slots) * item;
    drawn.x.emplace_back(x_bytes);
    for (char& byte : drawn.x.back()) byte = static_cast<char>(random());
    if (drawn.dtype != DType::kU8) {  // no infinities, no NaN
      for (int64_t i = item - 1; i < x_bytes; i += item) drawn.x.back()[i] &= static_cast<char>(0xbf);
    }
    drawn.y.emplace_back(y_bytes);
    drawn.weights.emplace_back();
    if (drawn.weighted) {
      for (size_t c = 0; c < routed.slot[r].size(); ++c) {
        const double value = static_cast<double>(static_cast<int>(random() % 2001) - 1000) / 300;
        const auto narrow = static_cast<float>(value);
        const auto* const from =
            drawn.dtype == DType::kF64 ? reinterpret_cast<const char*>(&value) : reinterpret_cast<const char*>(&narrow);
        drawn.weights.back().insert(drawn.weights.back().end(), from, from + (drawn.dtype == DType::kF64 ? 8 : 4));
      }
    }
    RowOperands operands;
    operands.table = Upload(group, routed.table);
    operands.table_count = static_cast<int64_t>(routed.table.size());
    operands.index =
        drawn.combines ? Upload(group, routed.slot[r]) : Upload(group, RowsOf(routed, r, drawn.per_choice));
    operands.index_count = static_cast<int64_t>(routed.slot[r].size());
    if (drawn.combines) operands.expert = Upload(group, routed.expert[r]);
    if (drawn.weighted) operands.weights = Upload(group, drawn.weights.back());
    StatusOr<RowArgs> whole = WithBuffers(args, group.memory.Take(x_bytes + shift) + shift,
                                          group.memory.Take(y_bytes + shift) + shift, operands);
    CHECK(whole.ok());
    drawn.args.push_back(*whole);
    drawn.late.push_back(random() % 4 == 0 ? random() % 200 : 0);
  }
}

// Calls f(byte) for every byte of this channel's pieces in a buffer, spread over the threads.
template <typename F>
void ForPieces(const RowArgs& args, int32_t channel, int64_t bytes, const F& f) {
  for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    if (i % args.row_bytes / args.piece_bytes == channel) f(i);
  }
}

// The work of a thread block.
void RunCall(Drawn& drawn, int32_t rank, int32_t channel) {
  const RowArgs& args = drawn.args[rank];
  auto* const x = const_cast<char*>(args.x);
  const auto x_bytes = static_cast<int64_t>(drawn.x[rank].size());
  const auto y_bytes = static_cast<int64_t>(drawn.y[rank].size());
  ForPieces(args, channel, x_bytes, [&](int64_t i) { x[i] = drawn.x[rank][i]; });
  ForPieces(args, channel, y_bytes, [&](int64_t i) { args.y[i] = kUnwritten; });
  __syncthreads();
  RowCall(args, channel, device::DynamicShared()).Run();
  __syncthreads();
  ForPieces(args, channel, y_bytes, [&](int64_t i) { drawn.y[rank][i] = args.y[i]; });
  ForPieces(args, channel, x_bytes, [&](int64_t i) { x[i] = kSpoiled; });
}

// A kernel begins once all thread blocks of the previous one on its GPU have ended.
void Launch(const std::vector<Drawn*>& calls, int32_t n, int32_t num_channels, unsigned threads, uint64_t seed) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(n);  // thread blocks, by rank
  for (const Drawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RowSharedBytes(drawn->args[0], static_cast<int32_t>(threads))));
  }
  emulation::Launch(
      num_channels, n, threads, seed,
      [&] {
        const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
        for (size_t call = 0; call < calls.size(); ++call) {
          Drawn* const drawn = calls[call];
          const RowArgs& args = drawn->args[rank];
          if (threadIdx.x == 0) {
            while (ended[rank] < static_cast<int32_t>(call) * num_channels) emulation::Pause();
          }
          __syncthreads();
          if (channel < args.num_channels) {
            for (uint64_t i = 0; i < drawn->late[rank]; ++i) emulation::Pause();
            RunCall(*drawn, rank, channel);
          }
          __syncthreads();
          if (threadIdx.x == 0) ++ended[rank];
        }
      },
      shared);
}
// By the definition: slot(t, k) of the rank of its expert holds the row of the token; all other slots are zero.
std::vector<Bytes> Dispatched(const Drawn& drawn) {
  const Routed& routed = drawn.routed;
  const int64_t row = drawn.row_count * ItemBytes(drawn.dtype);
  std::vector<Bytes> y(routed.n, Bytes(routed.capacity * row));
  for (int32_t r = 0; r < routed.n; ++r) {
    for (size_t c = 0; c < routed.slot[r].size(); ++c) {
      if (routed.slot[r][c] < 0) continue;
      const size_t from = drawn.per_choice ? c : c / routed.choices;
      std::memcpy(y[routed.RankOf(routed.expert[r][c])].data() + routed.slot[r][c] * row,
                  drawn.x[r].data() + from * row, static_cast<size_t>(row));
    }
  }
  return y;
}

std::vector<Bytes> Combined(const Drawn& drawn) {
  const Routed& routed = drawn.routed;
  const int64_t row = drawn.row_count * ItemBytes(drawn.dtype), weight = drawn.dtype == DType::kF64 ? 8 : 4;
  std::vector<Bytes> y;
  for (int32_t r = 0; r < routed.n; ++r) {
    const int32_t per_row = drawn.per_choice ? 1 : routed.choices;
    y.emplace_back(static_cast<int64_t>(routed.tokens) * routed.choices / per_row * row);
    for (int32_t t = 0; t < static_cast<int32_t>(routed.slot[r].size()) / per_row; ++t) {
      std::vector<const void*> rows;
      std::vector<char> weights;
      for (int32_t c = t * per_row; c < (t + 1) * per_row; ++c) {
        if (routed.slot[r][c] < 0) continue;
        rows.push_back(drawn.x[routed.RankOf(routed.expert[r][c])].data() + routed.slot[r][c] * row);
        if (!drawn.weighted) continue;
        weights.insert(weights.end(), drawn.weights[r].begin() + c * weight,
                       drawn.weights[r].begin() + (c + 1) * weight);
      }
      char* const to = y.back().data() + t * row;
      if (rows.empty()) continue;
      if (drawn.per_choice) {
        std::memcpy(to, rows[0], static_cast<size_t>(row));
        continue;
      }
      const auto end = static_cast<int32_t>(rows.size());
      std::vector<double> aligned(weights.size() / 4 + 1);
      std::memcpy(aligned.data(), weights.data(), weights.size());
      FindCombine(drawn.dtype)(to, {rows.data(), drawn.weighted ? aligned.data() : nullptr, &end, 1}, drawn.row_count);
    }
  }
  return y;
}

void CheckDrawn(const Group& group, const Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = drawn.combines ? Combined(drawn) : Dispatched(drawn);
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

Drawn DrawCall(Group& group, std::mt19937_64& random) {
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
  Group group(n, 1 + static_cast<int32_t>(random() % 3));
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
Drawn Small(Group& group, bool combines, uint64_t seed) {
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
void CheckRefused(Group& group, Drawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen) {
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
    Group group(2, 3);
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
  Group group(2, 2);
  Drawn drawn = Small(group, false, 1);
  const int32_t start = drawn.routed.table[2 * 4 + 1];   // of expert 1, at rank 0
  const int32_t last = drawn.routed.table[(4 + 2) * 4];  // of rank 1 for expert 0
  SetTable(drawn, 1, 1, 0, start - last + 1);
  CheckRefused(group, drawn, kTooManyRows, 0, start + 1, drawn.routed.capacity);
}

TEST_CASE("ids of experts that do not exist") {
  Group group(2, 2);
  Drawn drawn = Small(group, false, 1);
  SetTable(drawn, 1, 1, 0, -6);
  CheckRefused(group, drawn, kUnknownExperts, 1, 6, 4);
  CHECK(FailureText(group.report(1), "moe.dispatch at f.py:3", 30).find("rank 1 has 6 expert ids") !=
        std::string::npos);
}

TEST_CASE("slices beyond the choices of a rank") {
  Group group(2, 2);
  Drawn drawn = Small(group, false, 1);
  SetTable(drawn, 0, 0, 3, 10);
  const uint64_t end = 10 + drawn.routed.table[4 + 3];
  CheckRefused(group, drawn, kUnknownRow, 0, end, 10);
}

// Never an address. The row counts as zero.
TEST_CASE("a list that names a row that does not exist") {
  for (const int32_t row : {-1, 5, 1 << 30}) {
    Group group(2, 1);
    Drawn drawn = Small(group, false, 1);
    const_cast<int32_t*>(drawn.args[1].index)[0] = row;
    Launch({&drawn}, 2, 1, 4, 3);
    CHECK(group.report(0).step == kUnknownRow || group.report(1).step == kUnknownRow);
  }
}

TEST_CASE("a slot or an expert of the routing that does not exist") {
  for (const auto& [slot, expert] : {std::pair{1 << 30, 0}, std::pair{0, 4}, std::pair{0, -1}, std::pair{11, 0}}) {
    Group group(2, 1);
    Drawn drawn = Small(group, true, 1);
    const_cast<int32_t*>(drawn.args[1].index)[2] = slot;
    const_cast<int32_t*>(drawn.args[1].expert)[2] = expert;
    Launch({&drawn}, 2, 1, 4, 3);
    CHECK(group.report(1).step == kUnknownRow && group.report(1).state == device::Report::kComplete);
  }
}

TEST_CASE("a rank that does not arrive") {
  for (const bool combines : {false, true}) {
    Group group(2, 2, 1'000'000);
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
