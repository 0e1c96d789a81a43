// Plans over lists (all_to_all_v), by one and by many threads, against rows moved one by one.
#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cpu/executor.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "../plan/slices.h"

namespace jaxcomm {
namespace {

using Buffers = std::vector<std::vector<int32_t>>;

constexpr int64_t kRow = 3;

Buffers Expected(RaggedCase c, const Buffers& inputs, Buffers outputs) {
  for (int32_t from = 0; from < c.n; ++from) {
    for (int64_t i = 0; i < c.n * c.per_pair; ++i) {
      for (int64_t k = 0; k < c.At(from, 1, i) * kRow; ++k) {
        outputs[i / c.per_pair][c.At(from, 2, i) * kRow + k] = inputs[from][c.At(from, 0, i) * kRow + k];
      }
    }
  }
  return outputs;
}

TEST_CASE("every algorithm moves the slices of every pair, and nothing else") {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const int32_t n = 1 + round % 6;
    const RaggedCase c = DrawRagged(n, 1 + round % 3, random);
    Buffers inputs(n), start(n);
    for (int32_t r = 0; r < n; ++r) {
      for (int64_t i = 0; i < c.input_rows * kRow; ++i) inputs[r].push_back(static_cast<int32_t>(random()));
      for (int64_t i = 0; i < c.output_rows * kRow; ++i) start[r].push_back(static_cast<int32_t>(random()));
    }
    const Buffers expected = Expected(c, inputs, start);
    Request request;
    request.collective = Collective::kAllToAllV;
    request.geometry.ranks_per_node = n;
    request.geometry.pull = round % 2 == 1;
    request.block_count = 1;
    for (const Algorithm& algorithm : Algorithms(request.collective)) {
      const auto program = Program::MakeOfLists(BuildAll(algorithm, request), c.input_rows * kRow, c.output_rows * kRow,
                                                kRow, sizeof(int32_t), 0);
      for (const int num_threads : {1, 4}) {
        Buffers outputs = start;
        std::vector<RankBuffers> buffers(n);
        for (int32_t r = 0; r < n; ++r) {
          buffers[r].input = reinterpret_cast<const char*>(inputs[r].data());
          buffers[r].output = reinterpret_cast<char*>(outputs[r].data());
        }
        Execution execution(program, buffers, c.slices());
        std::atomic<int> finished{0};
        std::vector<std::thread> threads;
        for (int i = 0; i < num_threads; ++i) threads.emplace_back([&] { finished += execution.Work(); });
        for (auto& thread : threads) thread.join();
        CHECK(finished == 1);
        CHECK(outputs == expected);
      }
    }
  }
}

// Counts puts, and keeps what they carry.
class Recorder : public RemoteTransport {
 public:
  void PutInput(const Place& to, const char* input, int64_t count) override {
    inputs.push_back(input);
    offsets.push_back(to.offset);
    counts.push_back(count);
  }
  void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) override {
    offsets.push_back(to.offset);
    counts.push_back(count);
    first.push_back(*reinterpret_cast<int32_t*>(data.get()));
  }
  void Signal(int32_t, int32_t) override {}
  std::vector<int64_t> offsets, counts;
  std::vector<int32_t> first;
  std::vector<const char*> inputs;
};

// What rank 0 sends to rank 1 of another node.
Recorder Sent(Collective collective, int64_t block_count, const BlockLayout& layout, int64_t row_count,
              std::vector<int32_t>& input, const Slices& slices = {}) {
  Request request;
  request.collective = collective;
  request.geometry.num_nodes = 2;
  request.geometry.all_addressable = false;
  request.block_count = block_count;
  auto program = std::make_shared<Program>(*Program::Make(BuildAll(*FindAlgorithm(collective, "direct"), request),
                                                          layout, layout, sizeof(int32_t), nullptr));
  program->row_count = row_count;
  std::vector<int32_t> output(input.size());
  Recorder recorder;
  std::vector<RankBuffers> buffers(2);
  buffers[0].input = reinterpret_cast<const char*>(input.data());
  buffers[0].output = reinterpret_cast<char*>(output.data());
  buffers[1].local = false;
  buffers[1].remote = &recorder;
  Execution(program, buffers, slices).Work();
  return recorder;
}

TEST_CASE("slices that are contiguous at both ends are one message") {
  RaggedCase c;
  c.n = 2;
  c.per_pair = 4;
  c.table.assign(2 * 4 * 8, 0);
  // To rank 1: rows 5 and 6 to rows 2 and 3, an empty slice between them, and row 7 to row 9.
  const int64_t inputs[] = {5, 99, 6, 7}, sizes[] = {1, 0, 1, 1}, outputs[] = {2, -9, 3, 9};
  for (int i = 0; i < 4; ++i) {
    c.At(0, 0, 4 + i) = inputs[i];
    c.At(0, 1, 4 + i) = c.At(1, 3, i) = sizes[i];
    c.At(0, 2, 4 + i) = outputs[i];
  }
  std::vector<int32_t> input(10 * kRow);
  std::iota(input.begin(), input.end(), 0);
  const Recorder recorder = Sent(Collective::kAllToAllV, 1, {1, 10 * kRow, 10 * kRow}, kRow, input, c.slices());
  CHECK((recorder.offsets == std::vector<int64_t>{2 * kRow, 9 * kRow}));
  CHECK((recorder.counts == std::vector<int64_t>{2 * kRow, kRow}));
  CHECK((recorder.first == std::vector<int32_t>{15, 21}));
}

TEST_CASE("a large part of an input is not copied, unless it has gaps") {
  constexpr int64_t k64KiB = 16 << 10;
  const std::pair<int64_t, int64_t> sizes[] = {
      {k64KiB, k64KiB}, {k64KiB + 1, k64KiB + 1}, {k64KiB + 1, 1}, {2 * (k64KiB + 1), k64KiB + 1}};
  for (const auto& [b, contiguous] : sizes) {
    std::vector<int32_t> input(2 * b);
    const Recorder recorder = Sent(Collective::kAllToAll, b, {2, b, contiguous}, -1, input);
    CHECK(recorder.counts == std::vector<int64_t>{b});
    const bool copied = contiguous < b || b == k64KiB;
    CHECK(recorder.first.size() == copied && recorder.inputs.size() == !copied);
    if (!copied) CHECK(recorder.inputs[0] == reinterpret_cast<const char*>(input.data() + b));
  }
}

}  // namespace
}  // namespace jaxcomm
