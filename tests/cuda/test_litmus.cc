// Protocols of the device API and of the kernels, in all executions that a relaxed memory model allows: fakes/litmus.h
// replaces the emulation. Each program is as small as the protocol's mistakes allow.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../ffi/cuda/kernels/exchange_offsets.cuh"
#include "../../ffi/include/jaxcomm/device.h"
#include "../../ffi/plan/staging.h"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;

// Outcomes that the model allows or forbids: (store buffering, message passing, coherence, 2+2W), as in C++11.
TEST_CASE("the model: outcomes of known programs") {
  using memory_model::kRelaxed;
  using memory_model::kSystem;
  struct Known {
    const char* name;
    std::vector<std::vector<int>> threads;  // store: word * 10 + value; load: -1 - word
    std::vector<uint64_t> loads;
    bool allowed;
  };
  const std::vector<Known> all = {
      {"store buffering", {{1, -2}, {11, -1}}, {0, 0}, true},
      {"message passing", {{1, 11}, {-2, -1}}, {1, 0}, true},
      {"coherence of reads", {{1, 2}, {-1, -1}}, {2, 1}, false},
      {"independent reads", {{1}, {11}, {-1, -2}, {-2, -1}}, {1, 0, 1, 0}, true},
      {"coherence of writers", {{1}, {2}, {-1, -1}, {-1, -1}}, {1, 2, 2, 1}, false},
      {"2+2W", {{1, 12}, {11, 2}, {-1, -1}, {-2, -2}}, {2, 1, 2, 1}, true},
  };
  for (const Known& known : all) {
    Program program;
    auto* const words = program.Words<uint64_t>(2, "words");
    auto* const seen = program.Words<uint64_t>(8, "seen");
    int first = 0;
    for (size_t t = 0; t < known.threads.size(); ++t) {
      const std::vector<int>* const steps = &known.threads[t];
      program.AddBlock(static_cast<int>(t), 0, 1, [=] {
        int slot = first;
        for (const int step : *steps) {
          if (step > 0) {
            memory_model::Store(words + step / 10, static_cast<uint64_t>(step % 10), kSystem, kRelaxed);
          } else {
            seen[slot++] = memory_model::Load(words + (-1 - step), kSystem, kRelaxed);
          }
        }
      });
      for (const int step : *steps) first += step < 0;
    }
    program.check = [&]() -> std::string {
      return std::equal(known.loads.begin(), known.loads.end(), seen) ? "found" : "";
    };
    const memory_model::Result result = Explore(program);
    if ((result.fault.rfind("found", 0) == 0) != known.allowed) std::fprintf(stderr, "%s\n", known.name);
    CHECK((result.fault.rfind("found", 0) == 0) == known.allowed && result.exhaustive != known.allowed);
  }
}

TEST_CASE("offsets exchange") {
  constexpr int32_t kRanks = 2;
  Program program;
  LitmusRanks ranks(program, kRanks, 1);
  const device::Window table = ranks.Window(program, OffsetTableBytes(kRanks), "table");
  auto* const own = program.Words<BufferPlace>(2 * kRanks, "own");
  auto* const at = program.Words<int64_t>(2 * kRanks * kRanks, "at");
  ranks.AddBlocks(program, 1, 2, [=](const device::Comm& comm) {
    const int32_t rank = comm.local.rank;
    for (int64_t call = 1; call <= 3; ++call) {
      BufferPlace* const mine = own + 2 * rank;
      if (threadIdx.x == 0) mine[0] = {10 * call + rank, 1000}, mine[1] = {-10 * call - rank, 2000};
      memory_model::EndKernel();
      int64_t* const found = at + 2 * kRanks * rank;
      ExchangeOffsets({comm, table, mine, found, call == 2 ? 1 : 2});
      memory_model::EndKernel();
      for (const int32_t r : {0, 1}) Require(found[r] == 1000 + 10 * call + r, "offset of another call");
      Require(call == 2 || found[kRanks + 1 - rank] == 2000 - 10 * call - 1 + rank, "offset of another call");
      memory_model::EndKernel();
    }
  });
  ExpectSound(program);
}

// Exchanges in which every rank sends one unit per thread to every other one. `first`: number of exchanges before.
void RunLlExchanges(int32_t n, unsigned num_threads, uint64_t first, uint64_t num_exchanges) {
  Program program;
  LitmusRanks ranks(program, n, 1, static_cast<int32_t>(num_threads));
  for (int32_t r = 0; r < n; ++r) *ranks.comm(r).ll_slots.epochs = first;
  ranks.AddBlocks(program, 1, num_threads, [=](const device::Comm& comm) {
    const auto unit = static_cast<int32_t>((threadIdx.x + 1) % blockDim.x);  // sweeps begin with that of the thread
    for (uint64_t i = 1; i <= num_exchanges; ++i) {
      const auto payload = [&](int32_t rank) { return (i << 32 | 7) + 16 * static_cast<uint64_t>(rank) + threadIdx.x; };
      device::LlExchange exchange;
      Require(device::BeginLlExchange(comm, 0, &exchange), "no begin");
      for (int32_t s = 1; s < n; ++s) {
        device::SendUnit(comm, exchange, (comm.local.rank + s) % n, unit, payload(comm.local.rank));
      }
      uint64_t payloads[2];
      const auto from = [&](int k) { return device::LlUnit{(comm.local.rank + 1 + k) % n, unit}; };
      const bool received = device::ReceiveUnits<2>(comm, exchange, n - 1, from, payloads);
      Require(device::EndLlExchange(comm, exchange, received), "no end");
      for (int32_t k = 0; k < n - 1; ++k) Require(payloads[k] == payload(from(k).peer), "payload of another exchange");
    }
  });
  ExpectSound(program);
}

// Two sets of slots suffice: four exchanges use each set twice.
TEST_CASE("LL messages") {
  RunLlExchanges(2, 1, 0, 4);
  RunLlExchanges(2, 2, 0, 3);
  RunLlExchanges(3, 1, 0, 3);
}

TEST_CASE("LL messages when slots are swept") { RunLlExchanges(2, 2, (uint64_t{1} << 29) - 2, 4); }

// Threads wait for peers that never signal: two of one block, or two blocks, of which the second begins at any time.
// The host reads the report and may also end the waits.
void WaitInVain(unsigned num_blocks, unsigned num_threads, bool by_host) {
  Program program;
  program.times_out = true;
  LitmusRanks ranks(program, 1 + static_cast<int32_t>(num_threads), 2);
  device::Comm& comm = ranks.comm(0);
  comm.call_id = 5;
  auto* const aborted = program.Words<uint64_t>(1, "aborted");
  program.AddBlock(0, 0, num_threads, [=, &comm] {
    Require(!device::Barrier(comm, 0), "a barrier without peers has ended");
    Require(device::IsAborted(comm), "the next kernel begins");
    if (threadIdx.x == 0) *aborted = 1;
  });
  if (num_blocks == 2) {
    program.AddBlock(0, 1, 1, [&comm] {
      if (!device::IsAborted(comm)) Require(!device::Wait(comm, 1, 1), "a wait without a peer has ended");
    });
  }
  program.AddBlock(-1, 0, 1, [=, &comm] {
    if (by_host) memory_model::Store(&comm.report->abort, 1, memory_model::kSystem, memory_model::kRelease);
    if (memory_model::Load(&comm.report->state, memory_model::kSystem, memory_model::kAcquire) !=
        device::Report::kComplete) {
      return;
    }
    Require(comm.report->call_id == 5 && comm.report->peer != 0 && comm.report->expected == 1, "half a report");
  });
  program.check = [=]() -> std::string { return *aborted == 1 ? "" : "not aborted"; };
  ExpectSound(program);
}

TEST_CASE("waits without a signal end") {
  for (const bool by_host : {false, true}) {
    WaitInVain(1, 2, by_host);
    WaitInVain(2, 1, by_host);
  }
}

// One signal per iteration states that a chunk is in its slot and that the chunks of peers have been read
// (ffi/plan/staging.h). Rank 0 writes one chunk more than there are slots. With fewer slots, it may overwrite a chunk
// that rank 1 still reads.
TEST_CASE("a staging ring") {
  for (const int64_t slots : {kStagingSlots, kStagingSlots - 1}) {
    Program program;
    const LitmusRanks ranks(program, 2, 1);
    const device::Window ring = ranks.Window(program, slots * int64_t{sizeof(int64_t)}, "ring");
    ranks.AddBlocks(program, 1, 1, [=](const device::Comm& comm) {
      const int64_t num_chunks = slots + 1, num_iterations = num_chunks + kStagingLead;
      const int32_t rank = comm.local.rank, peer = 1 - rank;
      auto* const chunks = ring.At<int64_t>(0);
      for (int64_t t = 0; t < num_iterations; ++t) {
        if (t >= kStagingLead) Require(device::Wait(comm, 0, peer), "a wait that ends early");
        if (rank == 0 && t < num_chunks) chunks[t % slots] = t;
        const int64_t read = t - kStagingLead;
        if (rank == 1 && read >= 0) Require(chunks[read % slots] == read, "a wrong chunk");
        if (t + kStagingLead < num_iterations) device::Signal(comm, 0, peer);
      }
    });
    if (slots == kStagingSlots) {
      ExpectSound(program);
    } else {
      CHECK(!Explore(program).fault.empty());
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
