// The kernels of dispatch, combine, all_to_all_v and route_and_dispatch as the module has them, with a stream per rank
// of one GPU. Each call runs several times in a row on the same counters. The results are compared with the
// definitions.
#include <functional>
#include <random>

#include "../../../ffi/cuda/program/call_program.h"
#include "../../check.h"
#include "../fakes/node_group.h"
#include "../fakes/virtual_route_and_dispatch.h"
#include "gpu.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 4, kChannels = 8, kTurns = 3;

// The ranks of a node, and a stream for each.
struct Node : NodeGroupIn<ManagedMemory> {
  Node() : NodeGroupIn(kRanks, kChannels, 10'000'000'000, 8 << 20) {
    for (cudaStream_t& stream : streams) CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }

  // Launches launch(rank, stream) on all ranks, in another order each time, and waits.
  void Run(const std::function<cudaError_t(int32_t, cudaStream_t)>& launch) {
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int32_t i = 0; i < kRanks; ++i) {
        const int32_t rank = (i + turn) % kRanks;
        CHECK_CUDA(launch(rank, streams[rank]));
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    for (const device::Report& report : Reports(ranks)) CHECK(report.state == device::Report::kNone);
  }

  cudaStream_t streams[kRanks] = {};
};

Bytes Random(int64_t bytes, std::mt19937_64& random) {
  Bytes made(static_cast<size_t>(bytes));
  for (char& byte : made) byte = static_cast<char>(random());
  return made;
}

Routed DrawRouting(int32_t tokens, std::mt19937_64& random) {
  constexpr int32_t kChoices = 3, kExperts = 2 * kRanks;
  return Route(kRanks, tokens, kChoices, kExperts, 1, 0, 0, DrawIds(kRanks, tokens, kChoices, kExperts, random));
}

// Rows of whole numbers, so that sums are exact.
TEST_CASE("dispatch and combine") {
  Node node;
  std::mt19937_64 random(1);
  for (const int64_t count : {1, 33, 2048}) {  // elements of a row
    for (const bool combines : {false, true}) {
      const Routed routed = DrawRouting(200, random);
      const int64_t row_bytes = count * 4, num_choices = int64_t{routed.tokens} * routed.choices;
      const int64_t x_rows = combines ? routed.capacity : routed.tokens;
      const int64_t y_rows = combines ? routed.tokens : routed.capacity;
      CallSpec spec;
      spec.collective = combines ? Collective::kCombine : Collective::kDispatch;
      spec.group_size = kRanks;
      spec.row_count = count;
      spec.choices = routed.choices;
      spec.num_experts = routed.experts;
      std::vector<RowArgs> args;
      std::vector<std::vector<float>> xs;
      for (int32_t r = 0; r < kRanks; ++r) {
        StatusOr<RowArgs> made = MakeRowArgs(spec, DType::kF32, x_rows * count, y_rows * count, kChannels);
        CHECK(made.ok());
        made->comm = node.CommOf(r);
        made->state = node.memory.Upload(std::vector<uint64_t>(1));
        CHECK(ArenaBytes(*made) <= node.arena.stride);
        xs.emplace_back(static_cast<size_t>(x_rows * count));
        for (float& value : xs.back()) value = static_cast<float>(random() % 1000);
        RowOperands operands;
        operands.table = node.memory.Upload(routed.table);
        operands.table_count = static_cast<int64_t>(routed.table.size());
        operands.index = node.memory.Upload(combines ? routed.slot[r] : RowsOf(routed, r, false));
        operands.index_count = num_choices;
        if (combines) operands.expert = node.memory.Upload(routed.expert[r]);
        const StatusOr<RowArgs> whole =
            WithBuffers(*made, node.memory.Upload(xs.back()), node.memory.Take(y_rows * row_bytes), operands);
        CHECK(whole.ok());
        args.push_back(*whole);
      }
      node.Run([&](int32_t rank, cudaStream_t stream) { return Launch(args[rank], stream); });
      for (int32_t r = 0; r < kRanks; ++r) {
        // dispatch: the row of each choice in its slot, zeros elsewhere. combine: the sum of the slots of a token.
        std::vector<std::vector<float>> expected(kRanks, std::vector<float>(static_cast<size_t>(y_rows * count)));
        for (int32_t from = 0; from < kRanks; ++from) {
          for (int64_t choice = 0; choice < num_choices; ++choice) {
            if (routed.slot[from][choice] < 0) continue;
            const int32_t home = routed.RankOf(routed.expert[from][choice]);
            const int64_t slot = routed.slot[from][choice] * count, token = choice / routed.choices * count;
            for (int64_t i = 0; i < count; ++i) {
              if (combines) {
                expected[from][token + i] += xs[home][slot + i];
              } else {
                expected[home][slot + i] = xs[from][token + i];
              }
            }
          }
        }
        CHECK(std::memcmp(expected[r].data(), args[r].y, static_cast<size_t>(y_rows * row_bytes)) == 0);
      }
    }
  }
}

// Slices of 1 to 40 rows, packed by peer. `puts`: the output has fewer rows than the operand.
TEST_CASE("all_to_all_v") {
  Node node;
  std::mt19937_64 random(2);
  for (const bool puts : {false, true}) {
    for (const int64_t row_bytes : {1, 60, 4096}) {
      constexpr int64_t kLongest = 40, kPacked = kRanks * kLongest;
      const int64_t x_rows = puts ? 2 * kPacked : kPacked, y_rows = kPacked;
      const auto size = [](int32_t from, int32_t to) { return 1 + (7 * from + 13 * to) % kLongest; };
      std::vector<int32_t> table(kRanks * 4 * kRanks);  // input offsets, sizes, output offsets, sizes to receive
      for (int32_t rank = 0; rank < kRanks; ++rank) {
        for (int32_t peer = 0; peer < kRanks; ++peer) {
          const auto at = [&](int32_t vector) -> int32_t& { return table[(rank * 4 + vector) * kRanks + peer]; };
          at(0) = static_cast<int32_t>(peer * kLongest);
          at(1) = static_cast<int32_t>(size(rank, peer));
          at(2) = static_cast<int32_t>(rank * kLongest);
          at(3) = static_cast<int32_t>(size(peer, rank));
        }
      }
      CallSpec spec;
      spec.collective = Collective::kAllToAllV;
      spec.group_size = kRanks;
      spec.row_count = row_bytes;
      std::vector<SliceArgs> args;
      std::vector<Bytes> xs, expected;
      for (int32_t r = 0; r < kRanks; ++r) {
        StatusOr<SliceArgs> made = MakeSliceArgs(spec, DType::kU8, x_rows * row_bytes, y_rows * row_bytes, kChannels);
        CHECK(made.ok() && ArenaBytes(*made) <= node.arena.stride && Reads(*made) != puts);
        made->comm = node.CommOf(r);
        xs.push_back(Random(x_rows * row_bytes, random));
        expected.push_back(Random(y_rows * row_bytes, random));  // the start value, which stays between slices
        RowOperands operands;
        operands.table = node.memory.Upload(table);
        operands.table_count = static_cast<int64_t>(table.size());
        const StatusOr<SliceArgs> whole =
            WithBuffers(*made, node.memory.Upload(xs.back()), node.memory.Upload(expected.back()), operands);
        CHECK(whole.ok());
        args.push_back(*whole);
      }
      node.Run([&](int32_t rank, cudaStream_t stream) { return Launch(args[rank], stream); });
      for (int32_t r = 0; r < kRanks; ++r) {
        for (int32_t from = 0; from < kRanks; ++from) {
          std::copy_n(xs[from].begin() + r * kLongest * row_bytes, size(from, r) * row_bytes,
                      expected[r].begin() + from * kLongest * row_bytes);
        }
        CHECK(std::equal(expected[r].begin(), expected[r].end(), args[r].y));
      }
    }
  }
}

TEST_CASE("route and dispatch in one exchange") {
  Node node;
  std::mt19937_64 random(3);
  for (const int64_t row_bytes : {16, 2048}) {
    for (const int32_t tokens : {1, 24}) {
      constexpr int32_t kChoices = 3, kExperts = 2 * kRanks;
      const std::vector<std::vector<int32_t>> ids = DrawIds(kRanks, tokens, kChoices, kExperts, random);
      const Routed routed = Route(kRanks, tokens, kChoices, kExperts, 1, 0, 0, ids);
      const RouteAndDispatchShape shape = ShapeOf(routed, 1, 0, row_bytes);
      CallSpec spec;
      spec.group_size = kRanks;
      const StatusOr<RouteAndDispatchArgs> made = MakeRouteAndDispatchArgs(spec, shape, kChannels);
      CHECK(made.ok() && ArenaBytes(*made) <= node.arena.stride);
      std::vector<RouteAndDispatchArgs> args;
      std::vector<Bytes> xs;
      for (int32_t r = 0; r < kRanks; ++r) {
        MoeFields fields = UnwrittenFields(shape, kRanks);
        RouteAndDispatchArgs own = WithComm(*made, node.CommOf(r));
        own.slot = node.memory.Upload(fields.slot);
        own.expert = node.memory.Upload(fields.expert);
        own.group_sizes = node.memory.Upload(fields.group_sizes);
        own.group_counts = node.memory.Upload(fields.group_counts);
        own.demand = node.memory.Upload(fields.demand);
        own.dropped = node.memory.Upload(fields.dropped);
        own.table = node.memory.Upload(fields.table);
        own.ids = node.memory.Upload(ids[r]);
        xs.push_back(Random(tokens * row_bytes, random));
        own.x = node.memory.Upload(xs.back());
        own.y = node.memory.Take(shape.capacity * row_bytes);
        args.push_back(own);
      }
      node.Run([&](int32_t rank, cudaStream_t stream) { return Launch(args[rank], stream); });
      const std::vector<Bytes> expected = Dispatched(routed, xs, row_bytes);
      for (int32_t r = 0; r < kRanks; ++r) {
        const MoeFields fields = FieldsOf(routed, shape, r);
        const auto same = [](const std::vector<int32_t>& want, const int32_t* got) {
          return std::equal(want.begin(), want.end(), got);
        };
        CHECK(same(fields.slot, args[r].slot) && same(fields.expert, args[r].expert));
        CHECK(same(fields.group_sizes, args[r].group_sizes) && same(fields.group_counts, args[r].group_counts));
        CHECK(same(fields.demand, args[r].demand) && same(fields.dropped, args[r].dropped));
        CHECK(same(fields.table, args[r].table));
        CHECK(std::equal(expected[r].begin(), expected[r].end(), args[r].y));
      }
    }
  }
}

// First launches may wait until the device is idle, and streams that share a connection wait for each other.
const bool prepared = [] {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  CHECK_CUDA(Load<RowArgs>());
  CHECK_CUDA(Load<SliceArgs>());
  CHECK_CUDA(Load<RouteAndDispatchArgs>());
  return true;
}();

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
