// dispatch between nodes of GPUs: the plan "hierarchical" of plan/algorithms/dispatch.cc, over GIN, whose lists of rows
// are read from device memory.
//
// 1. A rank packs, for each node, the rows that the node needs, once per token. Before them go the positions of these
//    rows, one per choice. It puts both to its rail peer of the node by one message per channel, and signals.
// 2. The ranks of the experts read their rows from the arenas of their node, where the messages for the node are, into
//    the slots.
// Rows are packed because a channel has only a piece of each row: puts of pieces would be too short for the network.
//
// A channel moves the same piece of every row, as in rows.cuh. The table says which packed choices are for a node, but
// not which rows they name; the positions in the message do. All ranks signal in the same order, whatever the routing.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_dispatch.cuh, for the two stages.
#pragma once

#include "cuda/kernels/rail_call.cuh"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

JAXCOMM_DEVICE int32_t CountBits(uint64_t word) {
#if defined(__CUDACC__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// The number of the bit that has `before` set bits below it.
JAXCOMM_DEVICE int32_t FindBit(uint64_t word, int32_t before) {
  int32_t at = 0;
  for (int32_t half = 32; half > 0; half /= 2) {
    const int32_t below = CountBits(word & ((uint64_t{1} << half) - 1));
    if (before < below) continue;
    before -= below;
    word >>= half;
    at += half;
  }
  return at;
}

// A thread block's part of a dispatch between nodes. `Gin`: that of include/jaxcomm/gin.h.
template <typename Gin>
class RailDispatch : RailCall {
 public:
  // `shared`: RailSharedBytes(). All arguments must outlive this object.
  JAXCOMM_DEVICE RailDispatch(const InterNodeRowArgs& args, const Gin& gin, int32_t channel, void* shared)
      : RailCall(args, channel, shared),
        gin_(gin),
        marks_(reinterpret_cast<uint64_t*>(static_cast<char*>(shared) + RailMarksAt(args.rows, Threads()))),
        marked_(reinterpret_cast<int32_t*>(marks_ + RailMarkWords(args.rows))) {}

  JAXCOMM_DEVICE void Run() {
    RunChecked([&] { Dispatch(); });
  }

 private:
  // Byte offsets in an arena: the message from node `source`, and the one for the node `d` behind this one.
  JAXCOMM_DEVICE int64_t Received(int32_t source) const {
    return (int64_t{source} * args_.num_channels + channel_) * RailMessageBytes(args_);
  }
  JAXCOMM_DEVICE int64_t Sent(int32_t d) const { return Received(num_nodes() + d - 1); }

  // Marks the rows that the choices name. marked_[i]: the marked rows of the words 0 .. i.
  JAXCOMM_DEVICE void MarkRows(Range choices) {
    const auto num_words = static_cast<int32_t>(RailMarkWords(args_));
    for (int32_t i = Thread(); i < num_words; i += Threads()) device::StoreRelaxed(marks_ + i, 0);
    __syncthreads();
    for (int64_t i = Thread(); i < choices.size; i += Threads()) {
      const int32_t row = args_.index[choices.begin + i];
      if (!Exists(row)) {
        RememberRow(row);
        continue;
      }
      uint64_t* const word = marks_ + row / 64;
      const uint64_t mark = uint64_t{1} << row % 64;
      for (;;) {
        const uint64_t seen = device::LoadRelaxed(word);
        if ((seen & mark) != 0 || device::Claim(word, seen, seen | mark)) break;
      }
    }
    __syncthreads();
    SumSizes(marked_, num_words, positions_, [&](int32_t i) { return CountBits(device::LoadRelaxed(marks_ + i)); });
  }

  // The number of a marked row among the marked rows, and the row of a number.
  JAXCOMM_DEVICE int32_t PositionOf(int32_t row) const {
    const uint64_t below = (uint64_t{1} << row % 64) - 1;
    return BeginOf(marked_, row / 64) + CountBits(device::LoadRelaxed(marks_ + row / 64) & below);
  }
  JAXCOMM_DEVICE int64_t RowAt(int64_t position) const {
    const int32_t word = FirstEndBehind(marked_, static_cast<int32_t>(RailMarkWords(args_)), position);
    return word * int64_t{64} +
           FindBit(device::LoadRelaxed(marks_ + word), static_cast<int32_t>(position) - BeginOf(marked_, word));
  }

  // Writes the message for `node`. Returns its size in bytes.
  JAXCOMM_DEVICE int64_t Pack(int32_t node, char* message) {
    const Range choices = ChoicesFor(rank(), node);
    MarkRows(choices);
    auto* const positions = reinterpret_cast<int32_t*>(message);
    for (int64_t i = Thread(); i < choices.size; i += Threads()) {
      const int32_t row = args_.index[choices.begin + i];
      positions[i] = Exists(row) ? PositionOf(row) : -1;
    }
    const int64_t num_rows = BeginOf(marked_, static_cast<int32_t>(RailMarkWords(args_)));
    char* const rows = message + RailListBytes(choices.size);
    Move(num_rows,
         [&](int64_t i) { return RowMove{rows + i * piece_bytes_, args_.x + RowAt(i) * args_.row_bytes + piece_at_}; });
    return RailListBytes(choices.size) + num_rows * piece_bytes_;
  }

  // Copies the rows of the experts of this rank from the messages of node `source`.
  JAXCOMM_DEVICE void Unpack(int32_t source, int32_t d) {
    MoveTurn(d, source, [&](int32_t source_rank, int32_t expert, int64_t k) {
      const Range choices = ChoicesFor(source_rank, rail_.rank);
      const char* const message = node_.arena.At(source_rank % node_.local.size, Received(source));
      const int32_t at =
          reinterpret_cast<const int32_t*>(message)[At(source_rank, kInputOffset, expert) + k - choices.begin];
      return RowMove{Slot(At(source_rank, kOutputOffset, expert) + k),
                     Exists(at) ? message + RailListBytes(choices.size) + at * piece_bytes_ : nullptr};
    });
  }

  JAXCOMM_DEVICE bool Dispatch() {
    SumTurns([&](int32_t d) { return Back(d); });
    // The arena of this rank is free: its peers have read it before the last call ended.
    if (Thread() == 0) {
      for (int32_t d = 1; d < num_nodes(); ++d) gin_.Signal(channel_, rail_.World(Back(d)));
    }
    for (int32_t d = 1; d < num_nodes(); ++d) {
      const int32_t node = Ahead(d), peer = rail_.World(node);
      const int64_t bytes = Pack(node, OwnArena(Sent(d)));
      if (!gin_.Wait(channel_, peer, device::OfBlock(), kEntryBarrier)) return false;
      // One thread: threads of a warp that wait for entries in one of NCCL's queues could wait for each other.
      if (Thread() == 0 && gin_.Put(channel_, peer, Received(rail_.rank), Sent(d), bytes)) gin_.Signal(channel_, peer);
    }
    Pack(rail_.rank, OwnArena(Received(rail_.rank)));
    for (int32_t d = 0; d < num_nodes(); ++d) {
      const int32_t source = Back(d), step = d > 0 ? d : static_cast<int32_t>(kEntryBarrier);
      if (d > 0 && !gin_.Wait(channel_, rail_.World(source), device::OfBlock(), step)) return false;
      if (!device::Barrier(node_, channel_, step)) return false;
      Unpack(source, d);
    }
    ZeroGaps();
    // The next call may overwrite the arena.
    return gin_.Flush(channel_, device::OfBlock()) && device::Barrier(node_, channel_, kExitBarrier);
  }

  const Gin& gin_;
  uint64_t* const marks_;  // shared memory
  int32_t* const marked_;
};

}  // namespace jaxcomm::cuda
#endif
