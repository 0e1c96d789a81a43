// Runs the data steps of dispatch and combine, whose elements are lists of rows.
//
// List j of rank r has an entry for every choice of r's tokens with an expert at rank j. The table of slices
// (plan/slices.h), which all ranks have, says where its rows lie: slice i of the pair (r, j) is for expert i of j. Its
// input rows number the choices of r, packed by expert; its output rows are slots of j. Which token a choice belongs to
// is known to r alone (RankBuffers::index), so r sends that with the rows, or ahead of them.
//
// The entries of r for the ranks of a node are numbered rank by rank, slice by slice.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/executor.h"

namespace jaxcomm {

class RowLists {
 public:
  // All must outlive this object.
  RowLists(const Program& program, const std::vector<RankBuffers>& buffers, const Slices& slices)
      : program_(program), tokens_(program.tokens), buffers_(buffers), slices_(slices) {}

  // Runs step `first`, or several from there on. Sets `num_run`. Returns the pid of a process whose memory could not be
  // read, or 0.
  int32_t Run(const Plan& plan, size_t first, size_t* num_run) const;

 private:
  int32_t NodeOf(int32_t rank) const { return rank / tokens_.ranks_per_node; }
  bool stream() const;
  // Calls visit(entry, rank, packed choice, slot) for the lists of `owner` for the ranks of a node. `owner`, here and
  // below: the rank that owns the tokens.
  template <typename Visit>
  void ForEachEntry(int32_t owner, int32_t node, const Visit& visit) const;
  int64_t NumEntries(int32_t owner, int32_t node) const;
  char* OutputRow(int32_t rank, int64_t slot) const { return buffers_[rank].output + slot * tokens_.row_bytes; }
  class Message;
  // A list of a combine, at a rank of `node`: for the rows that tokens of `owner` have there.
  struct List {
    const uint32_t* numbers = nullptr;
    const char* weights = nullptr;
    int64_t entries = 0;  // at most; an end may come earlier
    int64_t tokens = 0;
  };
  List ListAt(int32_t rank, int32_t owner) const;

  int32_t RunStep(const Plan& plan, const Step& step) const;
  size_t NumJoined(const Plan& plan, size_t first) const;
  void MoveJoined(const Plan& plan, size_t first, size_t num_steps) const;
  bool IsPulled(const Plan& plan, const Step& step) const;
  int32_t MovePulled(const Step& step) const;
  bool MoveRows(int32_t from, const std::vector<int32_t>& ranks) const;
  void MoveDispatched(int32_t from, int32_t to) const;
  void SendDispatched(int32_t from, int32_t to) const;
  void ZeroRest(int32_t rank) const;
  void PutMessage(const Step& step) const;
  void ForwardMessage(const Step& step) const;

  void PutCombined(int32_t from, int32_t owner) const;
  void PutList(const Step& step) const;
  void MoveList(const Step& step) const;
  int32_t SumNode(const Step& step, int32_t owner) const;
  void PutSums(const Step& step) const;
  int32_t AddTokens(const Plan& plan, const Step& step) const;

  const Program& program_;
  const TokenLayout& tokens_;
  const std::vector<RankBuffers>& buffers_;
  const Slices& slices_;
};

}  // namespace jaxcomm
