// The GPU's executor: every algorithm of every collective, for 1 to 8 ranks in every split into nodes, all element
// types, odd sizes and strided blocks. Results have the same bits as those of the CPU's executor. Emulated, or compiled
// by nvcc for a GPU.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "../../ffi/cpu/executor.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/builder.h"
#include "../check.h"
#include "fakes/all_types.h"
#include "fakes/random_request.h"
#include "fakes/seed.h"
#if defined(__CUDACC__)
#include "gpu/on_gpu.cuh"
#else
#include "fakes/emulated.h"
#endif

namespace jaxcomm {
namespace cuda {
namespace {

struct Case {
  const Algorithm* algorithm = nullptr;
  Request request;  // of the whole collective
  int64_t block_count = 0;
  int64_t chunk_count = 0;
  DType dtype = DType::kS32;
  ReduceOp op = ReduceOp::kSum;
  ContiguousCounts contiguous;
  int32_t num_channels = 1;
  unsigned threads = 4;
  int64_t shift = 0;
  bool gin = false;  // between nodes
  PackLimits pack;
};

// The position of element `i` of a block that lies in fragments, and the inverse: the index in an array of (block_count
// / contiguous_count, num_blocks, contiguous_count) elements.
int64_t InMemory(int64_t element, int64_t num_blocks, int64_t block_count, int64_t contiguous_count) {
  if (contiguous_count == 0) return element;
  const int64_t block = element / block_count, within = element % block_count;
  return within / contiguous_count * num_blocks * contiguous_count + block * contiguous_count +
         within % contiguous_count;
}

#if defined(__CUDACC__)
constexpr uint64_t kDeadlineNs = 10'000'000'000;  // sanitizers slow kernels down
#else
constexpr uint64_t kDeadlineNs = 200'000'000;
#endif

// The result of the CPU's executor: one execution per channel, as the channels are independent.
std::vector<Bytes> OnCpu(const Case& test, const std::vector<Bytes>& inputs) {
  const int32_t n = test.request.geometry.num_ranks();
  const int64_t item = ItemBytes(test.dtype);
  const ReduceFn reduce = FindReduce(test.dtype, test.op);
  const int64_t input_count = InputCount(test.request), output_count = OutputCount(test.request);
  std::vector<Bytes> outputs(n, Bytes(output_count * item));
  const Choice choice(*test.algorithm, test.request);
  const RankProgram layout = MakeRankProgram(choice, test.block_count, {}, item, test.num_channels, 0);
  for (const ChannelProgram& channel : layout.channels) {
    Request request = test.request;
    request.block_count = channel.input.count;
    request.staged_count = 0;  // compares with the algorithm's own plan
    if (request.block_count == 0) continue;
    const std::vector<Plan> plans = BuildAll(*test.algorithm, request);
    std::vector<Bytes> in(n), out(n), scratch(n);
    std::vector<RankBuffers> buffers(n);
    const auto move = [&](Bytes& all, Bytes& part, int64_t count, int64_t contiguous_count, bool back) {
      const int64_t num_blocks = std::max<int64_t>(count / test.block_count, 1);
      for (int64_t i = 0; i < num_blocks * channel.input.count; ++i) {
        const int64_t element =
            i / channel.input.count * test.block_count + channel.input.begin + i % channel.input.count;
        char* there = all.data() + InMemory(element, num_blocks, test.block_count, contiguous_count) * item;
        char* here = part.data() + i * item;
        std::memcpy(back ? there : here, back ? here : there, item);
      }
    };
    std::vector<Bytes> copies = inputs;
    for (int32_t r = 0; r < n; ++r) {
      in[r].resize(InputCount(request) * item);
      out[r].resize(OutputCount(request) * item);
      scratch[r].resize(plans[r].scratch_count * item);
      move(copies[r], in[r], input_count, test.contiguous.input, false);
      buffers[r] = {in[r].data(), out[r].data(), scratch[r].data()};
    }
    Execution execution(Program::Make(plans, {}, {}, item, reduce), buffers);
    CHECK(execution.Work());
    for (int32_t r = 0; r < n; ++r) move(outputs[r], out[r], output_count, test.contiguous.output, true);
  }
  return outputs;
}

void Check(const Case& test, uint64_t seed) {
#if defined(__CUDACC__)
  if (a_stream_per_rank && test.request.geometry.num_nodes > 1) return;  // that kernel has no network
#endif
  std::mt19937_64 random(seed);
  const int32_t n = test.request.geometry.num_ranks();
  const int64_t item = ItemBytes(test.dtype);
  std::vector<Bytes> inputs;
  for (int32_t r = 0; r < n; ++r) {
    inputs.emplace_back(InputCount(test.request) * item);
    Randomize(inputs[r].data(), test.dtype, InputCount(test.request) * item, random);
  }
  const std::vector<Bytes> expected = OnCpu(test, inputs);

  TestMemory memory;
  const VirtualRanks ranks(memory, test.request.geometry, test.num_channels, kDeadlineNs);
  const Choice choice(*test.algorithm, test.request);
  VirtualRanks::Call call = ranks.Prepare(memory, choice, test.block_count, test.contiguous, {test.dtype, test.op},
                                          test.num_channels, test.shift, test.pack);
  // Two calls of three: of all ranks or of every other one.
  constexpr BulkStages kStages[] = {{2, 16}, {4, 64}, {8, 256}, {32, 1024}};
  if (seed % 3 != 0 && HasBulkCopies()) {
    call.UseBulkCopies(memory, kStages[seed / 3 % 4], [&](size_t rank) { return seed % 3 == 1 || rank % 2 == 0; });
  }
  TestNetwork network(ranks, test.num_channels, test.gin, seed);
  const std::string what = std::string(Name(test.request.collective)) + "/" + test.algorithm->name + " of " +
                           std::to_string(test.request.geometry.num_nodes) + " nodes of " +
                           std::to_string(test.request.geometry.ranks_per_node) + (test.gin ? ", GIN" : "");
  // Two runs, because counters continue from call to call.
  for (uint64_t round = 0; round < 2; ++round) {
    Data data{inputs, std::vector<Bytes>(n, Bytes(expected[0].size()))};
    network.Run(call, data, test.threads, seed + round);
    const std::vector<device::Report> reports = Reports(ranks);
    for (int32_t r = 0; r < n; ++r) {
      CheckRank(data.outputs[r] == expected[r], reports[r], what, r, seed, round);
    }
  }
}

// Rank 0 puts to another node and then signals the receiver and rank `middle`. Rank `writer` overwrites the source of
// the put: it is `middle`, or a rank that `middle` signals.
template <int32_t middle, int32_t writer, int32_t receiver>
Plan Overwrite(const Request& request, int32_t rank) {
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  if (rank != receiver) plan.Zero(plan.Output(0), b);
  if (rank == 0) {
    plan.Move(plan.Input(0), Builder::At(receiver, Space::kOutput, 0), b);
    plan.Signal(receiver);
    plan.Signal(middle);
  }
  if (rank == middle || rank == receiver) plan.Wait(0);
  if (rank == middle && middle != writer) plan.Signal(writer);
  if (rank == writer && middle != writer) plan.Wait(middle);
  if (rank == writer) plan.Move(plan.Input(0), Builder::At(0, Space::kInput, 0), b);
  return std::move(plan).Finish(0);
}

TEST_CASE("signals that lead to an overwrite of an outstanding put") {
  PrepareDevice();
  using Build = Plan (*)(const Request&, int32_t);
  for (const auto& [build, ranks_per_node] :
       {std::pair<Build, int32_t>{Overwrite<1, 1, 2>, 2}, {Overwrite<1, 2, 3>, 3}, {Overwrite<2, 1, 3>, 3}}) {
    const Algorithm algorithm = {"overwrite", "", {}, build};
    Case test;
    test.algorithm = &algorithm;
    test.request.collective = Collective::kPermute;
    test.request.geometry = {2, ranks_per_node, false, false};
    test.request.block_count = test.block_count = 100;
    test.dtype = DType::kF32;
    test.gin = true;
    for (uint64_t i = 0; i < 10; ++i) Check(test, FirstSeed() + i);
  }
}

// With little scratch and with enough.
TEST_CASE("blocks in many fragments, packed and not") {
  PrepareDevice();
  uint64_t seed = FirstSeed();
  const std::pair<Collective, const char*> algorithms[] = {{Collective::kAllToAll, "direct"},
                                                           {Collective::kAllToAll, "pairwise"},
                                                           {Collective::kAllToAll, "hierarchical"},
                                                           {Collective::kAllGather, "ring"}};
  for (const auto& [collective, name] : algorithms) {
    for (const PackLimits pack : {PackLimits{0, 0}, PackLimits{1 << 20, 0}, PackLimits{1 << 20, 1 << 20}}) {
      for (const ContiguousCounts contiguous :
           {ContiguousCounts{11, 11}, ContiguousCounts{0, 11}, ContiguousCounts{11, 0}}) {
        Case test;
        test.algorithm = FindAlgorithm(collective, name);
        test.request.collective = collective;
        test.request.geometry = {2, 2, false, true};
        test.block_count = test.request.block_count = 330;
        if (collective == Collective::kAllGather) test.contiguous.output = contiguous.output;
        if (collective == Collective::kAllToAll) test.contiguous = contiguous;
        test.request.chunk_count = seed % 2 == 0 ? 0 : 40;
        test.dtype = DType::kF32;
        test.num_channels = 1 + static_cast<int32_t>(seed % 3);
        test.threads = 5;
        test.pack = pack;
        test.gin = true;
        Check(test, ++seed);
      }
    }
  }
}

// A case of this algorithm and geometry; all else is random.
Case Draw(const Algorithm& algorithm, Collective collective, Geometry geometry, std::mt19937_64& random) {
  Case test;
  test.algorithm = &algorithm;
  Request& request = test.request;
  request.collective = collective;
  request.geometry = geometry;
  const int32_t n = geometry.num_ranks();
  constexpr int64_t kCounts[] = {1, 2, 7, 64, 129, 1001, 1540};
  test.block_count = collective == Collective::kBarrier ? 0 : kCounts[random() % 7];
  request.block_count = test.block_count;
  request.chunk_count = random() % 2 == 0 ? 0 : 1 + static_cast<int64_t>(random() % 400);
  request.root = static_cast<int32_t>(random() % n);
  if (collective == Collective::kPermute) {
    for (int32_t r = 0; r < n; ++r) request.source_of.push_back(r);
    std::shuffle(request.source_of.begin(), request.source_of.end(), random);
    if (n > 2) request.source_of[random() % n] = -1;
  }
  test.dtype = kTypes[random() % std::size(kTypes)];
  test.op = static_cast<ReduceOp>(random() % 3);
  test.gin = geometry.num_nodes > 1 && random() % 2 == 0;
  constexpr int64_t kPackedBytes[] = {0, 40, 32 << 10}, kSendBytes[] = {0, 1000, 16 << 20};
  test.pack = {kPackedBytes[random() % 3], kSendBytes[random() % 3]};
  if (FindReduce(test.dtype, test.op) == nullptr) test.op = ReduceOp::kSum;
  test.num_channels = 1 + static_cast<int32_t>(random() % 3);
  constexpr unsigned kThreads[] = {1, 2, 3, 8, 32};
  test.threads = kThreads[random() % 5];
  const auto contiguous_count = [&] { return random() % 3 == 0 ? std::max<int64_t>(test.block_count / 7, 1) : 0; };
  if (test.block_count % 7 == 0 && test.block_count > 0) test.contiguous = {contiguous_count(), contiguous_count()};
  if (random() % 4 == 0) test.shift = ItemBytes(test.dtype) < 16 ? ItemBytes(test.dtype) : 0;
  return test;
}

// Every algorithm for groups of these sizes in every split into nodes. Reductions are more frequent, because types
// differ.
void TestPlans(const std::vector<int32_t>& sizes, int repeats, int repeats_of_reductions) {
  PrepareDevice();
  uint64_t seed = FirstSeed();
  std::mt19937_64 random(seed);
  for (const Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      int num_runs = 0;
      for (const int32_t n : sizes) {
        for (int32_t nodes = 1; nodes <= n; ++nodes) {
          if (n % nodes != 0) continue;
          for (const bool pull : {false, true}) {
            for (int repeat = 0; repeat < (Reduces(collective) ? repeats_of_reductions : repeats); ++repeat) {
              const Case test = Draw(algorithm, collective, {nodes, n / nodes, false, pull, true}, random);
              if (!algorithm.supports(test.request)) continue;
              Check(test, ++seed);
              ++num_runs;
            }
          }
        }
      }
      CHECK(num_runs > 0 || collective == Collective::kReshard);  // runs on CPUs
    }
  }
}

void TestAllPlans() { TestPlans({1, 2, 3, 4, 5, 6, 7, 8}, 3, 8); }

TEST_CASE("plans, in some shapes") { TestPlans({1, 4, 6}, 1, 1); }

// Calls that are staged in a ring, with slots of a few elements, in every layout. Results are those of the algorithm's
// own plan.
void TestRing(const std::vector<int32_t>& sizes, int repeats) {
  PrepareDevice();
  uint64_t seed = FirstSeed();
  std::mt19937_64 random(seed);
  const std::pair<Collective, const char*> staged[] = {
      {Collective::kAllToAll, "direct"},    {Collective::kAllGather, "direct"},     {Collective::kAllReduce, "direct"},
      {Collective::kAllReduce, "one_shot"}, {Collective::kReduceScatter, "direct"}, {Collective::kPermute, "direct"},
      {Collective::kBroadcast, "direct"}};
  for (const auto& [collective, name] : staged) {
    for (const int32_t n : sizes) {
      for (int repeat = 0; repeat < repeats; ++repeat) {
        Case test = Draw(*FindAlgorithm(collective, name), collective, {1, n, false, true, true}, random);
        constexpr int64_t kStagedCounts[] = {5, 32, 128, 700};
        test.request.staged_count = kStagedCounts[random() % 4];
        Check(test, ++seed);
      }
    }
  }
}

TEST_CASE("plans with a staging ring") { TestRing({2, 5}, 4); }

TEST_CASE("plans with a staging ring, in all shapes [full]") { TestRing({2, 3, 4, 5, 6, 7, 8}, 30); }

TEST_CASE("plans, in all shapes [full]") { TestAllPlans(); }

// tests/cpu/test_every_type.py checks the CPU's results that are the reference here.
TEST_CASE("every type and operation") {
  PrepareDevice();
  uint64_t seed = FirstSeed();
  std::mt19937_64 random(seed);
  const Algorithm& algorithm = *FindAlgorithm(Collective::kAllReduce, "direct");
  for (const DType dtype : kTypes) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (FindReduce(dtype, op) == nullptr) continue;
      Case test = Draw(algorithm, Collective::kAllReduce, {1, 4, false, true, true}, random);
      test.dtype = dtype;
      test.op = op;
      test.shift = 0;
      Check(test, ++seed);
    }
  }
}

#if defined(__CUDACC__)
TEST_CASE("plans, a stream per rank [full]") {
  a_stream_per_rank = true;
  TestAllPlans();
  a_stream_per_rank = false;
}
#endif

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
