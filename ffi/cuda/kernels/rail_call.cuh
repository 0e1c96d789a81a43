// What dispatch and combine between nodes share: the nodes, and the rows of this rank's experts, node by node.
#pragma once

#include "cuda/kernels/rows.cuh"
#include "cuda/program/inter_node_row_args.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

class RailCall : protected RowCall {
 protected:
  // `shared`: RailSharedBytes(). Both arguments must outlive this object.
  JAXCOMM_DEVICE RailCall(const InterNodeRowArgs& args, int32_t channel, void* shared)
      : RowCall(args.rows, channel, shared), node_(args.node), rail_(device::RailOf(args.node)) {}

  JAXCOMM_DEVICE int32_t num_nodes() const { return rail_.size; }
  // The node `d` nodes ahead of this one, and the one behind.
  JAXCOMM_DEVICE int32_t Ahead(int32_t d) const { return (rail_.rank + d) % num_nodes(); }
  JAXCOMM_DEVICE int32_t Back(int32_t d) const { return (rail_.rank + num_nodes() - d) % num_nodes(); }
  JAXCOMM_DEVICE char* OwnArena(int64_t offset) const { return node_.arena.At(node_.local.rank, offset); }

  // The packed choices of rank `source_rank` for `node`: they follow each other.
  struct Range {
    int64_t begin, size;
  };
  JAXCOMM_DEVICE Range ChoicesFor(int32_t source_rank, int32_t node) const {
    const int32_t experts = num_local_ * node_.local.size;
    const int64_t begin = EndOfChoices(source_rank, node * experts - 1);
    return {begin, EndOfChoices(source_rank, (node + 1) * experts - 1) - begin};
  }

  // The call serves one source node per turn: node_of(turn). Sets ends_[i] to the number of rows of the slices 0 .. i
  // of this rank's experts, turn by turn.
  template <typename NodeOf>
  JAXCOMM_DEVICE void SumTurns(NodeOf node_of) {
    const int32_t locals = node_.local.size, slices = num_local_ * locals;
    SumSizes(ends_, args_.num_experts, positions_, [&](int32_t i) {
      const int32_t source_rank = node_of(i / slices) * locals + i % locals;
      return static_cast<int32_t>(At(source_rank, kSize, rank() * num_local_ + i % slices / locals));
    });
  }

  // Moves all rows between this rank's experts and the tokens of `node`, which has this turn. make(source_rank, expert,
  // k): the move of row k of a slice.
  template <typename Make>
  JAXCOMM_DEVICE void MoveTurn(int32_t turn, int32_t node, Make make) {
    const int32_t locals = node_.local.size, slices = num_local_ * locals;
    const int64_t first = BeginOf(ends_, turn * slices);
    Move(BeginOf(ends_, (turn + 1) * slices) - first, [&](int64_t i) {
      const int64_t j = first + i;
      const int32_t slice = FirstEndBehind(ends_, args_.num_experts, j);
      return make(node * locals + slice % locals, rank() * num_local_ + slice % slices / locals,
                  j - BeginOf(ends_, slice));
    });
  }

  const device::Comm& node_;
  const device::Team rail_;
};

}  // namespace jaxcomm::cuda
#endif
