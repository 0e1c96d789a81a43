#include "plan/select_for_gpus.h"

#include <algorithm>

namespace jaxcomm {
namespace {

// Fewer bytes do not justify another channel, because every channel sends all signals.
constexpr int64_t kMinChannelBytes = 16 << 10;

// One of `num_channels` channels of a GPU.
Machine ChannelMachine(Machine gpu, int32_t num_channels) {
  gpu.together_bytes = kTogetherBytes;
  for (LinkModel& link : gpu.links) link.bytes_per_s /= num_channels;
  for (std::optional<LinkModel>* flags : {&gpu.ll, &gpu.ll_two_shot}) {
    if (*flags) (*flags)->bytes_per_s /= num_channels;
  }
  return gpu;
}

// Bytes of an LL message.
int64_t LlMessage(int64_t block_bytes, int64_t num_ranks, bool twice) {
  return twice ? CeilDiv(block_bytes, num_ranks) : block_bytes;
}

}  // namespace

int32_t NumChannels(int64_t block_bytes, int32_t max_channels) {
  return static_cast<int32_t>(std::clamp<int64_t>(block_bytes / kMinChannelBytes, 1, std::max(max_channels, 1)));
}

int32_t NumSliceChannels(int64_t block_bytes, int32_t max_channels) {
  const int32_t most = NumChannels(block_bytes, max_channels);
  return most > 2 && most % 2 == 0 ? most - 1 : most;
}

Range ChannelRange(int64_t block_count, int64_t item_bytes, int32_t num_channels, int32_t channel) {
  const int64_t grain = std::max<int64_t>(kGrainBytes / std::max<int64_t>(item_bytes, 1), 1);
  const Range grains = Subrange({0, CeilDiv(block_count, grain)}, num_channels, channel);
  const int64_t begin = std::min(grains.begin * grain, block_count);
  return {begin, std::min((grains.begin + grains.count) * grain, block_count) - begin};
}

int64_t ChannelCount(int64_t block_count, int64_t item_bytes, int32_t num_channels) {
  int64_t largest = 0;
  for (int32_t c = 0; c < num_channels; ++c) {
    largest = std::max(largest, ChannelRange(block_count, item_bytes, num_channels, c).count);
  }
  return largest;
}

bool FitsLl(int64_t message_bytes, int32_t max_channels) {
  return message_bytes > 0 && message_bytes <= int64_t{std::min(max_channels, kLlChannels)} * kLlBytes;
}

int32_t NumLlChannels(int64_t message_bytes, int32_t max_channels) {
  const int64_t enough = CeilDiv(message_bytes, kLlBytes / 2);
  return static_cast<int32_t>(std::clamp<int64_t>(enough, 1, std::min(max_channels, kLlChannels)));
}

// Not measured with jaxcomm. docs/internals/cost-model.md, "GPUs", gives the sources of these numbers.
Machine GpuMachine(InterNode inter_node) {
  Machine machine;
  machine.launch_s = 2.2e-6;
  machine.sync_overhead_s = 5e-6;
  machine.arena = true;
  // Half of the bytes are flags.
  machine.ll = machine.ll_two_shot = LinkModel{0.03e-6, 175e9, 1.5e-6};
  machine.links[static_cast<size_t>(Link::kSelf)] = {0.3e-6, 1.5e12, 0};
  machine.links[static_cast<size_t>(Link::kNode)] = {0.5e-6, 350e9, 1e-6};
  machine.links[static_cast<size_t>(Link::kNetwork)] =
      inter_node == InterNode::kGin ? LinkModel{1e-6, 48e9, 7e-6} : LinkModel{11e-6, 48e9, 5e-6};
  return machine;
}

StatusOr<Selection> SelectForGpus(const Request& request, const std::string& algorithm, int64_t item_bytes,
                                  int32_t max_channels, InterNode inter_node, bool arena) {
  const int64_t block_bytes = request.block_count * item_bytes;
  const int64_t num_ranks = request.geometry.num_ranks();
  const bool of_slices = request.collective == Collective::kAllToAllV;
  const int32_t num_channels = (of_slices ? NumSliceChannels : NumChannels)(block_bytes, max_channels);
  Request of_channel = request;
  of_channel.block_count = ChannelCount(request.block_count, item_bytes, num_channels);
  Machine machine = ChannelMachine(GpuMachine(inter_node), num_channels);
  machine.arena = arena;
  if (!FitsLl(LlMessage(block_bytes, num_ranks, false), max_channels)) machine.ll.reset();
  if (!FitsLl(LlMessage(block_bytes, num_ranks, true), max_channels)) machine.ll_two_shot.reset();
  StatusOr<Choice> choice = Select(of_channel, algorithm, item_bytes, machine);
  JAXCOMM_RETURN_IF_ERROR(choice.status());
  Selection selection = {*std::move(choice), num_channels};
  if (selection.choice.ll) {
    const bool twice = selection.choice.algorithm->protocol == Protocol::kLlTwoShot;
    selection.num_channels = NumLlChannels(LlMessage(block_bytes, num_ranks, twice), max_channels);
  }
  return selection;
}

Cost CostOnGpus(const Request& request, const Selection& selection, int64_t item_bytes, std::optional<Machine> gpu,
                InterNode inter_node) {
  const Choice& choice = selection.choice;
  if (choice.ll) {
    Cost cost = CostOf(*choice.algorithm, request, item_bytes, gpu.value_or(GpuMachine(inter_node)));
    cost.traffic[static_cast<size_t>(Link::kNode)].bytes *= 2;
    return cost;
  }
  Cost cost = choice.cost;
  if (gpu) {
    gpu->ll.reset();
    gpu->ll_two_shot.reset();
    cost = CostOf(*choice.algorithm, choice.request, item_bytes, ChannelMachine(*gpu, selection.num_channels));
  }
  cost.scratch_bytes *= selection.num_channels;
  // The slices of channels differ in size. So bytes are counted in the plan of whole blocks.
  Request whole = request;
  whole.chunk_count = std::max<int64_t>(request.block_count, 1);
  whole.staged_count = choice.request.staged_count * selection.num_channels;  // about as many chunks
  Cost of_blocks =
      CostOf(BuildPlan(*choice.algorithm, whole, cost.rank), whole.geometry, item_bytes, GpuMachine(inter_node));
  if (gpu.value_or(GpuMachine(inter_node)).arena) {
    of_blocks.traffic[static_cast<size_t>(Link::kSelf)].bytes += CopiedBytes(*choice.algorithm, whole, item_bytes);
  }
  for (size_t link = 0; link < kNumLinks; ++link) {
    Traffic& traffic = cost.traffic[link];
    traffic.bytes = of_blocks.traffic[link].bytes;
    if (link == static_cast<size_t>(Link::kNetwork) && inter_node == InterNode::kSendRecv) continue;
    traffic.messages *= selection.num_channels;
    traffic.signals *= selection.num_channels;
  }
  return cost;
}

}  // namespace jaxcomm
