// Collectives between processes give the right results: every algorithm with one and with two copies, many calls at
// once in different orders.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "world.h"

namespace jaxcomm {
namespace {

// Within a node with and without pulling plans. Between nodes, those of a plan are nodes or parts of them, and
// processes enter in any order, some of them late.
void EveryAlgorithm(World& world, int32_t num_processes, int32_t num_nodes) {
  std::mt19937 random(11);
  uint64_t key = 1000;
  const std::pair<int, int> shapes[] = {{1, 3}, {1, 8}, {2, 4}, {4, 2}, {1, 5}, {8, 1}, {2, 2}};
#define JAXCOMM_COLLECTIVE(enumerator, name, handler) Collective::enumerator,
  for (const Collective collective : {
#include "../../ffi/collectives.def"
       }) {
#undef JAXCOMM_COLLECTIVE
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const auto& [nodes, ranks_per_node] : shapes) {
        if (nodes % num_nodes != 0) continue;
        for (const int64_t block_count : {0, 7, 9000}) {
          for (const bool pull : {true, false}) {
            Request request;
            request.collective = collective;
            request.geometry = {nodes, ranks_per_node, num_nodes == 1, pull};
            request.block_count = collective == Collective::kBarrier ? 0 : block_count;
            request.chunk_count = block_count / 3;
            const int32_t n = request.geometry.num_ranks();
            request.root = static_cast<int32_t>(random() % n);
            for (int32_t r = 0; r < n && collective == Collective::kPermute; ++r) {
              request.source_of.push_back(static_cast<int32_t>(random() % (n + 1)) - 1);
            }
            if (!algorithm.supports(request)) continue;
            const bool interleaved = num_nodes == 1 && random() % 2;
            Collective1 one(algorithm, request, Split(n, num_processes, interleaved), random() % 2, random, &world,
                            num_processes);
            Results results(num_processes);
            ++key;
            std::vector<int32_t> order;
            for (int32_t p = 0; p < num_processes; ++p) order.push_back(p);
            std::shuffle(order.begin(), order.end(), random);
            for (const int32_t p : order) {
              auto call = one.CallOf(world, p, key, results);
              call->Enter();
              world.progress_thread(p).Add(call);
              if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
            }
            CHECK(results.WaitFor(num_processes));
            for (int32_t p = 0; p < num_processes; ++p) CHECK(results.error(p).empty());
            CHECK(one.outputs == one.expected);
          }
        }
      }
    }
  }
}

// Each process enters all calls in an order of its own, from several threads, some of which move the calls themselves.
void ManyAtOnce(World& world, int32_t num_processes, std::mt19937& random, uint64_t first) {
  constexpr int kCalls = 40;
  std::vector<std::unique_ptr<Collective1>> calls;
  std::vector<std::unique_ptr<Results>> results;
  const char* names[] = {"direct", "ring", "recursive_doubling", "root"};
  for (int c = 0; c < kCalls; ++c) {
    const int32_t n = num_processes * (1 + c % 2);
    calls.push_back(std::make_unique<Collective1>(Named(Collective::kAllReduce, names[c % 4]),
                                                  Sum(n, c % 3 == 0 ? 20000 : 50), Split(n, num_processes, c % 5 == 0),
                                                  c % 2 == 0, random));
    results.push_back(std::make_unique<Results>(num_processes));
  }
  std::vector<std::thread> threads;
  for (int32_t p = 0; p < num_processes; ++p) {
    for (int half = 0; half < 2; ++half) {
      std::vector<int> order;
      for (int c = half; c < kCalls; c += 2) order.push_back(c);
      std::shuffle(order.begin(), order.end(), random);
      threads.emplace_back([&, p, order] {
        for (const int c : order) {
          auto call = calls[c]->CallOf(world, p, first + c, *results[c]);
          call->Enter();
          for (int i = 0; i < c && !call->over(); ++i) call->Advance(0);
          world.progress_thread(p).Add(call);
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  for (int c = 0; c < kCalls; ++c) {
    CHECK(results[c]->WaitFor(num_processes));
    for (int32_t p = 0; p < num_processes; ++p) CHECK(results[c]->error(p).empty());
    CHECK(calls[c]->outputs == calls[c]->expected);
  }
}

void ManyAtOnce(int num_rounds, unsigned seed) {
  for (const int32_t num_processes : {2, 3}) {
    World world(num_processes);
    std::mt19937 random(seed);
    for (int round = 0; round < num_rounds; ++round) ManyAtOnce(world, num_processes, random, 1000 + 100 * round);
  }
}

TEST_CASE("every algorithm between processes of a node") {
  for (const int32_t num_processes : {2, 3}) {
    World world(num_processes);
    EveryAlgorithm(world, num_processes, 1);
  }
}

TEST_CASE("every algorithm between two nodes of two processes") {
  World world(4, 2, 5);
  EveryAlgorithm(world, 4, 2);
}

TEST_CASE("many calls at once") { ManyAtOnce(3, 11); }

TEST_CASE("many calls at once, many rounds [full]") { ManyAtOnce(50, 12); }

// Nobody keeps a call that is over: it holds on to its call site, which may be that of a program that has been dropped.
TEST_CASE("calls that are over are let go") {
  constexpr int32_t num_processes = 3;
  World world(num_processes);
  std::mt19937 random(11);
  Collective1 one(Named(Collective::kAllReduce, "ring"), Sum(num_processes, 50),
                  Split(num_processes, num_processes, false), false, random);
  Results results(num_processes);
  std::vector<std::weak_ptr<InterProcessCall>> calls;
  for (int32_t p = 0; p < num_processes; ++p) {
    auto call = one.CallOf(world, p, 1000, results);
    calls.push_back(call);
    call->Enter();
    world.progress_thread(p).Add(std::move(call));
  }
  CHECK(results.WaitFor(num_processes));
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(60);
  for (const auto& call : calls) {
    while (!call.expired() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(call.expired());
  }
}

}  // namespace
}  // namespace jaxcomm
