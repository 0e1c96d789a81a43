// Data that cross the network and then a node, in all executions that a relaxed memory model and GIN allow: a rank puts
// to its rail peer in another node and signals; the peer waits and enters the barrier of its node; a third rank passes
// the barrier and reads what came over the network. So do dispatch and combine between nodes, whose kernels are too
// large for the model with three ranks.
#include <vector>

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

// Rank 0 is a node, ranks 1 and 2 are another one.
void CheckForward(unsigned threads, uint64_t rounds) {
  Program program;
  const LitmusNodes nodes(program, {1, 2}, 32);
  for (int32_t r = 0; r < 3; ++r) {
    program.AddBlock(r, 0, r == 1 ? threads : 1, [r, rounds, nodes = &nodes] {
      const device::Comm& node = nodes->comms[r];
      const device::Gin gin(nodes->gins[r], nodes->nccl_comms[r]);
      auto* const own = nodes->arena.At<uint64_t>(r);
      for (uint64_t round = 1; round <= rounds; ++round) {
        if (r == 0) {
          own[kFrom / 8] = round;
          // The peer's node has read the data of the last round.
          if (round > 1) Require(gin.Wait(0, 1, device::OfBlock()), "no signal");
          Require(gin.Put(0, 1, 0, kFrom, 8), "no put");
          gin.Signal(0, 1);
          Require(gin.Flush(0, device::OfBlock()), "no flush");
          continue;
        }
        if (r == 1) Require(gin.Wait(0, 0, device::OfBlock()), "no signal");
        Require(device::Barrier(node, 0), "no barrier");
        if (threadIdx.x + 1 == blockDim.x) Require(*nodes->arena.At<uint64_t>(1) == round, "stale data");
        if (round == rounds) break;
        Require(device::Barrier(node, 0), "no barrier");
        if (r == 1 && threadIdx.x == 0) gin.Signal(0, 0);
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("a rank reads what its peer has got over the network") {
  CheckForward(1, 2);
  CheckForward(2, 2);
}

// The way back: a rank writes to its peer's memory, and the peer puts the data to the other node after the barrier.
TEST_CASE("a rank puts what its peer of the node has written") {
  Program program;
  const LitmusNodes nodes(program, {1, 2}, 32);
  for (int32_t r = 0; r < 3; ++r) {
    program.AddBlock(r, 0, 1, [r, nodes = &nodes] {
      const device::Comm& node = nodes->comms[r];
      const device::Gin gin(nodes->gins[r], nodes->nccl_comms[r]);
      for (uint64_t round = 1; round <= 2; ++round) {
        if (r == 0) {
          Require(gin.Wait(0, 1, device::OfBlock()), "no signal");
          Require(*nodes->arena.At<uint64_t>(0) == round, "stale data");
          if (round == 1) gin.Signal(0, 1);
          continue;
        }
        if (r == 2) nodes->arena.At<uint64_t>(1)[kFrom / 8] = round;
        Require(device::Barrier(node, 0), "no barrier");
        if (r == 1) {
          if (round == 2) Require(gin.Wait(0, 0, device::OfBlock()), "no signal");
          Require(gin.Put(0, 0, 0, kFrom, 8), "no put");
          gin.Signal(0, 0);
          Require(gin.Flush(0, device::OfBlock()), "no flush");
        }
        if (round == 1) Require(device::Barrier(node, 0), "no barrier");
      }
    });
  }
  ExpectSound(program);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
