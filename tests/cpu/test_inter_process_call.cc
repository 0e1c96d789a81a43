// Results of collectives between processes: every algorithm with one and with two copies, and many calls at once in
// different orders.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../recorder/rows.h"
#include "world.h"

namespace jaxcomm {
namespace {

// In a node, with and without plans that pull. Between nodes, the nodes of a plan are nodes or parts of nodes, and
// processes enter in any order, some of them late.
void EveryAlgorithm(World& world, int32_t num_processes, int32_t num_nodes) {
  std::mt19937 random(11);
  uint64_t key = 1000;
  std::vector<std::weak_ptr<InterProcessCall>> entered;
  const std::pair<int, int> shapes[] = {{1, 3}, {1, 8}, {2, 4}, {4, 2}, {1, 5}, {8, 1}, {2, 2}};
  for (const CollectiveTraits& traits : Collectives()) {
    const Collective collective = traits.collective;
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
              entered.push_back(call);
              call->Enter();
              world.progress_thread(p).Add(call);
              if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
            }
            results.ExpectSuccess();
            CHECK(one.outputs == one.expected);
          }
        }
      }
    }
  }
  // A call keeps its call site alive, whose program may have been dropped.
  for (const auto& call : entered) WaitUntil([&] { return call.expired(); });
}

// Each process enters all calls in its own order, from several threads, some of which advance the calls themselves.
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
    results[c]->ExpectSuccess();
    CHECK(calls[c]->outputs == calls[c]->expected);
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

TEST_CASE("many calls at once") {
  for (const int32_t num_processes : {2, 3}) {
    World world(num_processes);
    std::mt19937 random(11);
    for (int round = 0; round < 3; ++round) ManyAtOnce(world, num_processes, random, 1000 + 100 * round);
  }
}

// Process 0 has one rank, and no thread advances its call after the entry barrier. Process 1 ends when 0 has its data.
TEST_CASE("a worker does the work of a large asynchronous call") {
  constexpr int32_t num_processes = 2;
  World world(num_processes);
  std::mt19937 random(11);
  Request request = Sum(num_processes, 1 << 19);
  request.collective = Collective::kAllGather;
  Collective1 one(Named(Collective::kAllGather, "direct"), request, Split(num_processes, num_processes, false), true,
                  random);
  Results results(num_processes);
  const auto first = one.CallOf(world, 0, 1000, results, 60, -1, 1e6, true);
  const auto second = one.CallOf(world, 1, 1000, results);
  first->Enter();
  second->Enter();
  world.progress_thread(1).Add(second);
  CHECK(first->Advance() == InterProcessCall::AdvanceResult::kMoved);
  CHECK(results.WaitFor(1));
  WaitUntil([&] { return Move(*first) || first->over(); });
  results.ExpectSuccess();
  CHECK(one.outputs == one.expected);
}

// The file of the flight recorder has ranks. The group of this call begins at rank 6.
TEST_CASE("the recorder names the rank that waits and its peer, not their positions") {
  Recorder& recorder = Started();
  World world(2);
  std::mt19937 random(15);
  Collective1 one(Named(Collective::kAllReduce, "ring"), Sum(2, 100), {0, 1}, false, random);
  one.first_rank = 6;
  const uint32_t site = recorder.AddSite("psum at test", "ring", 1, 2, {6, 7}, {0, 1});
  one.record = recorder.Begin(site, 1, 0, static_cast<uint32_t>(DType::kS32), 100, 100, Clock::now());
  Results results(2);
  const auto waits = one.CallOf(world, 0, 1000, results), late = one.CallOf(world, 1, 1000, results);
  waits->Enter();
  late->Enter();
  while (waits->Advance() == InterProcessCall::AdvanceResult::kMoved) {
  }
  waits->Check(Clock::now());
  const RecordedRows rows;
  CHECK(rows.begin()->waiting_rank == 1 + 6 && rows.begin()->waiting_peer == 1 + 7);  // 0: none
  world.progress_thread(0).Add(waits);
  world.progress_thread(1).Add(late);
  results.ExpectSuccess();
}

}  // namespace
}  // namespace jaxcomm
