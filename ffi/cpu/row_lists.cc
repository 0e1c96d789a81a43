#include "cpu/row_lists.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/pages.h"
#include "cpu/token_sums.h"
#include "transport/node.h"

namespace jaxcomm {
namespace {

// Shorter rows are copied through the caches, even to large outputs.
constexpr int64_t kMinStreamedRowBytes = 1024;
// Bytes that one system call reads from another process: they stay in the cache.
constexpr int64_t kReadBytes = 256 << 10;
// An entry of a list of a combine. kEnd ends a list that has fewer entries than the table of slices: the routing of a
// program may be wrong.
constexpr uint32_t kEnd = 0xffffffff;
uint32_t EntryOf(int64_t number, bool first_of_token) { return static_cast<uint32_t>(number) * 2 + first_of_token; }
int64_t NumberOf(uint32_t entry) { return entry / 2; }
bool IsFirst(uint32_t entry) { return entry % 2 != 0; }

}  // namespace

// Bytes for the memory of a rank. For a rank of this node, they are written to their destination. For a rank of another
// node, they are written to separate memory, which Send() passes to the network.
class RowLists::Message {
 public:
  Message(const RowLists& lists, int32_t to, Space space, int64_t offset_bytes, int64_t bytes)
      : to_(lists.buffers_[to]), item_bytes_(lists.program_.item_bytes), place_{to, space, 0}, bytes_(bytes) {
    place_.offset = offset_bytes / item_bytes_;
    if (to_.remote != nullptr) own_.reset(new char[static_cast<size_t>(bytes)]);
    data_ = own_ ? own_.get() : (space == Space::kScratch ? to_.scratch : to_.output) + offset_bytes;
  }
  char* data() const { return data_; }
  void Send() {
    if (own_) to_.remote->Put(place_, std::move(own_), bytes_ / item_bytes_);
  }

 private:
  const RankBuffers& to_;
  const int64_t item_bytes_;
  Place place_;
  const int64_t bytes_;
  std::unique_ptr<char[]> own_;
  char* data_ = nullptr;
};

int32_t RowLists::Run(const Plan& plan, size_t first, size_t* num_run) const {
  *num_run = 1;
  if (IsPulled(plan, plan.steps[first])) return MovePulled(plan.steps[first]);
  *num_run = NumJoined(plan, first);
  if (*num_run > 1) return MoveJoined(plan, first, *num_run), 0;
  *num_run = 1;
  return RunStep(plan, plan.steps[first]);
}

int32_t RowLists::RunStep(const Plan& plan, const Step& step) const {
  const bool reduces = step.kind == StepKind::kReduce;
  const Place& src = reduces ? plan.sources[step.first_source] : step.src;
  const bool to_scratch = step.dst.space == Space::kScratch, from_scratch = src.space == Space::kScratch;
  if (tokens_.row_bytes == 0) return 0;
  if (!tokens_.combines) {
    if (to_scratch) return PutMessage(step), 0;
    if (from_scratch) return ForwardMessage(step), 0;
    return MoveDispatched(src.rank, step.dst.rank), 0;
  }
  if (!to_scratch) return AddTokens(plan, step);
  if (!tokens_.hierarchical) return PutCombined(src.rank, step.dst.rank), 0;
  switch (tokens_.areas().AreaOf(step.dst.offset)) {
    case RowAreas::kReceivedLists:
      return PutList(step), 0;
    case RowAreas::kLists:
      return MoveList(step), 0;
    case RowAreas::kSums:
      return SumNode(step, static_cast<int32_t>(src.offset));
    default:
      return PutSums(step), 0;
  }
}

bool RowLists::stream() const { return program_.stream && tokens_.row_bytes >= kMinStreamedRowBytes; }

template <typename Visit>
void RowLists::ForEachEntry(int32_t owner, int32_t node, const Visit& visit) const {
  int64_t entry = 0;
  for (int32_t rank = node * tokens_.ranks_per_node; rank < (node + 1) * tokens_.ranks_per_node; ++rank) {
    for (int64_t i = 0; i < slices_.per_pair(); ++i) {
      const Slice slice = slices_.At(owner, rank, i);
      for (int64_t k = 0; k < slice.size; ++k, ++entry) {
        visit(entry, rank, slice.input_offset + k, slice.output_offset + k);
      }
    }
  }
}

int64_t RowLists::NumEntries(int32_t owner, int32_t node) const {
  int64_t entries = 0;
  for (int32_t rank = node * tokens_.ranks_per_node; rank < (node + 1) * tokens_.ranks_per_node; ++rank) {
    for (int64_t i = 0; i < slices_.per_pair(); ++i) entries += slices_.At(owner, rank, i).size;
  }
  return entries;
}

// dispatch: the number of steps from `first` on that move rows of one payload to outputs of this host.
size_t RowLists::NumJoined(const Plan& plan, size_t first) const {
  if (tokens_.combines || tokens_.row_bytes < kMinStreamedRowBytes) return 0;
  const int32_t from = plan.steps[first].src.rank;
  size_t end = first;
  for (; end < plan.steps.size(); ++end) {
    const Step& step = plan.steps[end];
    if (!IsMove(step.kind) || step.src.rank != from || step.src.space != Space::kInput ||
        step.dst.space != Space::kOutput || buffers_[from].input_pid != 0 ||
        buffers_[step.dst.rank].remote != nullptr) {
      break;
    }
  }
  return end - first;
}

// dispatch: whether a step is one of a plan whose ranks read, and rows of the source are read once for all ranks of the
// process that read from it. For short rows of this process, that would cost more than it saves.
bool RowLists::IsPulled(const Plan& plan, const Step& step) const {
  const auto reads = [&](const Step& s) {
    return IsMove(s.kind) && s.src.space == Space::kInput && s.dst.space == Space::kOutput && s.dst.rank == plan.rank;
  };
  if (tokens_.combines || tokens_.row_bytes == 0 || !reads(step)) return false;
  if (buffers_[step.src.rank].local && tokens_.row_bytes < kMinStreamedRowBytes) return false;
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [&](const Step& s) { return reads(s) && s.src.rank != plan.rank; });
}

// One of the ranks of this process and node, which all have such a step, moves the rows for all of them: the source
// itself, if it is among them.
int32_t RowLists::MovePulled(const Step& step) const {
  const int32_t from = step.src.rank, reader = step.dst.rank, node = NodeOf(reader);
  std::vector<int32_t> ranks;
  for (int32_t rank = node * tokens_.ranks_per_node; rank < (node + 1) * tokens_.ranks_per_node; ++rank) {
    if (buffers_[rank].local) ranks.push_back(rank);
  }
  const bool is_among = NodeOf(from) == node && buffers_[from].local;
  if (reader != (is_among ? from : ranks[static_cast<size_t>(from) % ranks.size()])) return 0;
  if (!MoveRows(from, ranks)) return buffers_[from].input_pid;
  if (from == reader) ZeroRest(from);
  return 0;
}

void RowLists::MoveJoined(const Plan& plan, size_t first, size_t num_steps) const {
  const int32_t from = plan.steps[first].src.rank;
  std::vector<int32_t> ranks;
  for (size_t s = first; s < first + num_steps; ++s) ranks.push_back(plan.steps[s].dst.rank);
  MoveRows(from, ranks);
  if (std::find(ranks.begin(), ranks.end(), from) != ranks.end()) ZeroRest(from);
}

// Reads each row of `from` once, in order, and writes all its copies at `ranks`. False: its memory could not be read.
bool RowLists::MoveRows(int32_t from, const std::vector<int32_t>& ranks) const {
  const RankBuffers& source = buffers_[from];
  const auto for_each_copy = [&](const auto& visit) {
    for (const int32_t to : ranks) {
      for (int64_t i = 0; i < slices_.per_pair(); ++i) {
        const Slice slice = slices_.At(from, to, i);
        for (int64_t k = 0; k < slice.size; ++k) {
          const int32_t row = source.index[slice.input_offset + k];
          // A wrong routing of another process fails the call, but perhaps not before it has begun.
          if (row >= 0 && row < tokens_.num_rows) visit(row, OutputRow(to, slice.output_offset + k));
        }
      }
    }
  };
  std::vector<int64_t> begin(static_cast<size_t>(tokens_.num_rows) + 1);  // by row: its first copy
  for_each_copy([&](int32_t row, char*) { ++begin[row + 1]; });
  for (int64_t row = 0; row < tokens_.num_rows; ++row) begin[row + 1] += begin[row];
  std::vector<char*> copies(static_cast<size_t>(begin[tokens_.num_rows]));
  std::vector<int64_t> next(begin);
  for_each_copy([&](int32_t row, char* copy) { copies[next[row]++] = copy; });
  const int64_t bytes = tokens_.row_bytes;
  const bool streams = stream();
  const auto write = [&](int64_t first, int64_t row, const char* from_row) {
    for (int64_t i = first; i < begin[row + 1]; ++i) {
      if (streams) {
        StreamBytes(copies[i], from_row, bytes);
      } else {
        std::memcpy(copies[i], from_row, static_cast<size_t>(bytes));
      }
    }
  };
  if (source.input_pid == 0) {
    for (int64_t row = 0; row < tokens_.num_rows; ++row) write(begin[row], row, source.input + row * bytes);
  } else {
    // The first copies of some rows are read, and the others are copied from them while they are in the cache.
    std::vector<RemoteRead> reads;
    int64_t done = 0;
    for (int64_t row = 0; row < tokens_.num_rows; ++row) {
      if (begin[row] < begin[row + 1]) reads.push_back({copies[begin[row]], source.input + row * bytes, bytes});
      if (row + 1 < tokens_.num_rows && static_cast<int64_t>(reads.size()) * bytes < kReadBytes) continue;
      if (!ReadFromProcess(source.input_pid, reads.data(), static_cast<int>(reads.size()))) return false;
      reads.clear();
      for (; done <= row; ++done) {
        if (begin[done] < begin[done + 1]) write(begin[done] + 1, done, copies[begin[done]]);
      }
    }
  }
  if (streams) StreamFence();
  return true;
}

// Rows of the payload of `from` to the slots of `to`.
void RowLists::MoveDispatched(int32_t from, int32_t to) const {
  const int64_t bytes = tokens_.row_bytes;
  const RankBuffers& source = buffers_[from];
  if (buffers_[to].remote != nullptr) return SendDispatched(from, to);
  for (int64_t i = 0; i < slices_.per_pair(); ++i) {
    const Slice slice = slices_.At(from, to, i);
    for (int64_t k = 0; k < slice.size; ++k) {
      const int64_t row = source.index[slice.input_offset + k];
      CopyBytes(OutputRow(to, slice.output_offset + k), source.input + row * bytes, bytes, stream());
    }
  }
  if (from == to) ZeroRest(to);
}

// Does the same for a rank of another node: slices that are adjacent at the receiver are one message.
void RowLists::SendDispatched(int32_t from, int32_t to) const {
  const int64_t bytes = tokens_.row_bytes;
  const RankBuffers& source = buffers_[from];
  for (int64_t i = 0; i < slices_.per_pair();) {
    const int64_t first = slices_.At(from, to, i).output_offset;
    int64_t size = 0, next = i;
    for (; next < slices_.per_pair(); ++next) {
      const Slice slice = slices_.At(from, to, next);
      if (slice.size > 0 && size > 0 && slice.output_offset != first + size) break;
      if (slice.size > 0 && size == 0 && next > i) break;  // the first slices are empty
      size += slice.size;
    }
    if (size > 0) {
      Message message(*this, to, Space::kOutput, first * bytes, size * bytes);
      char* end = message.data();
      for (; i < next; ++i) {
        const Slice slice = slices_.At(from, to, i);
        for (int64_t k = 0; k < slice.size; ++k, end += bytes) {
          std::memcpy(end, source.input + source.index[slice.input_offset + k] * bytes, static_cast<size_t>(bytes));
        }
      }
      message.Send();
    }
    i = next;
  }
}

// Zeroes the slots of `rank` that no slice fills.
void RowLists::ZeroRest(int32_t rank) const {
  const int64_t bytes = tokens_.row_bytes;
  std::vector<std::pair<int64_t, int64_t>> filled;
  for (int32_t from = 0; from < static_cast<int32_t>(buffers_.size()); ++from) {
    for (int64_t i = 0; i < slices_.per_pair(); ++i) {
      const Slice slice = slices_.At(from, rank, i);
      if (slice.size > 0) filled.emplace_back(slice.output_offset, slice.output_offset + slice.size);
    }
  }
  std::sort(filled.begin(), filled.end());
  filled.emplace_back(tokens_.num_slots, 0);
  int64_t end = 0;
  for (const auto& [begin, next] : filled) {
    if (begin > end) ZeroBytes(OutputRow(rank, end), (begin - end) * bytes, tokens_.num_slots * bytes, stream());
    end = next;
  }
  if (stream()) StreamFence();
}

// dispatch: each row of the payload that the lists name, once, after the number of its row for each entry.
void RowLists::PutMessage(const Step& step) const {
  const int32_t from = step.src.rank, to = step.dst.rank, node = NodeOf(to);
  const int64_t entries = NumEntries(from, node), bytes = tokens_.row_bytes;
  if (entries == 0) return;
  std::vector<int32_t> numbers(static_cast<size_t>(entries)), rows;
  std::vector<int32_t> number_of(static_cast<size_t>(tokens_.num_rows), -1);
  ForEachEntry(from, node, [&](int64_t entry, int32_t, int64_t choice, int64_t) {
    const int32_t row = buffers_[from].index[choice];
    if (number_of[row] < 0) {
      number_of[row] = static_cast<int32_t>(rows.size());
      rows.push_back(row);
    }
    numbers[entry] = number_of[row];
  });
  const int64_t number_bytes = TokenLayout::NumberBytes(entries);
  const int64_t all_bytes = number_bytes + static_cast<int64_t>(rows.size()) * bytes;
  Message message(*this, to, Space::kScratch, tokens_.MessageAt(step.dst.offset), all_bytes);
  std::memcpy(message.data(), numbers.data(), numbers.size() * sizeof(int32_t));
  char* end = message.data() + number_bytes;
  for (const int32_t row : rows) {
    std::memcpy(end, buffers_[from].input + row * bytes, static_cast<size_t>(bytes));
    end += bytes;
  }
  message.Send();
}

// dispatch: the rows for one rank of the node, from the message of rank dst.offset.
void RowLists::ForwardMessage(const Step& step) const {
  const int32_t owner = static_cast<int32_t>(step.dst.offset), to = step.dst.rank;
  const int64_t entries = NumEntries(owner, NodeOf(to));
  const char* const message = buffers_[step.src.rank].scratch + tokens_.MessageAt(step.src.offset);
  const char* const rows = message + TokenLayout::NumberBytes(entries);
  ForEachEntry(owner, NodeOf(to), [&](int64_t entry, int32_t rank, int64_t, int64_t slot) {
    if (rank != to) return;
    int32_t number = 0;
    std::memcpy(&number, message + entry * int64_t{sizeof(number)}, sizeof(number));
    if (number < 0 || number >= tokens_.num_rows) return;
    CopyBytes(OutputRow(to, slot), rows + number * tokens_.row_bytes, tokens_.row_bytes, stream());
  });
}

// combine, direct: the rows of `owner` at `from`, to the places of their choices, packed by expert.
void RowLists::PutCombined(int32_t from, int32_t owner) const {
  const int64_t bytes = tokens_.row_bytes;
  int64_t size = 0, first = 0;
  for (int64_t i = 0; i < slices_.per_pair(); ++i) {
    const Slice slice = slices_.At(owner, from, i);
    if (size == 0) first = slice.input_offset;
    size += slice.size;
  }
  if (size == 0) return;
  Message message(*this, owner, Space::kScratch, first * bytes, size * bytes);
  char* rows = message.data();
  for (int64_t i = 0; i < slices_.per_pair(); ++i) {
    const Slice slice = slices_.At(owner, from, i);
    std::memcpy(rows, buffers_[from].input + slice.output_offset * bytes, static_cast<size_t>(slice.size * bytes));
    rows += slice.size * bytes;
  }
  message.Send();
}

// combine: the entries of each token in the order of its choices. Then their weights.
void RowLists::PutList(const Step& step) const {
  const int32_t owner = step.src.rank, to = step.dst.rank, node = NodeOf(to);
  const int64_t entries = NumEntries(owner, node), bytes = tokens_.ListBytes(entries);
  if (entries == 0) return;
  Message message(*this, to, Space::kScratch, tokens_.AreaAt(step.dst.offset), bytes);
  // By expert of the node: the first entry of its slice, less its first slot.
  const int64_t experts = tokens_.experts_per_rank;
  std::vector<int64_t> entry_of(static_cast<size_t>(tokens_.ranks_per_node * experts));
  int64_t before = 0;
  for (size_t e = 0; e < entry_of.size(); ++e) {
    const auto i = static_cast<int64_t>(e);
    const Slice slice =
        slices_.At(owner, node * tokens_.ranks_per_node + static_cast<int32_t>(i / experts), i % experts);
    entry_of[e] = before - slice.output_offset;
    before += slice.size;
  }
  auto* const list = reinterpret_cast<uint32_t*>(message.data());
  char* const weights = message.data() + TokenLayout::NumberBytes(entries);
  const RankBuffers& own = buffers_[owner];
  const int64_t first_expert = node * tokens_.ranks_per_node * experts;
  int64_t n = 0;
  for (int64_t t = 0; t < tokens_.num_rows; ++t) {
    bool is_first = true;
    for (int64_t c = t * tokens_.choices; c < (t + 1) * tokens_.choices; ++c) {
      const int64_t expert = own.expert[c] - first_expert;
      if (own.index[c] < 0 || expert < 0 || expert >= static_cast<int64_t>(entry_of.size()) || n == entries) continue;
      list[n] = EntryOf(entry_of[expert] + own.index[c], std::exchange(is_first, false));
      if (own.weights != nullptr) {
        std::memcpy(weights + n * tokens_.weight_bytes,
                    static_cast<const char*>(own.weights) + c * tokens_.weight_bytes,
                    static_cast<size_t>(tokens_.weight_bytes));
      }
      ++n;
    }
  }
  std::fill(list + n, list + entries, kEnd);
  message.Send();
}

void RowLists::MoveList(const Step& step) const {
  const int32_t rank = step.dst.rank, node = NodeOf(rank);
  const int32_t owner =
      tokens_.areas().NodeOf(step.dst.offset, node) * tokens_.ranks_per_node + rank % tokens_.ranks_per_node;
  char* const scratch = buffers_[rank].scratch;
  std::memcpy(scratch + tokens_.AreaAt(step.dst.offset), scratch + tokens_.AreaAt(step.src.offset),
              static_cast<size_t>(tokens_.ListBytes(NumEntries(owner, node))));
}

RowLists::List RowLists::ListAt(int32_t rank, int32_t owner) const {
  const int32_t node = NodeOf(rank);
  const int64_t most = NumEntries(owner, node);
  const char* const begin =
      buffers_[rank].scratch + tokens_.AreaAt(tokens_.areas().PlaceOf(RowAreas::kLists, node, NodeOf(owner)));
  List list = {reinterpret_cast<const uint32_t*>(begin), begin + TokenLayout::NumberBytes(most)};
  for (; list.entries < most; ++list.entries) {
    const uint32_t entry = list.numbers[list.entries];
    if (entry == kEnd || NumberOf(entry) >= most) break;
    if (list.tokens + IsFirst(entry) < 1 || list.tokens + IsFirst(entry) > tokens_.num_rows) break;
    list.tokens += IsFirst(entry);
  }
  return list;
}

// combine: the sums of the rows that each token of `owner` has in this node.
int32_t RowLists::SumNode(const Step& step, int32_t owner) const {
  const int32_t rank = step.dst.rank;
  std::vector<std::pair<int32_t, int64_t>> rows;  // rank and slot of each entry
  ForEachEntry(owner, NodeOf(rank), [&](int64_t, int32_t at, int64_t, int64_t slot) { rows.emplace_back(at, slot); });
  const List list = ListAt(rank, owner);
  char* y = buffers_[rank].scratch + tokens_.AreaAt(step.dst.offset);
  TokenSums sums(program_, 1, -1);
  for (int64_t i = 0; i < list.entries; ++i) {
    const auto& [at, slot] = rows[NumberOf(list.numbers[i])];
    sums.AddRow(buffers_[at].input + slot * tokens_.row_bytes, buffers_[at].input_pid,
                tokens_.weight_bytes > 0 ? list.weights + i * tokens_.weight_bytes : nullptr);
    if (i + 1 < list.entries && !IsFirst(list.numbers[i + 1])) continue;
    sums.EndNode();
    if (!sums.EndToken(y)) return sums.unreadable_pid();
    y += tokens_.row_bytes;
  }
  return sums.Flush() ? 0 : sums.unreadable_pid();
}

void RowLists::PutSums(const Step& step) const {
  const int32_t rank = step.src.rank, owner = step.dst.rank;
  const int64_t bytes = ListAt(rank, owner).tokens * tokens_.row_bytes;
  if (bytes == 0) return;
  Message message(*this, owner, Space::kScratch, tokens_.AreaAt(step.dst.offset), bytes);
  std::memcpy(message.data(), buffers_[rank].scratch + tokens_.AreaAt(step.src.offset), static_cast<size_t>(bytes));
  message.Send();
}

// combine: the sum of the rows of each token, in the order of its choices, node by node if sums of nodes are rounded.
int32_t RowLists::AddTokens(const Plan& plan, const Step& step) const {
  const int32_t owner = step.dst.rank, own_node = NodeOf(owner);
  const RankBuffers& own = buffers_[owner];
  const int64_t bytes = tokens_.row_bytes, per_row = tokens_.per_choice ? 1 : tokens_.choices;
  std::vector<char> readable(buffers_.size());
  if (step.kind != StepKind::kReduce) readable[step.src.rank] = step.src.space == Space::kInput;
  for (int32_t i = 0; i < step.num_sources; ++i) {
    const Place& source = plan.sources[step.first_source + i];
    if (source.space == Space::kInput) readable[source.rank] = 1;
  }
  const bool by_node = tokens_.rounds_nodes || tokens_.hierarchical;
  const int32_t num_nodes = by_node ? tokens_.num_nodes : 1;
  TokenSums sums(program_, num_nodes, tokens_.hierarchical ? own_node : -1);
  std::vector<const char*> next(static_cast<size_t>(num_nodes));  // sums of other nodes
  for (int32_t node = 0; node < num_nodes && tokens_.hierarchical; ++node) {
    if (node == own_node) continue;
    next[node] = own.scratch + tokens_.AreaAt(tokens_.areas().PlaceOf(RowAreas::kReceivedSums, own_node, node));
  }
  for (int64_t t = 0; t < tokens_.num_rows; ++t) {
    for (int32_t node = 0; node < num_nodes; ++node) {
      for (int64_t c = t * per_row; c < (t + 1) * per_row; ++c) {
        const int32_t slot = own.index[c];
        if (slot < 0) continue;
        const auto from = static_cast<int32_t>(own.expert[c] / tokens_.experts_per_rank);
        if (by_node && NodeOf(from) != node) continue;
        if (tokens_.hierarchical && node != own_node) {
          sums.AddRow(next[node], 0, nullptr);
          next[node] += bytes;
          break;
        }
        const char* row = buffers_[from].input + slot * bytes;
        if (!readable[from]) {
          const Slice slice = slices_.At(owner, from, own.expert[c] % tokens_.experts_per_rank);
          row = own.scratch + (slice.input_offset + slot - slice.output_offset) * bytes;
        }
        const char* const weights = static_cast<const char*>(own.weights);
        sums.AddRow(row, readable[from] ? buffers_[from].input_pid : 0,
                    weights != nullptr ? weights + c * tokens_.weight_bytes : nullptr);
      }
      sums.EndNode();
    }
    if (!sums.EndToken(own.output + t * bytes)) return sums.unreadable_pid();
  }
  return sums.Flush() ? 0 : sums.unreadable_pid();
}

}  // namespace jaxcomm
