// The buffers of a program between processes that need windows, for plans written by hand.
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../ffi/cpu/inter_process_program.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr int64_t kLarge = 20'000, kSmall = 100;  // elements of four bytes: more and less than 32 KiB

// Two ranks; rank 0 has one step.
struct Setting {
  Step step;
  std::vector<Place> sources;
  BlockLayout input{1, kLarge, kLarge}, output{1, kLarge, kLarge};
  std::vector<int32_t> process_of = {0, 1}, node_of = {0, 0};
  bool single_copy = false;
  int64_t count = kLarge;

  InterProcessProgram Make() const {
    std::vector<Plan> plans(2);
    for (int32_t r = 0; r < 2; ++r) plans[r].rank = r;
    plans[0].steps = {step};
    plans[0].sources = sources;
    auto program = std::make_shared<Program>(*Program::Make(std::move(plans), input, output, 4, nullptr));
    program->stream = true;
    return InterProcessProgram(std::move(program), process_of, node_of, single_copy, count, count);
  }
};

Place At(int32_t rank, Space space) {
  Place place;
  place.rank = rank;
  place.space = space;
  return place;
}

Setting Transfer(StepKind kind, Place src, Place dst) {
  Setting setting;
  setting.step.kind = kind;
  setting.step.count = 1;
  setting.step.src = src;
  setting.step.dst = dst;
  return setting;
}

bool Needs(const Setting& setting, Space space) { return setting.Make().windowed(space); }

TEST_CASE("an output that peers of the node write to has a window with contiguous blocks and no streamed stores") {
  Setting put = Transfer(StepKind::kPut, At(0, Space::kInput), At(1, Space::kOutput));
  put.output = {2, kLarge / 2, 10};
  put.single_copy = true;  // which does not help
  const InterProcessProgram program = put.Make();
  CHECK(program.windowed(Space::kOutput) && !program.windowed(Space::kInput) && program.windowed(Space::kScratch));
  CHECK(program.program()->output.contiguous() && !program.program()->stream);
  CHECK(program.output(0, nullptr).layout.contiguous_count == 10 && program.output(0, nullptr).layout.num_blocks == 2);
  CHECK(program.addresses(0) == program.addresses(1) && program.block_bytes(2) == 0);  // a block for each process
  for (const uint64_t offset : {program.signals(0), program.window(Space::kOutput, 0), program.block_bytes(0)}) {
    CHECK(offset > 0 && offset % 64 == 0);  // lines of the cache
  }
  put.process_of = {0, 0};
  CHECK(!Needs(put, Space::kOutput) && put.Make().program()->stream);
}

TEST_CASE("an output that other nodes send to has a window if its blocks are not contiguous") {
  Setting put = Transfer(StepKind::kPut, At(0, Space::kInput), At(1, Space::kOutput));
  put.node_of = {0, 1};
  CHECK(!Needs(put, Space::kOutput));
  put.output = {2, kLarge / 2, 10};
  CHECK(Needs(put, Space::kOutput));
}

TEST_CASE("a buffer that peers read has a window unless remote reads are possible and cheaper") {
  for (const Space space : {Space::kInput, Space::kOutput}) {
    const Space other = space == Space::kInput ? Space::kOutput : Space::kInput;
    Setting get = Transfer(StepKind::kGet, At(1, space), At(0, other));
    Setting reduce = Transfer(StepKind::kReduce, {}, At(0, other));
    reduce.sources = {At(0, space), At(1, space)};
    reduce.step.num_sources = 2;
    for (Setting read : {get, reduce}) {
      CHECK(Needs(read, space) && !Needs(read, other));
      read.single_copy = true;
      CHECK(!Needs(read, space) && !Needs(read, other));
      BlockLayout& layout = space == Space::kInput ? read.input : read.output;
      layout = {2, kLarge / 2, 250};  // fragments of 1000 bytes
      CHECK(Needs(read, space));
      layout = {2, kLarge / 2, 500};
      CHECK(!Needs(read, space));
      read.count = kSmall;
      CHECK(Needs(read, space));
    }
    // Reads within a process need no window.
    get.process_of = {0, 0};
    CHECK(!Needs(get, space));
    reduce.sources = {At(0, space), At(0, space)};
    CHECK(!Needs(reduce, space));
  }
}

// Programs have different fingerprints if they differ in anything that all processes must agree on.
TEST_CASE("different programs have different fingerprints") {
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry.ranks_per_node = 2;
  request.block_count = 100;
  const std::vector<Plan> plans = BuildAll(*FindAlgorithm(request.collective, "ring"), request);
  const auto fingerprint = [&](const std::function<void(Program&)>& change) {
    const auto plain =
        Program::Make(plans, {1, 100, 100}, {1, 100, 100}, 4, FindReduce(DType::kS32, ReduceOp::kSum), 3);
    auto program = std::make_shared<Program>(*plain);
    change(*program);
    return InterProcessProgram(program, {0, 1}, {0, 1}, false, 100, 100).fingerprint();
  };
  const uint64_t plain = fingerprint([](Program&) {});
  CHECK(plain == fingerprint([](Program&) {}));
  const std::vector<std::function<void(Program&)>> changes = {
      [](Program& p) { p.type = 4; },
      [](Program& p) { p.item_bytes = 8; },
      [](Program& p) { p.row_count = 5; },
      [](Program& p) { p.tokens.choices = 2; },
      [](Program& p) { p.tokens.experts_per_rank = 2; },
      [](Program& p) { p.tokens.per_choice = true; },
      [](Program& p) { p.tokens.rounds_nodes = true; },
      [](Program& p) { p.tokens.weight_bytes = 8; },
      [](Program& p) { p.input.num_blocks = 2; },
      [](Program& p) { p.input.block_count = 50; },
      [](Program& p) { p.input.contiguous_count = 10; },
      [](Program& p) { p.output.num_blocks = 2; },
      [](Program& p) { p.output.block_count = 50; },
      [](Program& p) { p.output.contiguous_count = 10; },
      [](Program& p) { p.plans[0].scratch_count += 1; },
      [](Program& p) { p.plans[1].steps[0].kind = StepKind::kZero; },
      [](Program& p) { p.plans[1].steps[0].peer += 1; },
      [](Program& p) { p.plans[1].steps[0].count += 1; },
      [](Program& p) { p.plans[1].steps[0].dst.offset += 1; },
      [](Program& p) { p.plans[1].steps[0].dst.rank ^= 1; },
      [](Program& p) { p.plans[1].steps[0].src.offset += 1; },
      [](Program& p) { p.plans[1].steps[0].src.space = Space::kScratch; },
      [](Program& p) { p.plans[1].steps.pop_back(); },
      [](Program& p) { p.plans[1].sources.at(0).offset += 1; },
      [](Program& p) { p.plans[1].sources.at(0).rank ^= 1; },
      [](Program& p) { std::swap(p.plans[0], p.plans[1]); },
  };
  std::vector<uint64_t> all = {plain};
  for (const auto& change : changes) all.push_back(fingerprint(change));
  std::sort(all.begin(), all.end());
  CHECK(std::unique(all.begin(), all.end()) == all.end());
  // The use of windows must agree, too.
  Setting read = Transfer(StepKind::kGet, At(1, Space::kInput), At(0, Space::kOutput));
  const uint64_t copies = read.Make().fingerprint();
  read.single_copy = true;
  CHECK(read.Make().fingerprint() != copies);
}

}  // namespace
}  // namespace jaxcomm
