// Bulk copies, emulated: random ranges through rings of all shapes, where every instruction takes as long as it may. No
// byte beside a range changes. A load that never ends is reported.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "../../ffi/cuda/kernels/bulk_copy.cuh"
#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/node_group.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr BulkStages kShapes[] = {{2, 16}, {4, 64}, {8, 32}, {32, 256}, {0, 0}};
constexpr char kUnwritten = 0x5a;

struct Ranges {
  std::vector<device::CopyRange> all;
  Bytes to, from, expected;
  int64_t most_bytes = 0;
};

// Ranges that lie at any address. Half of the draws have equal remainders modulo 16 on both sides everywhere.
Ranges Draw(std::mt19937_64& random) {
  Ranges drawn;
  const uint64_t num = random() % 6, longest = random() % 3 == 0 ? 12000 : 300;
  const bool even = random() % 2 == 0;
  drawn.from.resize(num * (longest + 64) + 64);
  drawn.to.assign(drawn.from.size(), kUnwritten);
  for (char& byte : drawn.from) byte = static_cast<char>(random());
  drawn.expected = drawn.to;
  for (uint64_t i = 0; i < num; ++i) {
    const uint64_t begin = i * (longest + 64), shift = random() % 32;
    const uint64_t other = even || random() % 2 == 0 ? shift + 16 * (random() % 2) : random() % 48;
    const auto bytes = static_cast<int64_t>(random() % (longest + 1));
    const device::CopyRange range = {drawn.to.data() + begin + other, drawn.from.data() + begin + shift, bytes};
    std::copy_n(range.src, bytes, drawn.expected.begin() + (range.dst - drawn.to.data()));
    drawn.all.push_back(range);
    drawn.most_bytes = std::max(drawn.most_bytes, bytes);
  }
  return drawn;
}

int num_bulk = 0;

void RunCopies(uint64_t seed) {
  std::mt19937_64 random(seed);
  const NodeGroup group(1, 2);
  const BulkStages stages = kShapes[random() % 5];
  std::vector<Ranges> rounds;
  for (int i = 0; i < 4; ++i) rounds.push_back(Draw(random));
  const bool one_by_one = random() % 3 == 0;
  constexpr unsigned kThreads[] = {1, 3, 8, 40};
  const device::Comm comm = group.CommOf(0);
  emulation::Launch(
      1, 1, kThreads[random() % 4], seed,
      [&] {
        const BulkCopies copies(comm, 1, stages, device::DynamicShared());
        for (const Ranges& round : rounds) {
          const auto num = static_cast<int32_t>(round.all.size());
          for (const device::CopyRange& range : round.all) {
            if (one_by_one) copies.Copy(range.dst, range.src, range.bytes);
            const bool pays = one_by_one ? copies.Pays(1, range.bytes) : copies.Pays(num, round.most_bytes);
            if (threadIdx.x == 0) num_bulk += pays && copies.Takes(range);
          }
          if (!one_by_one) copies.CopyRanges(num, round.most_bytes, [&](int32_t i) { return round.all[i]; });
          __syncthreads();
          // The next kernel of the stream sees these bytes.
          if (threadIdx.x == 0) CHECK(round.to == round.expected);
        }
      },
      static_cast<size_t>(BulkSharedBytes(stages)));
  CHECK(group.report(0).state == device::Report::kNone);
}

TEST_CASE("ranges at any address through rings of all shapes") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 150; ++seed) RunCopies(seed);
  CHECK(num_bulk > 300);
}

TEST_CASE("many copies [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 9000; ++seed) RunCopies(seed);
}

TEST_CASE("a load that never ends") {
  const NodeGroup group(1, 2, 100'000);
  const BulkStages stages = {2, 64};
  Bytes from(1024, 'a'), to(1024, kUnwritten);
  const device::Comm comm = group.CommOf(0);
  emulation::TheMachine().loses_loads = true;
  emulation::TheMachine().now_ns = 0;
  emulation::Launch(
      1, 1, 2, FirstSeed(),
      [&] {
        const BulkCopies copies(comm, 1, stages, device::DynamicShared());
        copies.Copy(to.data(), from.data(), 1024);
        __syncthreads();
        CHECK(device::NowNs() < 200'000);  // one limit for all pieces
        CHECK(device::IsChannelAborted(comm, 1) && !device::IsChannelAborted(comm, 0));
      },
      static_cast<size_t>(BulkSharedBytes(stages)));
  emulation::TheMachine().loses_loads = false;
  CHECK(to == Bytes(1024, kUnwritten));
  CHECK(FailureText(group.report(0), "psum at f.py:3", 2.5) ==
        "psum at f.py:3: rank 0 aborted: a bulk copy of 64 bytes in channel 1 did not end within 2.5 s "
        "(JAXCOMM_TIMEOUT_S)");
}

// Bulk copies need half a ring of bytes, and ranges of a quarter of a stage.
TEST_CASE("the shortest bulk copies") {
  const NodeGroup group(1, 2);
  const device::Comm comm = group.CommOf(0);
  constexpr int64_t kHalf = 64 << 10;
  for (const auto& [stages, least] : {std::pair{kPlanStages, 4096}, std::pair{kSliceStages, 1024}}) {
    const auto check = [&, &stages = stages, &least = least] {
      const BulkCopies copies(comm, 1, stages, device::DynamicShared());
      CHECK(copies.Pays(1, kHalf) && !copies.Pays(1, kHalf - 1));
      CHECK(copies.Pays(8, kHalf / 8) && !copies.Pays(8, kHalf / 8 - 1));
      CHECK(copies.Takes({nullptr, nullptr, least}) && !copies.Takes({nullptr, nullptr, least - 1}));
    };
    emulation::Launch(1, 1, 1, FirstSeed(), check, static_cast<size_t>(BulkSharedBytes(stages)));
  }
}

// The host reserves what the kernel uses, and the rings fit.
TEST_CASE("shared memory") {
  constexpr int64_t kMost = 227 << 10;  // of a thread block, with compute capability 9.0 and 10.0
  for (const BulkStages& stages : {kPlanStages, kSliceStages}) {
    CHECK(stages.num >= 2 && stages.num <= kMostBulkStages && (stages.num & (stages.num - 1)) == 0);
    CHECK(stages.bytes % 16 == 0 && BulkSharedBytes(stages) % 16 == 0);
    CHECK(SliceSharedBytes(kSliceThreads, stages) <= kMost);
    // One block per SM: launch_limits.h counts on an SM of its own for each.
    CHECK(2 * BulkSharedBytes(stages) > kMost);
  }
  CHECK(kSliceStages.bytes == kStripeBytes);
  CHECK(BulkSharedBytes({}) == 0 && SliceSharedBytes(8) == SliceSharedBytes(8, {}));
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
