// Every algorithm of every collective, run by one and by many threads on the same execution, against expected values.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "../../ffi/cpu/executor.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/transport/node.h"
#include "../check.h"
#include "../plan/expected.h"

namespace jaxcomm {
namespace {

// Runs the execution by `num_threads` threads that come and go until one has finished it.
void RunBy(int num_threads, Execution& execution) {
  if (num_threads == 1) {
    CHECK(execution.Work());
    CHECK(!execution.Work());
    return;
  }
  std::atomic<int> finished{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&] { finished += execution.Work(); });
  }
  for (auto& thread : threads) thread.join();
  // If all threads have left, one of them must have finished the execution, because no other thread would continue it.
  CHECK(finished == 1);
}

// The buffers of all ranks.
template <typename T>
std::vector<RankBuffers> BuffersOf(const Program& program, const std::vector<std::vector<T>>& inputs,
                                   std::vector<std::vector<T>>& outputs, std::vector<std::vector<T>>& scratch) {
  std::vector<RankBuffers> buffers;
  for (size_t r = 0; r < inputs.size(); ++r) {
    scratch.emplace_back(program.plans[r].scratch_count, T(7));
    buffers.push_back({reinterpret_cast<const char*>(inputs[r].data()), reinterpret_cast<char*>(outputs[r].data()),
                       reinterpret_cast<char*>(scratch[r].data())});
  }
  return buffers;
}

int Check(const Algorithm& algorithm, const Request& request, std::mt19937& random) {
  if (!algorithm.supports(request)) return 0;
  const int32_t n = request.geometry.num_ranks();
  Values inputs(n, std::vector<int32_t>(InputCount(request)));
  for (auto& input : inputs) {
    for (auto& value : input) value = static_cast<int32_t>(random());
  }
  const Values expected = Expected(request, inputs);
  const int64_t block_count = std::max<int64_t>(request.block_count, 1);
  const auto layout = [&](int64_t count) {
    return BlockLayout{std::max<int64_t>(count / block_count, 1), block_count, block_count};
  };
  const auto program =
      Program::Make(BuildAll(algorithm, request), layout(InputCount(request)), layout(OutputCount(request)),
                    sizeof(int32_t), FindReduce(DType::kS32, ReduceOp::kSum));
  for (int num_threads : {1, 2, 5}) {
    Values outputs(n, std::vector<int32_t>(OutputCount(request), -1));
    Values scratch;
    Execution execution(program, BuffersOf(*program, inputs, outputs, scratch));
    RunBy(num_threads, execution);
    CHECK(outputs == expected);
  }
  return 1;
}

TEST_CASE("every algorithm by one and by many threads") {
  std::mt19937 random(7);
  const std::pair<int, int> shapes[] = {{1, 1}, {1, 2}, {1, 3}, {1, 8}, {2, 4}, {3, 2}, {4, 2}, {5, 3}};
  for (const CollectiveTraits& traits : Collectives()) {
    const Collective collective = traits.collective;
    for (const Algorithm& algorithm : Algorithms(collective)) {
      int num_runs = 0;
      for (const auto& [nodes, ranks_per_node] : shapes) {
        for (const auto& [block_count, chunk_count] : {std::pair<int, int>{0, 0}, {1, 0}, {7, 3}, {1000, 64}}) {
          Request request;
          request.collective = collective;
          request.geometry.num_nodes = nodes;
          request.geometry.ranks_per_node = ranks_per_node;
          request.geometry.multimem = true;
          request.block_count = collective == Collective::kBarrier ? 0 : block_count;
          request.chunk_count = chunk_count;
          const int32_t n = nodes * ranks_per_node;
          request.root = static_cast<int32_t>(random() % n);
          if (collective == Collective::kPermute) {
            for (int32_t r = 0; r < n; ++r) request.source_of.push_back(r);
            std::shuffle(request.source_of.begin(), request.source_of.end(), random);
            if (n > 2) request.source_of[random() % n] = -1;
          }
          num_runs += Check(algorithm, request, random);
        }
      }
      CHECK(num_runs > 0 || collective == Collective::kReshard);  // of boxes: tests/test_reshard.py
    }
  }
}

// Sources with short fragments and sources in other processes are copied tile by tile. In a ring, the operands of a sum
// have different fragments: data of a peer are contiguous.
TEST_CASE("reductions of more than a tile, and of operands with different fragments") {
  constexpr int32_t kRanks = 2;
  const struct {
    const char* algorithm;
    int64_t block, contiguous_count;
    bool remote;
  } cases[] = {{"direct", 2'100, 3, false}, {"direct", 40'001, 40'001, true}, {"ring", 384, 128, false}};
  for (const auto& [algorithm, block, contiguous_count, remote] : cases) {
    if (remote && !Node::AllowSingleCopy()) continue;
    Request request;
    request.collective = Collective::kReduceScatter;
    request.geometry.ranks_per_node = kRanks;
    request.geometry.pull = true;
    request.block_count = block;
    const auto program = Program::Make(BuildAll(*FindAlgorithm(Collective::kReduceScatter, algorithm), request),
                                       {kRanks, block, contiguous_count}, {1, block, block}, sizeof(int32_t),
                                       FindReduce(DType::kS32, ReduceOp::kSum));
    Values in(kRanks), out(kRanks, std::vector<int32_t>(block, -1)), scratch;
    for (int32_t r = 0; r < kRanks; ++r) {
      for (int64_t i = 0; i < kRanks * block; ++i) in[r].push_back(static_cast<int32_t>(i * (r + 1)));
    }
    std::vector<RankBuffers> buffers = BuffersOf(*program, in, out, scratch);
    for (RankBuffers& rank : buffers) rank.input_pid = remote ? getpid() : 0;
    CHECK(Execution(program, buffers).Work());
    for (int32_t r = 0; r < kRanks; ++r) {
      for (int64_t i = 0; i < block; ++i) {
        const int64_t at = (i / contiguous_count * kRanks + r) * contiguous_count +
                           i % contiguous_count;  // rows of that many columns for each rank
        CHECK(out[r][i] == 3 * at);
      }
    }
  }
}

// A rank that waits for a signal that has arrived only waits for a thread.
TEST_CASE("the pair of ranks of an error has no signal that has arrived") {
  constexpr int32_t kRanks = 3, kLate = 2;
  std::vector<Plan> plans;
  std::vector<RankBuffers> buffers(kRanks);
  std::vector<std::vector<std::atomic<uint32_t>>> signals;
  for (int32_t r = 0; r < kRanks; ++r) signals.emplace_back(kRanks);
  for (int32_t r = 0; r < kRanks; ++r) {
    Plan plan;
    plan.rank = r;
    plan.num_ranks = kRanks;
    Step wait;
    wait.kind = StepKind::kWait;
    wait.peer = kLate;
    if (r != kLate) plan.steps.assign(2, wait);
    plans.push_back(plan);
    buffers[r].local = r != kLate;
    buffers[r].signals = signals[r].data();
  }
  Execution execution(Program::Make(plans, {}, {}, 1, nullptr), buffers);
  using Pair = std::pair<int32_t, int32_t>;
  CHECK(!execution.Work() && execution.WaitingPair() == Pair(0, kLate));
  signals[0][kLate].store(1);
  CHECK(execution.WaitingPair() == Pair(1, kLate));
  CHECK(!execution.Work() && execution.WaitingPair() == Pair(0, kLate));  // now for the second signal
  signals[0][kLate].store(2);
  CHECK(execution.WaitingPair() == Pair(1, kLate));
  signals[1][kLate].store(2);
  CHECK(execution.WaitingPair() == Pair(-1, -1));
  CHECK(execution.Work());
}

#if defined(__x86_64__)
// XLA's threads flush subnormals to zero, worker threads do not. The sum must not depend on the thread.
TEST_CASE("sums of subnormals are kept on threads that flush them, and those threads flush afterwards") {
  constexpr unsigned kFlushing = 0x8040;  // results and operands
  constexpr int64_t kCount = 100;
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry.ranks_per_node = 2;
  request.block_count = kCount;
  const BlockLayout layout{1, kCount, kCount};
  for (const char* name : {"direct", "ring", "root"}) {
    const Algorithm* const algorithm = FindAlgorithm(Collective::kAllReduce, name);
    CHECK(algorithm != nullptr);
    const auto program = Program::Make(BuildAll(*algorithm, request), layout, layout, sizeof(float),
                                       FindReduce(DType::kF32, ReduceOp::kSum));
    // By their bits: 2^-140 and 2^-141 are 512 and 256 times the smallest float.
    const std::vector<std::vector<uint32_t>> in = {std::vector<uint32_t>(kCount, 512),
                                                   std::vector<uint32_t>(kCount, 256)};
    std::vector<std::vector<uint32_t>> out(2, std::vector<uint32_t>(kCount, 1)), scratch;
    Execution execution(program, BuffersOf(*program, in, out, scratch));
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlushing);
    const bool finished = execution.Work();
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(finished);
    CHECK((after & kFlushing) == kFlushing);
    for (const auto& sums : out) CHECK(sums == std::vector<uint32_t>(kCount, 768));
  }
}
#endif

}  // namespace
}  // namespace jaxcomm
