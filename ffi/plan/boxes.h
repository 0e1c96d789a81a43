// Moves between arrays that are sharded in two ways. A shard is a box: an interval per dimension of the global array.
//
// The sorted boundaries of all boxes cut each dimension, and so the array, into cells. Each box is a union of cells. In
// the logical order of plan.h, the elements of a box come cell by cell: so a cell is contiguous in every plan, whatever
// its strides in memory. The cells of two equal divisions into p and q parts are p + q - gcd(p, q) intervals.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/status.h"
#include "plan/plan.h"
#include "plan/promise.h"

namespace jaxcomm {

// Per dimension, [begin, end) in the global array. Empty: the rank has no part of the array.
struct Box {
  std::vector<int64_t> begin;
  std::vector<int64_t> end;

  int64_t count() const;
};

// A cell in the memory of a rank that stores its box in row-major order, at the start of an array of the same or larger
// sizes.
struct Cell {
  struct Rows {
    int64_t size;
    int64_t stride;  // elements
  };

  int64_t offset = 0;      // logical, of the first element
  int64_t count = 0;       // elements
  int64_t memory = 0;      // where the first element lies
  int64_t run = 0;         // contiguous elements
  std::vector<Rows> rows;  // of runs, outermost first, at least one
};
using Cells = std::vector<Cell>;  // of one box, by logical offset; empty cells are left out

// A cell that one rank gets from another, or from itself.
struct BoxMove {
  int32_t from = 0;
  int32_t to = 0;
  int64_t from_offset = 0;  // in the input, or in the output if `relayed`
  int64_t to_offset = 0;
  int64_t count = 0;
  bool relayed = false;  // `from` has got the cell from another node
  int64_t pair = -1;     // of BoxMoves::pairs, if the cell crosses the network
};

// Cells that one rank sends another one over the network. If the receiver forwards them, it forwards them all, and to
// the same ranks.
struct BoxPair {
  int32_t from = 0;
  int32_t to = 0;
  int64_t depth = 0;       // ranks that have forwarded the cells before; 0: `from` owns them
  bool forwarded = false;  // by `to`
  int64_t count = 0;
  int64_t matching = 0;  // pairs with equal numbers have different senders and receivers
};

// Each cell of each output once.
struct BoxMoves {
  std::vector<BoxMove> moves;
  std::vector<BoxPair> pairs;  // by receiver
  int64_t depth = 0;           // the largest of all pairs
  int64_t busiest = 0;         // elements that a node sends or receives over the network, at most
};

// The boxes of all ranks, and the moves between them. Follows from the boxes and the nodes alone, so all ranks compute
// the same.
struct Boxes {
  std::vector<Cells> inputs;                   // by rank
  std::vector<Cells> outputs;                  // by rank
  std::vector<std::vector<Promise>> promises;  // by rank: a copy from any rank that has the cell
  BoxMoves direct;                             // each rank gets its own cells
  BoxMoves chains;                             // each node gets a cell once over the network; see MakeBoxes()
  BoxMoves trees;                              // the same; none if no rank forwards in `chains`
  int64_t shortest_run = 0;                    // of all cells with elements; 0: there are none
  bool contiguous_outputs = true;              // each output lies in memory in its logical order

  int64_t input_count(int32_t rank) const;
  int64_t output_count(int32_t rank) const;
  int64_t input_span(int32_t rank) const;  // elements of memory up to the last of the box
  int64_t output_span(int32_t rank) const;
};

// Fails if the boxes are not valid, or if no source has an element of a destination. A rank that owns a cell keeps its
// own. For the others, the cells with the fewest owners come first, then the largest ones; each gets the owner of its
// node, then the one that has sent least. This spreads the load over the owners.
//
// In `chains` and `trees`, the rank of a node that has received least gets the cell, and the first node that wants a
// cell gets it from an owner. In `chains`, a node that gets a cell can send it on at once. So further nodes get it from
// an owner while its node sends no more than the node receives that lacks most; after that, from the node that has sent
// least. Copies of an array follow a chain. In `trees`, a node can send a cell once it has all of it, and the node that
// ends first sends it. Copies of an array follow a binomial tree.
//
// `input_shape`, `output_shape`: of the arrays that hold the boxes, by dimension. Empty: the arrays are the boxes.
StatusOr<std::shared_ptr<const Boxes>> MakeBoxes(const std::vector<Box>& sources, const std::vector<Box>& destinations,
                                                 const Geometry& geometry, const std::vector<int64_t>& input_shape = {},
                                                 const std::vector<int64_t>& output_shape = {});

// Boxes from the attributes of a call: [begin, end) of each dimension of each rank, in this order. Empty if the number
// of entries does not fit.
std::vector<Box> DecodeBoxes(const std::vector<int64_t>& numbers, int64_t num_ranks);

}  // namespace jaxcomm
