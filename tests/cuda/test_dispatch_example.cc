// The kernel of examples/token_dispatch, emulated, in consecutive calls on the same arena.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "../../examples/token_dispatch/token_dispatch.cuh"
#include "../check.h"
#include "fakes/seed.h"
#include "fakes/virtual_ranks.h"

namespace token_dispatch {
namespace {

device::Comm CommOf(int32_t rank, int32_t size, int32_t num_channels) {
  device::Comm comm;
  comm.world = comm.local = {rank, size, 0, 1};
  comm.signals.num_channels = num_channels;  // those of the communicator are not used
  comm.timeout_ns = 50'000'000;
  return comm;
}

// The state of a communicator's ranks with an arena, from one call to the next.
struct Node {
  Node(int32_t size, int32_t num_channels, int64_t bytes)
      : reports(memory.Upload(std::vector<device::Report>(size))), arena({memory.Take(size * bytes), bytes}) {
    for (int32_t r = 0; r < size; ++r) {
      device::Comm comm = CommOf(r, size, num_channels);
      comm.report = reports + r;
      comm.abort_flag = memory.Upload(std::vector<uint64_t>(1));
      comm.arena = arena;
      comm.arena_bytes = bytes;
      comms.push_back(comm);
    }
  }

  jaxcomm::cuda::HostMemory memory;
  device::Report* const reports;
  const device::Window arena;
  std::vector<device::Comm> comms;
};

struct Call {
  Call(const Node& node, int64_t tokens, int64_t row_bytes, std::mt19937_64& random) {
    const auto n = static_cast<int32_t>(node.comms.size());
    for (const device::Comm& comm : node.comms) {
      std::vector<char> rows(tokens * row_bytes);
      for (char& byte : rows) byte = static_cast<char>(1 + random() % 100);
      std::vector<int32_t> to(tokens), order(tokens), begin(n);
      const bool all_to_one = random() % 4 == 0;
      for (int32_t& rank : to) rank = all_to_one ? 0 : static_cast<int32_t>(random() % static_cast<uint64_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return to[a] < to[b]; });
      for (int32_t r = 0; r < n; ++r) {
        begin[r] = static_cast<int32_t>(std::count_if(to.begin(), to.end(), [&](int32_t rank) { return rank < r; }));
      }
      Args rank = WithArena(comm);
      rank.x = memory.Upload(rows);
      rank.order = memory.Upload(order);
      rank.begin = memory.Upload(begin);
      rank.out = memory.Upload(std::vector<char>(n * tokens * row_bytes, 'x'));
      rank.counts = memory.Upload(std::vector<int32_t>(n, -1));
      rank.tokens = tokens;
      rank.row_bytes = row_bytes;
      args.push_back(rank);
      x.push_back(rows);
      destinations.push_back(to);
    }
  }

  void Check() const {
    const int64_t tokens = args[0].tokens, bytes = args[0].row_bytes;
    for (size_t rank = 0; rank < args.size(); ++rank) {
      std::vector<char> expected(args.size() * tokens * bytes, 0);
      for (size_t source = 0; source < args.size(); ++source) {
        int32_t count = 0;
        for (int64_t token = 0; token < tokens; ++token) {
          if (destinations[source][token] != static_cast<int32_t>(rank)) continue;
          std::memcpy(expected.data() + (source * tokens + count++) * bytes, x[source].data() + token * bytes, bytes);
        }
        CHECK(args[rank].counts[source] == count);
      }
      CHECK(std::memcmp(args[rank].out, expected.data(), expected.size()) == 0);
    }
  }

  jaxcomm::cuda::HostMemory memory;
  std::vector<std::vector<char>> x;                // by rank
  std::vector<std::vector<int32_t>> destinations;  // by rank
  std::vector<Args> args;                          // by rank
};

void TestCalls(uint64_t seed, int32_t size) {
  std::mt19937_64 random(seed);
  constexpr int64_t kTokens[] = {0, 1, 5, 17}, kRowBytes[] = {1, 7, 16, 40};
  const auto blocks = static_cast<int32_t>(1 + random() % 2);
  const auto warps = static_cast<unsigned>(1 + random() % 3);
  const Node node(size, blocks, ArenaBytes(CommOf(0, size, blocks), 17, 40));
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 4; ++i) {
    calls.push_back(std::make_unique<Call>(node, kTokens[random() % 4], kRowBytes[random() % 4], random));
    CHECK(FindProblem(node.comms[0], calls.back()->args[0], blocks) == nullptr);
  }
  // The places of rows depend on the shape, so all blocks of a call end before the next one begins. With one block,
  // ranks are in different calls.
  const size_t per_launch = blocks == 1 ? calls.size() : 1;
  for (size_t first = 0; first < calls.size(); first += per_launch) {
    emulation::Launch(blocks, size, warps * device::kWarpThreads, seed + first, [&] {
      for (size_t i = first; i < first + per_launch; ++i) {
        Run(calls[i]->args[blockIdx.y]);
        __syncthreads();  // the kernel has ended
      }
    });
  }
  for (int32_t r = 0; r < size; ++r) CHECK(node.reports[r].state == device::Report::kNone);
  for (const auto& call : calls) call->Check();
}

TEST_CASE("calls of all sizes") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (const int32_t size : {1, 2, 3, 8}) {
    for (int repeat = 0; repeat < 8; ++repeat) TestCalls(seed += 10, size);
  }
}

TEST_CASE("a missing rank") {
  std::mt19937_64 random(1);
  const Node node(3, 2, ArenaBytes(CommOf(0, 3, 2), 5, 8));
  const Call call(node, 5, 8, random);
  emulation::Launch(2, 2, 4, jaxcomm::FirstSeed(), [&] { Run(call.args[blockIdx.y]); });
  for (int32_t r = 0; r < 2; ++r) {
    CHECK(node.reports[r].state == device::Report::kComplete && node.reports[r].peer == 2);
  }
}

TEST_CASE("invalid calls are refused") {
  const Node node(2, 3, ArenaBytes(CommOf(0, 2, 3), 5, 8));
  std::mt19937_64 random(1);
  const Call call(node, 5, 8, random);
  const auto problem = [&](void (*spoil)(device::Comm&, Args&), int32_t blocks = 3) {
    device::Comm comm = node.comms[0];
    Args args = call.args[0];
    spoil(comm, args);
    return FindProblem(comm, args, blocks) != nullptr;
  };
  CHECK(!problem([](device::Comm&, Args&) {}));
  CHECK(problem([](device::Comm&, Args&) {}, 0) && problem([](device::Comm&, Args&) {}, 4));
  CHECK(problem([](device::Comm& comm, Args&) { comm.local.size = 1; }));
  CHECK(problem([](device::Comm&, Args& args) { args.tokens = -1; }));
  CHECK(problem([](device::Comm&, Args& args) { args.tokens = 6; }));
  CHECK(problem([](device::Comm&, Args& args) { args.row_bytes = 0; }));
}

}  // namespace
}  // namespace token_dispatch
