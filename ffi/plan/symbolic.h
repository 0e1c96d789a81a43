// Symbolic buffers for Validate: for every element, its content as an expression over the inputs, its last writer and
// its readers. They are stored per extent of equal elements, so the cost does not depend on the size of a buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace jaxcomm {

// The content of an extent: element x of the buffer is `value`, taken at element x + shift of the inputs.
struct Content {
  int32_t value = -1;  // number of an expression in Values; -1: never written
  int64_t shift = 0;
};

// Expressions over the inputs, numbered: equal expressions have equal numbers. Leaf r is the input of rank r.
class Values {
 public:
  explicit Values(int32_t num_ranks) : num_ranks_(num_ranks) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      ranks_.emplace_back((static_cast<size_t>(num_ranks) + 63) / 64);
      ranks_.back()[static_cast<size_t>(rank) / 64] = uint64_t{1} << (rank % 64);
    }
    ranks_.emplace_back();  // Zero() sums no rank
  }

  int32_t Leaf(int32_t rank) const { return rank; }
  int32_t Zero() const { return num_ranks_; }
  // The sum of `operands` from left to right; a single operand is its own sum. -1 if an operand is not a sum of inputs
  // or a rank would count twice.
  int32_t Sum(const std::vector<int32_t>& operands) {
    if (operands.size() == 1) return operands[0];
    const auto found = sums_.find(operands);
    if (found != sums_.end()) return found->second;
    std::vector<uint64_t> all(ranks_[0].size());
    for (int32_t operand : operands) {
      if (operand < 0 || operand == Zero()) return -1;
      for (size_t i = 0; i < all.size(); ++i) {
        const uint64_t set = ranks_[static_cast<size_t>(operand)][i];
        if (all[i] & set) return -1;
        all[i] |= set;
      }
    }
    const auto value = static_cast<int32_t>(ranks_.size());
    ranks_.push_back(std::move(all));
    sums_.emplace(operands, value);
    return value;
  }
  // The ranks that an expression sums, in ascending order. An input is the sum of its rank; zeros sum no rank.
  std::vector<int32_t> RanksOf(int32_t value) const {
    std::vector<int32_t> ranks;
    const std::vector<uint64_t>& set = ranks_[static_cast<size_t>(value)];
    for (int32_t rank = 0; rank < num_ranks_ && value != Zero(); ++rank) {
      if (set[static_cast<size_t>(rank) / 64] >> (rank % 64) & 1) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  struct Hash {
    size_t operator()(const std::vector<int32_t>& operands) const {
      uint64_t hash = 14695981039346656037u;  // FNV-1a over the operands
      for (int32_t operand : operands) hash = (hash ^ static_cast<uint32_t>(operand)) * 1099511628211u;
      return static_cast<size_t>(hash);
    }
  };
  int32_t num_ranks_;
  std::vector<std::vector<uint64_t>> ranks_;  // by value: the set of ranks that it sums
  std::unordered_map<std::vector<int32_t>, int32_t, Hash> sums_;
};

// A point in the execution of a rank: the rank's own entry in its vector clock.
struct Moment {
  int32_t rank = -1;
  int32_t time = 0;
};

// A range of elements with equal history, up to `end`.
struct Extent {
  int64_t end = 0;
  Content content;
  Moment writer;
  size_t step = 0;              // of the writer
  int64_t signals_before = -1;  // from writer to owner before the put; -1: not a put across the network
  std::vector<Moment> readers;  // since the last write
};

// One buffer: extents that cover [0, count), by their first element.
class Memory {
 public:
  explicit Memory(int64_t count) : count_(count) {
    if (count > 0) extents_[0].end = count;
  }

  // Splits extents at `begin` and `end`, then calls visit(begin, extent) for all extents in between.
  template <typename Visit>
  void ForEach(int64_t begin, int64_t end, Visit visit) {
    Cut(begin);
    Cut(end);
    for (auto it = extents_.find(begin); it != extents_.end() && it->first < end; ++it) visit(it->first, it->second);
  }
  void Replace(int64_t begin, const Extent& extent) {
    Cut(begin);
    Cut(extent.end);
    extents_.erase(extents_.lower_bound(begin), extents_.lower_bound(extent.end));
    extents_[begin] = extent;
  }

 private:
  void Cut(int64_t at) {
    if (at <= 0 || at >= count_) return;
    const auto after = extents_.upper_bound(at);
    const auto it = std::prev(after);
    if (it->first == at) return;
    Extent rest = it->second;
    it->second.end = at;
    extents_.emplace_hint(after, at, std::move(rest));
  }

  int64_t count_;
  std::map<int64_t, Extent> extents_;
};

}  // namespace jaxcomm
