// Kernels of users between nodes: the functions of gin.h, and the all-gather of the documentation, over a network that
// guarantees no more than GIN. Ranks are emulated.
#include <cstring>
#include <functional>
#include <random>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/gin_cluster.h"
#include "node_all_gather.cuh"
// clang-format on
#include "../check.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Calls one after the other on an arena that launches with different grids share. Each rank's counts of rounds must
// stay.
void TestAllGather(uint64_t seed, int32_t num_nodes, int32_t ranks_per_node) {
  std::mt19937_64 random(seed);
  constexpr int32_t kChannels = 3, kGrids[] = {3, 1, 3};
  constexpr int64_t kChunkBytes = 32;
  constexpr int64_t kBytes[] = {0, 1, 31, 64, 150};
  device::Comm sizes;
  sizes.world.size = num_nodes * ranks_per_node;
  sizes.signals.num_channels = kChannels;
  GinCluster cluster(num_nodes, ranks_per_node, kChannels, node_all_gather::ArenaBytes(sizes, kChunkBytes), seed);
  HostMemory memory;
  uint64_t rounds[kChannels] = {};
  for (const int32_t blocks : kGrids) {
    std::vector<std::vector<node_all_gather::Args>> calls(3);
    for (auto& call : calls) {
      const int64_t bytes = kBytes[random() % 5];
      for (int64_t chunk = 0; chunk * kChunkBytes < bytes; ++chunk) ++rounds[chunk % blocks];
      for (int32_t r = 0; r < cluster.n; ++r) {
        std::vector<char> x(bytes);
        for (char& byte : x) byte = static_cast<char>(1 + random() % 100);
        node_all_gather::Args args;
        args.comm = cluster.comms[r];
        args.gin = cluster.handles[r];
        args.x = memory.Upload(x);
        args.y = memory.Take(cluster.n * bytes);
        args.bytes = bytes;
        args.chunk_bytes = kChunkBytes;
        call.push_back(args);
      }
    }
    // Without a wait between calls, ranks are in different ones.
    cluster.Launch(blocks, 5, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      for (const auto& call : calls) {
        const uint64_t late = (seed + 7 * rank) % 5 * 20;
        for (uint64_t i = 0; i < late; ++i) emulation::Pause();
        node_all_gather::Run(call[rank], nccl_comm);
        __syncthreads();
      }
    });
    CHECK(cluster.all_well());
    for (const auto& call : calls) {
      for (const auto& at : call) {
        for (const auto& from : call) {
          CHECK(std::memcmp(at.y + from.comm.world.rank * at.bytes, from.x, at.bytes) == 0);
        }
      }
    }
    for (int32_t r = 0; r < cluster.n; ++r) CHECK(std::memcmp(cluster.arenas.At(r), rounds, sizeof(rounds)) == 0);
  }
}

TEST_CASE("an all-gather over nodes") {
  uint64_t seed = FirstSeed();
  for (int repeat = 0; repeat < 12; ++repeat) {
    TestAllGather(++seed, 2, 2);
    TestAllGather(++seed, 3, 1);
    TestAllGather(++seed, 1, 3);
  }
}

// Rank 0 puts 20 words from the same place, and changes it once the network has read it. It then puts more bytes than
// may be outstanding, which the fake of GIN refuses.
TEST_CASE("a source may change after a flush, and puts wait for earlier ones") {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    GinCluster cluster(2, 1, 2, 280, seed);
    const bool group = seed % 2 == 0;
    cluster.Launch(2, 3, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      const device::Gin gin(cluster.handles[rank], nccl_comm);
      const auto channel = static_cast<int32_t>(blockIdx.x);
      if (rank == 0) {
        uint32_t* const source = cluster.arenas.At<uint32_t>(0) + channel;
        for (uint32_t i = 0; i < 20; ++i) {
          if (threadIdx.x == 0) {
            *source = 100 * channel + i;
            CHECK(gin.Put(channel, 1, 40 + 4 * (20 * channel + i), 4 * channel, 4));
            CHECK(gin.Put(channel, 1, 0, 0, 0));
            if (!group) CHECK(gin.Flush(channel));
          }
          if (group) CHECK(gin.Flush(channel, device::OfBlock()));
        }
        for (int i = 0; threadIdx.x == 0 && i < 40; ++i) {
          CHECK(gin.Put(channel, 1, 200 + 40 * channel + i, 4 * channel, 1));
        }
        if (threadIdx.x == 0) gin.Signal(channel, 1);
      } else if (gin.Wait(channel, 0, device::OfBlock())) {
        for (int i = 0; i < 40; ++i) {
          CHECK(cluster.arenas.At(1)[200 + 40 * channel + i] == *cluster.arenas.At(0, 4 * channel));
        }
        for (uint32_t i = threadIdx.x; i < 20; i += blockDim.x) {
          CHECK(cluster.arenas.At<uint32_t>(1, 40)[20 * channel + i] == 100 * channel + i);
        }
      }
    });
    for (const int channel : {0, 1}) CHECK(cluster.handles[0].puts[channel] == 60);  // none of them is empty
    CHECK(cluster.all_well());
  }
}

// A signal in front of and behind each put, or as many signals ahead of an answer as a kernel may have. The fake of GIN
// refuses more entries than NCCL's queue has.
TEST_CASE("puts with signals leave room in a queue that stands still") {
  for (const bool in_turn : {true, false}) {
    GinCluster cluster(2, 1, 1, 64, 1);
    cluster.network.Stall();
    cluster.Launch(1, 1, 1, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      if (rank == 1) return;
      const device::Gin gin(cluster.handles[rank], nccl_comm);
      for (int64_t i = in_turn ? 1 : device::Gin::kMostUnanswered; i > 0; --i) gin.Signal(0, 1);
      int puts = 0;
      for (; puts < 40 && gin.Put(0, 1, 0, 0, 1); ++puts) {
        if (in_turn) gin.Signal(0, 1);
      }
      CHECK(puts == device::Gin::kMostPuts);
    });
    const size_t posted = cluster.network.num_posted({0, 0, 1});
    CHECK(posted == 15 && static_cast<int64_t>(posted) <= device::kMostEntries);
  }
}

// The signal comes after the time limit of its wait: later waits of the channel must not take it for theirs.
TEST_CASE("a channel that has aborted counts no signal") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    GinCluster cluster(2, 1, 1, 64, seed);
    cluster.Launch(1, 1, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      const device::Gin gin(cluster.handles[rank], nccl_comm);
      if (rank == 0) {
        while (device::LoadAcquire(&cluster.reports[1].state) == device::Report::kNone) emulation::Pause();
        return gin.Signal(0, 1);
      }
      CHECK(!gin.Wait(0, 0));
      while (ncclGin(nccl_comm, 0).readSignal(0) == 0) emulation::Pause();
      CHECK(!gin.Wait(0, 0));
    });
  }
}

// The network stops. Every call of the channel then ends at once, and nothing more is posted.
TEST_CASE("a channel that has aborted neither puts nor signals") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    GinCluster cluster(2, 1, 2, 64, seed);
    cluster.network.Stall();
    const uint64_t begin = emulation::NowNs();
    cluster.Launch(1, 1, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      const device::Gin gin(cluster.handles[rank], nccl_comm);
      if (rank == 0) {
        CHECK(!gin.Wait(0, 1, 7));
        const uint64_t ended = emulation::NowNs();
        gin.Signal(0, 1);
        CHECK(!gin.Put(0, 1, 0, 0, 1) && !gin.Wait(0, 1, 8) && !gin.Flush(0));
        CHECK(emulation::NowNs() - ended < kGinTimeoutNs / 2);
        return;
      }
      int puts = 0;
      while (puts < 40 && gin.Put(0, 0, 0, 0, 1)) ++puts;
      CHECK(puts == device::Gin::kMostPuts && !gin.Flush(0));
    });
    CHECK(emulation::NowNs() - begin < 4 * kGinTimeoutNs);
    CHECK(cluster.handles[0].puts[0] == 0 && cluster.network.num_posted({0, 0, 1}) == 0);
    const device::Report& sender = cluster.reports[1];
    CHECK(sender.state == device::Report::kComplete && sender.step == device::kFlushStep && sender.peer == 1);
    CHECK(sender.expected == 1 && sender.seen == 0);
    const device::Report& receiver = cluster.reports[0];
    CHECK(receiver.state == device::Report::kComplete && receiver.step == 7 && receiver.peer == 1);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
