// The test double: the contract of a network, and what the double adds (virtual time, delays, losses, strangers).
#include <chrono>
#include <random>

#include "memory_network.h"
#include "network_contract.h"

namespace jaxcomm {
namespace {

constexpr uint64_t kToken = 0x1234567890abcdef;

// A fabric outlives its networks: it is kept here until the next. Never destroyed by a failed check's exit, which may
// run on its own thread.
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

MakeNetwork OnFabric(MemoryFabric& fabric) {
  return [&](int process, int, uint64_t token, Receiver* receiver) { return fabric.Attach(process, token, receiver); };
}

void Drain(MemoryFabric& fabric) {
  while (fabric.Step()) {
  }
}

// One thread sends and steps: the trace of deliveries is the same for the same seed. Returns it.
std::vector<std::string> Trace(uint64_t seed, int64_t jitter_ns) {
  constexpr int kProcesses = 4;
  MemoryNetworkOptions options;
  options.jitter_ns = jitter_ns;
  options.seed = seed;
  MemoryFabric fabric(kProcesses, options);
  Processes processes = JoinAll(OnFabric(fabric), kProcesses, TestProcess::Place::kAtOnce);
  std::vector<std::string> trace;
  for (int q = 0; q < kProcesses; ++q) {
    processes[q]->on_delivered = [&, q](const Message& message) {
      trace.push_back(std::to_string(fabric.now_ns()) + " " + std::to_string(message.process) + ">" +
                      std::to_string(q) + " " + std::to_string(message.id));
    };
  }
  std::mt19937 random(1);
  for (uint64_t index = 0; index < 40; ++index) {
    for (int p = 0; p < kProcesses; ++p) {
      for (int q = 0; q < kProcesses; ++q) {
        if (p != q) processes[p]->Send(q, 0, index, SomeSize(random) % 20000);
      }
    }
    for (int i = 0; i < 20; ++i) fabric.Step();
  }
  Drain(fabric);
  for (auto& process : processes) CHECK(process->delivered() == 40 * (kProcesses - 1));
  return trace;
}

TEST_CASE("order of small and large messages") {
  for (const auto place : {TestProcess::Place::kAtOnce, TestProcess::Place::kLater, TestProcess::Place::kMixed}) {
    CheckOrder(MakeMemoryNetwork, place);
  }
}

TEST_CASE("channels pass each other, unwanted messages are dropped") { CheckChannels(MakeMemoryNetwork); }

TEST_CASE("many threads send at once") { CheckManyThreads(MakeMemoryNetwork); }

TEST_CASE("a process leaves after its last message") { CheckLeaving(MakeMemoryNetwork); }

TEST_CASE("a process leaves in the middle") { CheckLeavingEarly(MakeMemoryNetwork); }

TEST_CASE("a peer is cut off in the middle of a payload") { CheckDrop(MakeMemoryNetwork); }

TEST_CASE("a wrong token is refused and counted") { CheckToken(MakeMemoryNetwork); }

TEST_CASE("the seed fixes what happens") {
  CHECK(Trace(1, 200'000) == Trace(1, 200'000));
  CHECK(Trace(1, 200'000) != Trace(2, 200'000));
}

// Time of a transfer: latency + bytes / bandwidth; a slow peer's messages take longer, others pass them.
TEST_CASE("latency, bandwidth and delay") {
  MemoryNetworkOptions options;
  options.latency_ns = 1000;
  options.bytes_per_ns = 0.5;
  options.eager_bytes = 1 << 20;
  MemoryFabric fabric(3, options);
  Processes processes = JoinAll(OnFabric(fabric), 3, TestProcess::Place::kAtOnce);
  std::vector<std::pair<int, int64_t>> delivered;
  processes[2]->on_delivered = [&](const Message& message) { delivered.push_back({message.process, fabric.now_ns()}); };
  processes[0]->Send(2, 0, 0, 100000);
  Drain(fabric);
  CHECK(delivered.size() == 1 && delivered[0].second == 201000);
  fabric.Delay(0, 5'000'000);
  processes[0]->Send(2, 0, 1, 0);
  processes[1]->Send(2, 0, 0, 0);
  Drain(fabric);
  CHECK(delivered.size() == 3 && delivered[1].first == 1 && delivered[2].first == 0);
  CHECK(delivered[2].second == 201000 + 5'001'000);
}

// A process dies while large payloads of it are waited for, on their way, or neither.
TEST_CASE("a process dies at any moment") {
  for (int steps = 0; steps < 60; ++steps) {
    MemoryNetworkOptions options;
    options.jitter_ns = 10'000;
    options.seed = steps;
    MemoryFabric fabric(3, options);
    Processes processes = JoinAll(OnFabric(fabric), 3, TestProcess::Place::kMixed);
    for (uint64_t index = 0; index < 5; ++index) {
      for (int p = 0; p < 3; ++p) {
        for (int q = 0; q < 3; ++q) {
          if (p != q) processes[p]->Send(q, 0, index, index % 2 * 50000);
        }
      }
    }
    for (int i = 0; i < steps; ++i) {
      fabric.Step();
      if (i % 7 == 0) {
        for (auto& process : processes) process->AcceptAll();
      }
    }
    fabric.Lose(1);
    Drain(fabric);
    for (const int p : {0, 2}) processes[p]->AcceptAll();
    Drain(fabric);
    for (const int p : {0, 2}) {
      CHECK(!processes[p]->why_lost(1).empty());
      CHECK(processes[p]->why_lost(2 - p).empty());
      CHECK(processes[p]->delivered() >= 5);  // all of the other survivor's
      CHECK(processes[p]->WaitSent(10));
    }
    processes[1]->Leave();
    CHECK(processes[1]->WaitSent(10));
  }
}

TEST_CASE("bytes of strangers are refused and counted") {
  MemoryFabric fabric(2, {});
  Processes processes = JoinAll(OnFabric(fabric), 2, TestProcess::Place::kAtOnce);
  std::mt19937 random(3);
  uint64_t injected = 0;
  for (int i = 0; i < 1000; ++i, ++injected) {
    std::string bytes(random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    // Some know the token and nothing else.
    if (i % 2 == 0 && bytes.size() >= sizeof(kToken)) std::memcpy(&bytes[0], &kToken, sizeof(kToken));
    fabric.Inject(0, bytes);
  }
  processes[1]->Send(0, 0, 0, 1000);
  Drain(fabric);
  CHECK(processes[0]->network().rejected() == injected);
  CHECK(processes[0]->delivered() == 1 && processes[0]->why_lost(1).empty());
}

}  // namespace
}  // namespace jaxcomm
