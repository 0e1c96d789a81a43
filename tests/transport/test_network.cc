// The fake network keeps the contract of Network.

#include "memory_network.h"
#include "network_contract.h"

namespace jaxcomm {
namespace {

// A fabric must outlive its networks: it is kept here until the next one. It is never destroyed when a failed check
// exits, because that may happen on the fabric's own thread.
std::unique_ptr<MemoryFabric>& fabric = *new std::unique_ptr<MemoryFabric>;

std::unique_ptr<Network> MakeMemoryNetwork(int process, int num_processes, uint64_t token, Receiver* receiver) {
  if (process == 0) {
    MemoryNetworkOptions options;
    options.jitter_ns = 100'000;
    fabric = std::make_unique<MemoryFabric>(num_processes, options);
    fabric->Start();
  }
  return fabric->Attach(process, token, receiver);
}

TEST_CASE("order of small and large messages") {
  for (const auto place : {TestProcess::Place::kAtOnce, TestProcess::Place::kLater, TestProcess::Place::kMixed}) {
    CheckOrder(MakeMemoryNetwork, place);
  }
}

TEST_CASE("channels do not delay each other, and messages can be dropped") { CheckChannels(MakeMemoryNetwork); }

TEST_CASE("many threads send at once") { CheckManyThreads(MakeMemoryNetwork); }

TEST_CASE("a process leaves after its last message") { CheckLeaving(MakeMemoryNetwork); }

TEST_CASE("a process leaves in the middle") { CheckLeavingEarly(MakeMemoryNetwork); }

TEST_CASE("a peer is dropped in the middle of a payload") { CheckDrop(MakeMemoryNetwork); }

TEST_CASE("messages with a wrong token are dropped and counted") { CheckToken(MakeMemoryNetwork); }

}  // namespace
}  // namespace jaxcomm
