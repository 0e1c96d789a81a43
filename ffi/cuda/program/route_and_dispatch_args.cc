#include "cuda/program/route_and_dispatch_args.h"

#include <algorithm>
#include <limits>
#include <string>

#include "plan/channels.h"
#include "plan/partition.h"

namespace jaxcomm::cuda {
int64_t ArenaBytes(const RouteAndDispatchArgs& args) {
  const int64_t units = int64_t{args.num_channels} * ChannelUnits(args);
  return EpochBytes(args.num_epochs) + 2 * args.comm.local.size * units * 2 * kUnitBytes;
}

StatusOr<RouteAndDispatchArgs> MakeRouteAndDispatchArgs(const CallSpec& spec, const RouteAndDispatchShape& shape,
                                                        int32_t max_channels) {
  const int64_t n = spec.group_size;
  const std::string sizes = std::to_string(n) + " ranks with " + std::to_string(shape.tokens) + " tokens of " +
                            std::to_string(shape.choices) + " choices of " + std::to_string(shape.num_experts) +
                            " experts, and " + std::to_string(shape.capacity) + " rows of " +
                            std::to_string(shape.row_bytes) + " bytes";
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (std::min({shape.tokens, shape.choices, shape.num_experts, shape.capacity, shape.align, shape.row_bytes}) < 1 ||
      shape.slots < 0 || shape.num_experts % n != 0 || std::max({shape.capacity, shape.align, shape.slots}) > kMost ||
      (shape.slots > 0 && (shape.align != 1 || shape.capacity != shape.slots * (shape.num_experts / n)))) {
    return InvalidArgumentError(sizes + " do not fit each other");
  }
  RouteAndDispatchArgs args;
  const int64_t choices = shape.tokens * shape.choices, bytes = shape.tokens * shape.row_bytes;
  if (shape.num_experts <= kMaxOneExchangeExperts && choices <= kMaxSharedBytes && bytes <= kMaxOneExchangeArenaBytes) {
    args.comm.local.size = static_cast<int32_t>(n);
    args.tokens = static_cast<int32_t>(shape.tokens);
    args.choices = static_cast<int32_t>(shape.choices);
    args.num_experts = static_cast<int32_t>(shape.num_experts);
    args.capacity = static_cast<int32_t>(shape.capacity);
    args.align = static_cast<int32_t>(shape.align);
    args.slots = static_cast<int32_t>(shape.slots);
    args.row_bytes = shape.row_bytes;
    args.num_epochs = max_channels;
    if (spec.max_sms > 0) max_channels = static_cast<int32_t>(std::min<int64_t>(max_channels, spec.max_sms));
    const RowPieces pieces = PiecesOf(args.row_bytes, bytes, max_channels);
    args.piece_bytes = pieces.piece_bytes;
    args.num_channels = pieces.num_channels;
    if (RouteAndDispatchSharedBytes(args) <= kMaxSharedBytes && ArenaBytes(args) <= kMaxOneExchangeArenaBytes)
      return args;
  }
  return InvalidArgumentError(sizes + " are too large for one exchange of LL messages; use route and dispatch");
}

RouteAndDispatchArgs WithComm(RouteAndDispatchArgs args, const device::Comm& comm) {
  args.comm = comm;
  args.comm.ll_slots = SlotsOfArena(comm, args.num_epochs);
  return args;
}

}  // namespace jaxcomm::cuda
