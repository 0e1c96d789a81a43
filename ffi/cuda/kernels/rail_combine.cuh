// combine between nodes of GPUs: the plan "hierarchical" of plan/algorithms/combine.cc, over GIN. The source rank of a
// token is the rank that dispatched it. It gets either one sum per token and node, or the rows of all choices.
//
// A rank serves one source node per turn, its own node last. In the turn of node a, the ranks of this node write the
// rows of its tokens to the arenas of their own node: those of tokens of rank (a, l) to local rank l. Local rank l puts
// them to (a, l), its rail peer, by one message per channel:
// - Sums by node: one row for each token. The source rank first sends a list of its tokens, because only the source
//   rank knows which choices belong to one token, and their weights. It then adds its tokens' rows, one per node.
// - Sums at the source: the rows of all choices, as the table orders them. There is no list.
//
// A channel has the same piece of every row. All ranks signal in the same order, whatever the routing.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_combine.cuh, for the two stages.
#pragma once

#include "cuda/kernels/rail_call.cuh"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// A thread block's part of a combine between nodes. `Gin`: that of include/jaxcomm/gin.h.
template <typename Gin>
class RailCombine : RailCall {
 public:
  // `shared`: RailSharedBytes(). All arguments must outlive this object.
  JAXCOMM_DEVICE RailCombine(const InterNodeRowArgs& args, const Gin& gin, int32_t channel, void* shared)
      : RailCall(args, channel, shared),
        gin_(gin),
        sums_at_source_(args.sums_at_source),
        weight_bytes_(args.weight_bytes),
        arena_(RailCombineArenaOf(args, rail_.size)) {}

  JAXCOMM_DEVICE void Run() {
    RunChecked([&] { Combine(); });
  }

 private:
  // Byte offsets in an arena. The lists: from the source rank in `node`, and for the node `d` behind this one.
  JAXCOMM_DEVICE int64_t InChannel(int64_t offset) const { return channel_ * arena_.channel_bytes + offset; }
  JAXCOMM_DEVICE int64_t ReceivedList(int32_t node) const { return InChannel(node * arena_.list_bytes); }
  JAXCOMM_DEVICE int64_t SentList(int32_t d) const { return ReceivedList(num_nodes() + d - 1); }
  // Rows that arrive at the source rank: a sum of each token and node, or those of the packed choices.
  JAXCOMM_DEVICE int64_t ReceivedRow(int64_t row) const { return InChannel(arena_.received) + row * piece_bytes_; }
  JAXCOMM_DEVICE int64_t SentSums(int32_t turn) const {
    return InChannel(arena_.sent) + turn * args_.num_rows * piece_bytes_;
  }
  // The rows of the node, by packed choice. Two turns later, peers overwrite them.
  JAXCOMM_DEVICE int64_t Gathered(int32_t turn, int64_t row) const {
    return InChannel(arena_.gathered) + (turn % 2 * args_.num_choices + row) * piece_bytes_;
  }

  // At the source rank: the row in the received sums for each token and node, -1 if it has none; then, for AddTokens,
  // where the nodes of each token end.
  JAXCOMM_DEVICE int32_t* SumsOf(int64_t token) const {
    return reinterpret_cast<int32_t*>(OwnArena(InChannel(arena_.sums))) + token * num_nodes();
  }
  JAXCOMM_DEVICE int32_t* SumsEnds() const { return SumsOf(args_.num_rows); }

  // The packed choice, if its expert is in `node`; otherwise -1. A choice that has no expert counts in the own node.
  JAXCOMM_DEVICE int32_t PackedIn(int32_t node, int64_t choice) {
    if (args_.index[choice] < 0) return -1;
    const int32_t expert = args_.expert[choice];
    const bool exists = expert >= 0 && expert < args_.num_experts;
    return (exists ? expert / (num_local_ * node_.local.size) : rail_.rank) == node ? Packed(choice) : -1;
  }

  // Writes the list of the own tokens that have choices in `node`: their number, the packed choices, token by token,
  // their weights, and where each token ends. Returns its size in bytes.
  JAXCOMM_DEVICE int64_t WriteList(int32_t node, char* list) {
    const Range choices = ChoicesFor(rank(), node);
    auto* const positions = reinterpret_cast<int32_t*>(list + kRailHeaderBytes);
    char* const weights = list + RailWeightsAt(choices.size);
    auto* const ends = reinterpret_cast<int32_t*>(list + RailEndsAt(choices.size, weight_bytes_));
    const int32_t num = args_.choices_per_row;
    int32_t tokens = 0, entries = 0;
    for (int64_t first = 0; first < args_.num_rows; first += Threads()) {
      const int64_t token = first + Thread(), begin = token * num;
      int32_t own = 0;
      for (int64_t c = begin; token < args_.num_rows && c < begin + num; ++c) own += PackedIn(node, c) >= 0 ? 1 : 0;
      const ThreadSum before = SumOfThreads(own, positions_), tokens_before = SumOfThreads(own > 0 ? 1 : 0, positions_);
      const int32_t at = tokens + tokens_before.before;
      int32_t entry = entries + before.before;
      for (int64_t c = begin; own > 0 && c < begin + num; ++c) {
        const int32_t packed = PackedIn(node, c);
        if (packed < 0) continue;
        // A routing that names a row twice has more choices than the table.
        if (entry >= choices.size) {
          RememberRow(args_.index[c]);
          break;
        }
        positions[entry] = packed - static_cast<int32_t>(choices.begin);
        CopyWeight(weights, entry++, c);
      }
      if (own > 0) ends[at] = entry < choices.size ? entry : static_cast<int32_t>(choices.size);
      if (token < args_.num_rows) {
        SumsOf(token)[node] = own > 0 ? static_cast<int32_t>(node * args_.num_rows + at) : -1;
        SumsEnds()[token] = static_cast<int32_t>((token + 1) * num_nodes());
      }
      tokens += tokens_before.all;
      entries += before.all;
    }
    if (Thread() == 0) *reinterpret_cast<int32_t*>(list) = tokens;
    __syncthreads();
    return choices.size > 0 ? RailEndsAt(choices.size, weight_bytes_) + tokens * static_cast<int64_t>(sizeof(int32_t))
                            : 0;
  }
  JAXCOMM_DEVICE void CopyWeight(char* weights, int32_t entry, int64_t choice) const {
    if (weight_bytes_ == static_cast<int32_t>(sizeof(float))) {
      reinterpret_cast<float*>(weights)[entry] = static_cast<const float*>(args_.weights)[choice];
    } else if (weight_bytes_ != 0) {
      reinterpret_cast<double*>(weights)[entry] = static_cast<const double*>(args_.weights)[choice];
    }
  }

  JAXCOMM_DEVICE bool SendLists() {
    for (int32_t d = 1; d < num_nodes(); ++d) {
      const int32_t node = Back(d), peer = rail_.World(node);
      const int64_t bytes = WriteList(node, OwnArena(SentList(d)));
      if (!gin_.Wait(channel_, peer, device::OfBlock(), kEntryBarrier)) return false;
      // One thread, as in rail_dispatch.cuh.
      if (Thread() == 0 && gin_.Put(channel_, peer, ReceivedList(rail_.rank), SentList(d), bytes)) {
        gin_.Signal(channel_, peer);
      }
    }
    WriteList(rail_.rank, OwnArena(ReceivedList(rail_.rank)));
    return true;
  }

  // Adds the gathered rows of each token in the list from `node`. Returns the number of tokens.
  JAXCOMM_DEVICE int64_t AddGathered(int32_t turn, int32_t node, int64_t to) {
    const int64_t entries = ChoicesFor(rail_.World(node), rail_.rank).size;
    if (entries == 0) return 0;  // the list was not sent
    const char* const list = OwnArena(ReceivedList(node));
    const int32_t tokens = *reinterpret_cast<const int32_t*>(list);
    const auto* const positions = reinterpret_cast<const int32_t*>(list + kRailHeaderBytes);
    const auto* const ends = reinterpret_cast<const int32_t*>(list + RailEndsAt(entries, weight_bytes_));
    AddListed(tokens, OwnArena(Gathered(turn, 0)), {positions, ends, 0},
              weight_bytes_ != 0 ? list + RailWeightsAt(entries) : nullptr, OwnArena(to), piece_bytes_);
    __syncthreads();  // before one thread puts the sums
    return tokens;
  }

  // Sums of `tokens` tokens, from rows in the own arena to y.
  JAXCOMM_DEVICE void AddListed(int64_t tokens, const char* rows, ListedChoices choices, const void* weights, char* y,
                                int64_t to_bytes) {
    WithCodec([&](auto codec) {
      using Codec = decltype(codec);
      using Acc = typename Codec::Acc;
      const int32_t units = SumUnits<Codec>();
      const int64_t most = kMostUnits / units;
      for (choices.first = 0; choices.first < tokens; choices.first += most) {
        const int64_t left = tokens - choices.first;
        Add<Codec>(TokenSums<Acc, ListedChoices>{rows, piece_bytes_, y + choices.first * to_bytes, to_bytes, choices,
                                                 static_cast<const Acc*>(weights), units},
                   static_cast<int32_t>(left < most ? left : most));
      }
    });
  }

  // Returns the rows of `node` to its tokens.
  JAXCOMM_DEVICE bool ServeNode(int32_t turn, int32_t node) {
    const bool own = node == rail_.rank;
    const int32_t peer = rail_.World(node), step = turn + 1;
    MoveTurn(turn, node, [&](int32_t source_rank, int32_t expert, int64_t k) {
      const int64_t packed = At(source_rank, kInputOffset, expert) + k;
      const int64_t to = own && sums_at_source_ ? ReceivedRow(packed)
                                                : Gathered(turn, packed - ChoicesFor(source_rank, rail_.rank).begin);
      return RowMove{node_.arena.At(source_rank % node_.local.size, to),
                     args_.x + (At(source_rank, kOutputOffset, expert) + k) * args_.row_bytes + piece_at_};
    });
    // After the barrier, peers may overwrite what the network reads since the last turn.
    if (sums_at_source_ && !gin_.Flush(channel_, device::OfBlock())) return false;
    if (!device::Barrier(node_, channel_, step)) return false;
    // The list of the peer, or that its arena is free.
    if (!own && !gin_.Wait(channel_, peer, device::OfBlock(), step)) return false;
    int64_t from = Gathered(turn, 0), rows = 0, to = 0;
    if (sums_at_source_) {
      const Range choices = ChoicesFor(peer, rail_.rank);
      rows = choices.size;
      to = choices.begin;
    } else {
      to = rail_.rank * args_.num_rows;
      from = own ? ReceivedRow(to) : SentSums(turn);
      rows = AddGathered(turn, node, from);
    }
    if (own || Thread() != 0) return true;
    if (gin_.Put(channel_, peer, ReceivedRow(to), from, rows * piece_bytes_)) gin_.Signal(channel_, peer);
    return true;
  }

  JAXCOMM_DEVICE bool Combine() {
    const auto node_of = [&](int32_t turn) { return Ahead(turn + 1); };
    SumTurns(node_of);
    // The arena of this rank is free: its peers have ended the last call, or will not access it before the barrier.
    if (Thread() == 0) {
      for (int32_t d = 1; d < num_nodes(); ++d) gin_.Signal(channel_, rail_.World(Ahead(d)));
    }
    if (!sums_at_source_ && !SendLists()) return false;
    if (!device::Barrier(node_, channel_, kEntryBarrier)) return false;
    for (int32_t turn = 0; turn < num_nodes(); ++turn) {
      if (!ServeNode(turn, node_of(turn))) return false;
    }
    for (int32_t d = 1; d < num_nodes(); ++d) {
      if (!gin_.Wait(channel_, rail_.World(Back(d)), device::OfBlock(), num_nodes() + d)) return false;
    }
    if (sums_at_source_) {
      AddChoices(OwnArena(ReceivedRow(0)), piece_bytes_);
    } else {
      AddListed(args_.num_rows, OwnArena(ReceivedRow(0)), {SumsOf(0), SumsEnds(), 0}, nullptr, Slot(0),
                args_.row_bytes);
    }
    // The next call may overwrite the arena. Peers of the node access it before the barrier of the last turn only.
    return gin_.Flush(channel_, device::OfBlock());
  }

  const Gin& gin_;
  const bool sums_at_source_;
  const int32_t weight_bytes_;
  const RailCombineArena arena_;
};

}  // namespace jaxcomm::cuda
#endif
