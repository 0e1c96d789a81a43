// Data that cross the network and then a node, and the way back, in all executions that a relaxed memory model and GIN
// allow. So do dispatch and combine between nodes, whose kernels are too large for the model with three ranks.
#include "fakes/litmus_nodes.h"
// Must follow it, as NCCL's headers go before gin.h.
#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;

constexpr int64_t kFrom = 16;  // in the arena; the data arrive at its begin

// Rank 0 of one node puts to rank 2 of another one, whose rank 3 reads the data there after a barrier, and writes what
// rank 2 puts back. The other rank of the first node has no part.
void CheckForward(unsigned threads) {
  Program program;
  const LitmusNodes nodes(program, 2, 2, 32);
  for (const int32_t r : {0, 2, 3}) {
    program.AddBlock(r, 0, r == 3 ? 1 : threads, [r, nodes = &nodes] {
      const device::ThreadGroup block = device::OfBlock();
      const device::Gin gin(nodes->handles[r], nodes->nccl_comms[r]);
      const auto send = [&](int32_t peer) {
        device::Sync(block);
        if (block.rank == 0) {
          Require(gin.Put(0, peer, 0, kFrom, 8), "no put");
          gin.Signal(0, peer);
        }
        Require(gin.Flush(0, block), "no flush");
      };
      for (uint64_t round = 1; round <= 2; ++round) {
        if (r == 0) {
          if (block.rank + 1 == block.size) nodes->arenas.At<uint64_t>(0)[kFrom / 8] = round;
          send(2);
          Require(gin.Wait(0, 2, block) && *nodes->arenas.At<uint64_t>(0) == round, "stale data");
          continue;
        }
        if (r == 2) Require(gin.Wait(0, 0, block), "no signal");
        Require(device::Barrier(nodes->comms[r], 0), "no barrier");
        if (block.rank + 1 == block.size) Require(*nodes->arenas.At<uint64_t>(2) == round, "stale data");
        if (r == 3) nodes->arenas.At<uint64_t>(2)[kFrom / 8] = round;
        Require(device::Barrier(nodes->comms[r], 0), "no barrier");
        if (r == 2) send(0);
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("a rank forwards what its peer has got over the network, and back") {
  for (const unsigned threads : {1u, 2u}) CheckForward(threads);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
