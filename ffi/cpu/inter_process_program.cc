#include "cpu/inter_process_program.h"

#include <algorithm>
#include <utility>

#include "common/hash.h"

namespace jaxcomm {
namespace {

// For smaller buffers, two copies through shared memory cost less than one system call (AMD EPYC, 2026-11: 2 processes,
// all_to_all; see benchmarks/README.md).
constexpr int64_t kSmallBytes = 32 << 10;
// The overhead of one range in a remote read equals the time to copy about this many bytes.
constexpr int64_t kShortRangeBytes = 1024;

uint64_t Align(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

bool HasShortFragments(const BlockLayout& layout, int64_t item_bytes) {
  return !layout.contiguous() && layout.contiguous_count * item_bytes < kShortRangeBytes;
}

// How other processes access the buffers of a process, by Space.
struct Access {
  std::array<bool, 3> read = {};     // by processes of its node
  std::array<bool, 3> written = {};  // by processes of its node
  std::array<bool, 3> sent = {};     // by messages from other nodes
};

Access AccessOf(const Program& program, const std::vector<int32_t>& process_of, const std::vector<int32_t>& node_of) {
  Access access;
  for (const Plan& plan : program.plans) {
    const auto foreign = [&](int32_t rank) { return process_of[rank] != process_of[plan.rank]; };
    for (const Step& step : plan.steps) {
      if (step.kind == StepKind::kPut && foreign(step.dst.rank)) {
        const bool intra_node = node_of[step.dst.rank] == node_of[plan.rank];
        (intra_node ? access.written : access.sent)[static_cast<size_t>(step.dst.space)] = true;
      }
      if (step.kind == StepKind::kGet && foreign(step.src.rank))
        access.read[static_cast<size_t>(step.src.space)] = true;
      for (int32_t i = 0; i < step.num_sources; ++i) {
        const Place& source = plan.sources[step.first_source + i];
        if (foreign(source.rank)) access.read[static_cast<size_t>(source.space)] = true;
      }
    }
  }
  return access;
}

uint64_t Hash(uint64_t hash, const Place& place) {
  return Mix(Mix(Mix(hash, static_cast<uint64_t>(place.rank)), static_cast<uint64_t>(place.space)),
             static_cast<uint64_t>(place.offset));
}

uint64_t Hash(const Program& program) {
  uint64_t hash = Mix(static_cast<uint64_t>(program.type), static_cast<uint64_t>(program.item_bytes));
  hash = Mix(hash, static_cast<uint64_t>(program.row_count));
  const TokenLayout& tokens = program.tokens;
  for (const int64_t number : {tokens.choices, tokens.experts_per_rank, int64_t{tokens.per_choice},
                               int64_t{tokens.rounds_nodes}, tokens.weight_bytes}) {
    hash = Mix(hash, static_cast<uint64_t>(number));
  }
  for (const BlockLayout& layout : {program.input, program.output}) {
    for (const int64_t size : {layout.num_blocks, layout.block_count, layout.contiguous_count}) {
      hash = Mix(hash, static_cast<uint64_t>(size));
    }
  }
  for (const Plan& plan : program.plans) {
    hash = Mix(hash, static_cast<uint64_t>(plan.scratch_count));
    for (const Step& step : plan.steps) {
      hash = Mix(Mix(hash, static_cast<uint64_t>(step.kind)), static_cast<uint64_t>(step.count));
      hash = Hash(Hash(Mix(hash, static_cast<uint64_t>(step.peer)), step.dst), step.src);
    }
    for (const Place& source : plan.sources) hash = Hash(hash, source);
  }
  return hash;
}

}  // namespace

InterProcessProgram::InterProcessProgram(std::shared_ptr<const Program> program, std::vector<int32_t> process_of,
                                         std::vector<int32_t> node_of, bool single_copy, int64_t input_count,
                                         int64_t output_count, uint64_t attributes)
    : program_(std::move(program)),
      process_of_(std::move(process_of)),
      node_of_(std::move(node_of)),
      output_layout_(program_->output),
      input_bytes_(input_count * program_->item_bytes),
      output_bytes_(output_count * program_->item_bytes),
      offsets_(process_of_.size()) {
  const Access access = AccessOf(*program_, process_of_, node_of_);
  const Boxes* boxes = program_->boxes.get();
  const auto one_copy = [&](const BlockLayout& layout) {
    const bool short_fragments = boxes != nullptr ? boxes->shortest_run * program_->item_bytes < kShortRangeBytes
                                                  : HasShortFragments(layout, program_->item_bytes);
    return single_copy && std::max(input_bytes_, output_bytes_) >= kSmallBytes && !short_fragments;
  };
  const bool in_order = boxes != nullptr ? boxes->contiguous_outputs : program_->output.contiguous();
  constexpr auto kInput = static_cast<size_t>(Space::kInput);
  constexpr auto kOutput = static_cast<size_t>(Space::kOutput);
  constexpr auto kScratch = static_cast<size_t>(Space::kScratch);
  windowed_[kInput] = access.read[kInput] && !one_copy(program_->input);
  windowed_[kOutput] = access.written[kOutput] || (access.read[kOutput] && !one_copy(program_->output)) ||
                       (access.sent[kOutput] && !in_order);
  if (windowed_[kOutput]) {
    auto windowed = std::make_shared<Program>(*program_);
    windowed->output = BlockLayout();
    windowed->output_in_order = true;
    windowed->stream = false;  // windows are read soon
    program_ = std::move(windowed);
  }
  if (of_tokens() && !program_->tokens.combines && access.read[kInput]) {
    lists_bytes_ = program_->tokens.num_choices() * int64_t{sizeof(int32_t)};
  }
  windowed_[kScratch] = true;  // jaxcomm's own memory: always in the block, where peers can access it

  for (int32_t position = 0; position < num_ranks(); ++position) {
    RankOffsets& offsets = offsets_[position];
    uint64_t next = block_bytes(process_of_[position]);
    const auto place = [&next](uint64_t bytes) {
      const uint64_t begin = next;
      next = Align(next + bytes);
      return begin;
    };
    offsets.addresses = place(2 * sizeof(uint64_t));
    offsets.signals = place(static_cast<uint64_t>(num_ranks()) * sizeof(uint32_t));
    if (lists_bytes_ > 0) offsets.lists = place(static_cast<uint64_t>(lists_bytes_));
    if (windowed_[kInput]) offsets.windows[kInput] = place(static_cast<uint64_t>(input_bytes_));
    if (windowed_[kOutput]) offsets.windows[kOutput] = place(static_cast<uint64_t>(output_bytes_));
    offsets.windows[kScratch] = place(static_cast<uint64_t>(program_->scratch_bytes(static_cast<size_t>(position))));
    offsets.end = next;
  }
  fingerprint_ = Mix(Hash(*program_), attributes);
  for (const bool windowed : windowed_) fingerprint_ = Mix(fingerprint_, windowed ? 1 : 0);
}

int64_t InterProcessProgram::ReadBytes(int32_t position, const Slices& slices) const {
  if (program_->boxes != nullptr) return program_->boxes->input_span(position) * program_->item_bytes;
  if (!of_tokens() || !program_->tokens.combines) return input_bytes_;
  int64_t slots = 0;
  for (int32_t owner = 0; owner < slices.num_ranks(); ++owner) {
    for (int64_t i = 0; i < slices.per_pair(); ++i) {
      const Slice slice = slices.At(owner, position, i);
      if (slice.size > 0) slots = std::max(slots, slice.output_offset + slice.size);
    }
  }
  return slots * program_->tokens.row_bytes;
}

View InterProcessProgram::output(int32_t position, char* data) const {
  const Boxes* boxes = program_->boxes.get();
  return {data, output_layout_, 0, boxes != nullptr ? &boxes->outputs[static_cast<size_t>(position)] : nullptr};
}

int64_t InterProcessProgram::output_count(int32_t position) const {
  return program_->boxes != nullptr ? program_->boxes->output_count(position) : output_bytes_ / program_->item_bytes;
}

uint64_t InterProcessProgram::block_bytes(int32_t process) const {
  uint64_t end = 0;
  for (size_t position = 0; position < offsets_.size(); ++position) {
    if (process_of_[position] == process) end = std::max(end, offsets_[position].end);
  }
  return end;
}

}  // namespace jaxcomm
