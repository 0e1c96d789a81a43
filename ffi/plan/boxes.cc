#include "plan/boxes.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "plan/partition.h"

namespace jaxcomm {
namespace {

using Cuts = std::vector<std::vector<int64_t>>;  // by dimension: sorted boundaries

// The cells of a box as numbers per dimension: those between cuts first[d] and last[d].
struct CellRange {
  std::vector<size_t> first;
  std::vector<size_t> last;
};

Status CheckBoxes(const std::vector<Box>& boxes, size_t num_dimensions, const std::vector<int64_t>& shape,
                  const char* what) {
  for (size_t rank = 0; rank < boxes.size(); ++rank) {
    const Box& box = boxes[rank];
    const std::string name = std::string("the ") + what + " of rank " + std::to_string(rank);
    if (box.begin.size() != num_dimensions || box.end.size() != num_dimensions) {
      return InvalidArgumentError(name + " must have " + std::to_string(num_dimensions) + " dimensions");
    }
    if (!shape.empty() && shape.size() != num_dimensions) {
      return InvalidArgumentError("the array of " + name + " must have " + std::to_string(num_dimensions) +
                                  " dimensions");
    }
    for (size_t d = 0; d < num_dimensions; ++d) {
      const bool fits = shape.empty() || box.end[d] - box.begin[d] <= shape[d];
      if (0 <= box.begin[d] && box.begin[d] <= box.end[d] && fits) continue;
      return InvalidArgumentError(name + " is [" + std::to_string(box.begin[d]) + ", " + std::to_string(box.end[d]) +
                                  ") in dimension " + std::to_string(d));
    }
  }
  return OkStatus();
}

Cuts CutsOf(const std::vector<Box>& sources, const std::vector<Box>& destinations) {
  Cuts cuts(sources[0].begin.size());
  for (const std::vector<Box>* boxes : {&sources, &destinations}) {
    for (const Box& box : *boxes) {
      if (box.count() == 0) continue;
      for (size_t d = 0; d < cuts.size(); ++d) {
        cuts[d].push_back(box.begin[d]);
        cuts[d].push_back(box.end[d]);
      }
    }
  }
  for (std::vector<int64_t>& of_dimension : cuts) {
    std::sort(of_dimension.begin(), of_dimension.end());
    of_dimension.erase(std::unique(of_dimension.begin(), of_dimension.end()), of_dimension.end());
  }
  return cuts;
}

CellRange RangeOf(const Box& box, const Cuts& cuts) {
  CellRange range;
  for (size_t d = 0; d < cuts.size(); ++d) {
    const auto at = [&](int64_t x) {
      return static_cast<size_t>(std::lower_bound(cuts[d].begin(), cuts[d].end(), x) - cuts[d].begin());
    };
    range.first.push_back(at(box.begin[d]));
    range.last.push_back(at(box.end[d]));
  }
  return range;
}

// Calls visit(number of the cell in the global array, cell) for the cells of a box in row-major order. `shape`: of the
// array that holds the box, or empty.
template <typename Visit>
void ForEachCell(const Box& box, const std::vector<int64_t>& shape, const Cuts& cuts, const Visit& visit) {
  if (box.count() == 0) return;
  const size_t num_dimensions = cuts.size();
  const CellRange range = RangeOf(box, cuts);
  std::vector<size_t> at = range.first;
  int64_t offset = 0;
  for (bool more = true; more;) {
    Cell cell;
    cell.offset = offset;
    cell.count = cell.run = 1;
    int64_t stride = 1;
    std::vector<Cell::Rows> rows;  // innermost first
    int64_t number = 0, cells_inside = 1;
    for (size_t i = 0; i < num_dimensions; ++i) {
      const size_t d = num_dimensions - 1 - i;
      const int64_t size = cuts[d][at[d] + 1] - cuts[d][at[d]];
      number += static_cast<int64_t>(at[d]) * cells_inside;
      cells_inside *= static_cast<int64_t>(cuts[d].size());
      cell.count *= size;
      cell.memory += (cuts[d][at[d]] - box.begin[d]) * stride;
      // The run grows as long as it fills the dimensions inside.
      if (rows.empty() && cell.run == stride) {
        cell.run *= size;
      } else if (size > 1) {
        if (!rows.empty() && rows.back().stride * rows.back().size == stride) {
          rows.back().size *= size;
        } else {
          rows.push_back({size, stride});
        }
      }
      stride *= shape.empty() ? box.end[d] - box.begin[d] : shape[d];
    }
    if (rows.empty()) rows.push_back({1, cell.run});
    cell.rows.assign(rows.rbegin(), rows.rend());
    offset += cell.count;
    visit(number, std::move(cell));
    more = false;
    for (size_t d = num_dimensions; d-- > 0 && !more;) {
      more = ++at[d] < range.last[d];
      if (!more) at[d] = range.first[d];
    }
  }
}

// A cell of an output that another rank must send.
struct Wanted {
  int64_t cell;  // its number
  const std::vector<Place>* owners;
  Place place;
  int64_t count;
};

// Numbers the matchings of the pairs: as many as the busiest rank has pairs (König, Math. Ann. 77, 1916). Senders that
// follow their order do not wait for each other at a receiver.
void SetMatchings(size_t num_ranks, std::vector<BoxPair>* pairs) {
  // Small tables that stay in the cache: among 512 ranks that all exchange, 30 million pairs change places.
  struct Ends {
    size_t sender, receiver;  // rows of the table: senders come first
  };
  constexpr int32_t kNone = -1;
  std::vector<Ends> ends;
  for (const BoxPair& pair : *pairs) {
    ends.push_back({static_cast<size_t>(pair.from), num_ranks + static_cast<size_t>(pair.to)});
  }
  std::vector<std::vector<int32_t>> table(2 * num_ranks);  // by rank and matching: its pair
  const auto at = [&](size_t end, size_t matching) -> int32_t& {
    if (table[end].size() <= matching) table[end].resize(matching + 1, kNone);
    return table[end][matching];
  };
  const auto first_free = [&](const std::vector<int32_t>& row) {
    return static_cast<size_t>(std::find(row.begin(), row.end(), kNone) - row.begin());
  };
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto [sender, receiver] = ends[i];
    const size_t wanted = first_free(table[sender]), other = first_free(table[receiver]);
    // Pairs from the receiver on that are in `wanted` and `other` in turn change places. They do not reach the sender,
    // which has no pair in `wanted`.
    size_t leaves = wanted, enters = other;
    int32_t pair = 0;
    for (size_t end = receiver; pair != kNone; std::swap(leaves, enters)) {
      at(end, std::max(leaves, enters));  // the row grows here only: references stay valid
      pair = at(end, leaves);
      std::swap(at(end, leaves), at(end, enters));
      if (pair != kNone) end = ends[static_cast<size_t>(pair)].sender + ends[static_cast<size_t>(pair)].receiver - end;
    }
    at(sender, wanted) = at(receiver, wanted) = static_cast<int32_t>(i);
  }
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    for (size_t matching = 0; matching < table[rank].size(); ++matching) {
      const int32_t pair = table[rank][matching];
      if (pair != kNone) (*pairs)[static_cast<size_t>(pair)].matching = static_cast<int64_t>(matching);
    }
  }
}

// Chooses from where each wanted cell comes.
class Chooser {
 public:
  // pipelined: a node can send a cell on while it receives it.
  explicit Chooser(const Geometry& geometry, bool pipelined)
      : geometry_(geometry),
        pipelined_(pipelined),
        sent_(static_cast<size_t>(geometry.num_ranks())),
        received_(sent_.size()),
        busy_(static_cast<size_t>(geometry.num_nodes)) {}

  // Each cell comes from an owner.
  BoxMoves Direct(const std::vector<Wanted>& wanted, const std::vector<BoxMove>& kept) && {
    for (const Wanted& cell : wanted) Fetch(cell, Nearest(cell));
    return std::move(*this).Moves(kept);
  }

  // Each node gets a cell once over the network: from an owner, or from a node that has got it.
  BoxMoves Relayed(const std::vector<Wanted>& wanted, const std::vector<BoxMove>& kept) && {
    using Group = std::vector<const Wanted*>;  // of a cell and a node
    std::map<std::pair<int64_t, int32_t>, Group> groups;
    std::vector<const Group*> order;
    std::vector<int64_t> lacks(busy_.size());
    for (const Wanted& cell : wanted) {
      const auto near = [&](const Place& owner) { return CanRead(geometry_, cell.place.rank, owner.rank); };
      if (std::any_of(cell.owners->begin(), cell.owners->end(), near)) {
        Fetch(cell, Nearest(cell));
        continue;
      }
      const int32_t node = geometry_.node(cell.place.rank);
      Group& group = groups[{cell.cell, node}];
      if (group.empty()) order.push_back(&group), lacks[static_cast<size_t>(node)] += cell.count;
      group.push_back(&cell);
    }
    const int64_t bound = *std::max_element(lacks.begin(), lacks.end());  // no port takes less time
    std::map<int64_t, std::vector<Holder>> holders;                       // by cell: those that have got it
    const auto fetch = [&](const Group& group) {
      const Wanted& first = **std::min_element(group.begin(), group.end(), [&](const Wanted* a, const Wanted* b) {
        return received_[Index(a->place.rank)] < received_[Index(b->place.rank)];
      });
      holders[first.cell].push_back(FetchFromAfar(first, holders[first.cell], bound));
      for (const Wanted* other : group) {
        if (other == &first) continue;
        const Place& to = other->place;
        moves_.push_back({first.place.rank, to.rank, first.place.offset, to.offset, other->count, true});
      }
    };
    // The first copy of each cell before all others: only owners can send it.
    for (const Group*& group : order) {
      if (holders.count(group->front()->cell) == 0) fetch(*std::exchange(group, nullptr));
    }
    for (const Group* group : order) {
      if (group != nullptr) fetch(*group);
    }
    return std::move(*this).Moves(kept);
  }

 private:
  struct Hop {
    BoxMove move;
    int64_t depth = 0;
    bool forwarded = false;
  };
  using Branch = std::vector<Hop>;  // from an owner on, over the network
  // Who can send a cell: an owner, or the receiver of a hop.
  struct Holder {
    Place place;
    size_t branch = 0, hop = 0;
    int64_t depth = 0;  // hops to here
    int64_t ready = 0;  // when it can send the cell, in elements that a port sends
  };

  static size_t Index(int32_t i) { return static_cast<size_t>(i); }
  // When the port of the rank's node has sent what it has been given.
  int64_t& Busy(int32_t rank) { return busy_[Index(geometry_.node(rank))]; }
  int32_t Distance(const Place& from, const Wanted& cell) const {
    return (from.rank - cell.place.rank + geometry_.num_ranks()) % geometry_.num_ranks();
  }

  Holder Nearest(const Wanted& cell) const {
    const auto key = [&](const Place& owner) {
      const bool same_node = geometry_.node(owner.rank) == geometry_.node(cell.place.rank);
      return std::make_tuple(!same_node, sent_[Index(owner.rank)], Distance(owner, cell));
    };
    return {*std::min_element(cell.owners->begin(), cell.owners->end(),
                              [&](const Place& a, const Place& b) { return key(a) < key(b); })};
  }

  Holder FetchFromAfar(const Wanted& cell, const std::vector<Holder>& holders, int64_t bound) {
    const auto less = [&](const Holder& a, const Holder& b) {
      const auto key = [&](const Holder& from) {
        const int32_t rank = from.place.rank;
        const int64_t begin = std::max(Busy(rank), from.ready);
        return std::make_tuple(begin, from.depth, sent_[Index(rank)], Distance(from.place, cell));
      };
      return key(a) < key(b);
    };
    std::vector<Holder> owners;
    for (const Place& owner : *cell.owners) owners.push_back({owner});
    const Holder& owner = *std::min_element(owners.begin(), owners.end(), less);
    const bool in_time = pipelined_ && Busy(owner.place.rank) + cell.count <= bound;
    if (holders.empty() || in_time) return Fetch(cell, owner);
    const Holder& other = *std::min_element(holders.begin(), holders.end(), less);
    return Fetch(cell, less(other, owner) ? other : owner);
  }

  Holder Fetch(const Wanted& cell, const Holder& from) {
    const Place &source = from.place, &to = cell.place;
    const bool relayed = from.depth > 0;
    const BoxMove move = {source.rank, to.rank, source.offset, to.offset, cell.count, relayed};
    sent_[Index(source.rank)] += cell.count;
    received_[Index(to.rank)] += cell.count;
    if (CanRead(geometry_, to.rank, source.rank)) {
      moves_.push_back(move);
      return {to};
    }
    const int64_t end = std::max(Busy(source.rank), from.ready) + cell.count;
    Busy(source.rank) = end;
    if (relayed) branches_[from.branch][from.hop].forwarded = true;
    const size_t number = relayed ? from.branch : branches_.size();
    Branch& branch = relayed ? branches_[number] : branches_.emplace_back();
    branch.push_back({move, from.depth});
    return {to, number, branch.size() - 1, from.depth + 1, pipelined_ ? 0 : end};
  }

  // Cells whose branches are alike form the pairs of these branches.
  BoxMoves Moves(const std::vector<BoxMove>& kept) && {
    BoxMoves chosen = {kept, {}};
    chosen.moves.insert(chosen.moves.end(), moves_.begin(), moves_.end());
    std::map<std::vector<std::pair<int32_t, int32_t>>, size_t> paths;  // sender and receiver
    std::map<std::tuple<int32_t, int32_t, size_t>, std::pair<BoxPair, std::vector<BoxMove>>>
        pairs;  // receiver, sender, path
    for (const Branch& branch : branches_) {
      std::vector<std::pair<int32_t, int32_t>> path;
      for (const Hop& hop : branch) path.emplace_back(hop.move.from, hop.move.to);
      const size_t number = paths.emplace(std::move(path), paths.size()).first->second;
      for (const auto& [move, depth, forwarded] : branch) {
        auto& [pair, moves] = pairs[{move.to, move.from, number}];
        pair = {move.from, move.to, depth, forwarded, pair.count + move.count};
        moves.push_back(move);
      }
    }
    std::vector<int64_t> sent(busy_.size()), received(busy_.size());
    for (auto& [key, found] : pairs) {
      const BoxPair& pair = found.first;
      int64_t& of_sender = sent[Index(geometry_.node(pair.from))] += pair.count;
      int64_t& of_receiver = received[Index(geometry_.node(pair.to))] += pair.count;
      chosen.busiest = std::max({chosen.busiest, of_sender, of_receiver});
      chosen.depth = std::max(chosen.depth, pair.depth);
      for (BoxMove& move : found.second) {
        move.pair = static_cast<int64_t>(chosen.pairs.size());
        chosen.moves.push_back(move);
      }
      chosen.pairs.push_back(pair);
    }
    return chosen;
  }

  const Geometry& geometry_;
  const bool pipelined_;
  std::vector<int64_t> sent_, received_;  // elements, by rank
  std::vector<int64_t> busy_;             // by node
  std::vector<BoxMove> moves_;            // in nodes
  std::vector<Branch> branches_;
};

int64_t CountOf(const Cells& cells) { return cells.empty() ? 0 : cells.back().offset + cells.back().count; }

// The last cell of a box has its last element.
int64_t SpanOf(const Cells& cells) {
  if (cells.empty()) return 0;
  int64_t span = cells.back().memory + cells.back().run;
  for (const Cell::Rows& rows : cells.back().rows) span += (rows.size - 1) * rows.stride;
  return span;
}

}  // namespace

int64_t Box::count() const {
  int64_t count = 1;
  for (size_t d = 0; d < begin.size(); ++d) count *= end[d] - begin[d];
  return count;
}

int64_t Boxes::input_count(int32_t rank) const { return CountOf(inputs[static_cast<size_t>(rank)]); }
int64_t Boxes::output_count(int32_t rank) const { return CountOf(outputs[static_cast<size_t>(rank)]); }
int64_t Boxes::input_span(int32_t rank) const { return SpanOf(inputs[static_cast<size_t>(rank)]); }
int64_t Boxes::output_span(int32_t rank) const { return SpanOf(outputs[static_cast<size_t>(rank)]); }

StatusOr<std::shared_ptr<const Boxes>> MakeBoxes(const std::vector<Box>& sources, const std::vector<Box>& destinations,
                                                 const Geometry& geometry, const std::vector<int64_t>& input_shape,
                                                 const std::vector<int64_t>& output_shape) {
  const auto n = static_cast<size_t>(geometry.num_ranks());
  if (sources.size() != n || destinations.size() != n || sources[0].begin.empty()) {
    return InvalidArgumentError("there must be a source and a destination for each of " + std::to_string(n) + " ranks");
  }
  JAXCOMM_RETURN_IF_ERROR(CheckBoxes(sources, sources[0].begin.size(), input_shape, "source"));
  JAXCOMM_RETURN_IF_ERROR(CheckBoxes(destinations, sources[0].begin.size(), output_shape, "destination"));
  const Cuts cuts = CutsOf(sources, destinations);
  auto boxes = std::make_shared<Boxes>();
  boxes->inputs.resize(n);
  boxes->outputs.resize(n);
  boxes->promises.resize(n);
  std::vector<std::pair<int64_t, Place>> held;  // number of the cell, one of its owners
  const auto note_run = [&](const Cell& cell) {
    const int64_t shortest = boxes->shortest_run;
    boxes->shortest_run = shortest == 0 ? cell.run : std::min(shortest, cell.run);
  };
  for (size_t rank = 0; rank < n; ++rank) {
    ForEachCell(sources[rank], input_shape, cuts, [&](int64_t number, Cell cell) {
      held.emplace_back(number, Place{static_cast<int32_t>(rank), Space::kInput, cell.offset});
      note_run(cell);
      boxes->inputs[rank].push_back(std::move(cell));
    });
  }
  std::stable_sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string missing;
  std::vector<std::vector<int64_t>> numbers(n);  // of the cells of the promises
  for (size_t rank = 0; rank < n; ++rank) {
    ForEachCell(destinations[rank], output_shape, cuts, [&](int64_t number, Cell cell) {
      auto owner = std::lower_bound(held.begin(), held.end(), number,
                                    [](const auto& a, int64_t wanted) { return a.first < wanted; });
      Promise promise = {cell.offset, cell.offset + cell.count, PromiseKind::kCopy, {}};
      for (; owner != held.end() && owner->first == number; ++owner) promise.sources.push_back(owner->second);
      if (promise.sources.empty() && missing.empty()) {
        missing = "no source has elements [" + std::to_string(cell.offset) + ", " +
                  std::to_string(cell.offset + cell.count) + ") of the destination of rank " + std::to_string(rank);
      }
      note_run(cell);
      boxes->contiguous_outputs = boxes->contiguous_outputs && cell.run == cell.count;
      boxes->promises[rank].push_back(std::move(promise));
      numbers[rank].push_back(number);
      boxes->outputs[rank].push_back(std::move(cell));
    });
  }
  if (!missing.empty()) return InvalidArgumentError(missing);

  std::vector<Wanted> wanted;
  std::vector<BoxMove> kept;
  for (size_t rank = 0; rank < n; ++rank) {
    for (size_t i = 0; i < boxes->promises[rank].size(); ++i) {
      const Promise& promise = boxes->promises[rank][i];
      const Place place = {static_cast<int32_t>(rank), Space::kOutput, promise.begin};
      const int64_t count = promise.end - promise.begin;
      const auto own = std::find_if(promise.sources.begin(), promise.sources.end(),
                                    [&](const Place& owner) { return owner.rank == place.rank; });
      if (own == promise.sources.end()) {
        wanted.push_back({numbers[rank][i], &promise.sources, place, count});
      } else {
        kept.push_back({place.rank, place.rank, own->offset, place.offset, count, false});
      }
    }
  }
  std::stable_sort(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) {
    if (a.owners->size() != b.owners->size()) return a.owners->size() < b.owners->size();
    return a.count > b.count;
  });
  boxes->direct = Chooser(geometry, true).Direct(wanted, kept);
  SetMatchings(n, &boxes->direct.pairs);
  boxes->chains = Chooser(geometry, true).Relayed(wanted, kept);
  if (boxes->chains.depth > 0) {
    boxes->trees = Chooser(geometry, false).Relayed(wanted, kept);
    SetMatchings(n, &boxes->trees.pairs);
  }
  // The matchings of many pairs take most of the time. Without replicas, all pairs are those of `direct`.
  std::vector<BoxPair>&from = boxes->direct.pairs, &to = boxes->chains.pairs;
  const auto same = [](const BoxPair& a, const BoxPair& b) { return a.from == b.from && a.to == b.to; };
  if (std::equal(from.begin(), from.end(), to.begin(), to.end(), same)) {
    for (size_t i = 0; i < to.size(); ++i) to[i].matching = from[i].matching;
  } else {
    SetMatchings(n, &to);
  }
  return std::shared_ptr<const Boxes>(std::move(boxes));
}

std::vector<Box> DecodeBoxes(const std::vector<int64_t>& numbers, int64_t num_ranks) {
  std::vector<Box> boxes;
  if (num_ranks <= 0 || numbers.size() % static_cast<size_t>(2 * num_ranks) != 0) return boxes;
  const size_t per_rank = numbers.size() / static_cast<size_t>(num_ranks);
  for (size_t at = 0; at < numbers.size(); at += per_rank) {
    Box& box = boxes.emplace_back();
    for (size_t i = 0; i < per_rank; i += 2) {
      box.begin.push_back(numbers[at + i]);
      box.end.push_back(numbers[at + i + 1]);
    }
  }
  return boxes;
}

}  // namespace jaxcomm
