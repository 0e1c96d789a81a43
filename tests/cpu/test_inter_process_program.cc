// The buffers of a program between processes that need windows, for plans written by hand.
#include <memory>
#include <utility>
#include <vector>

#include "../../ffi/cpu/inter_process_program.h"
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

}  // namespace
}  // namespace jaxcomm
