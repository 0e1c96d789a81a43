// Plans of reshard: each cell of each destination comes from the rank that MakeBoxes has chosen.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/boxes.h"
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// A sender has at most this many messages to one receiver on their way.
constexpr int64_t kCredits = 4;

// Consecutive elements of a source and of the output of its receiver.
struct Piece {
  int64_t from_offset = 0;
  int64_t to_offset = 0;
  int64_t count = 0;
};

// A rank of the receiver's node reads a part of a message from the receiver's output.
struct Relay {
  int32_t reader = 0;
  std::vector<Piece> pieces;
};

struct Message {
  int64_t pair = 0;
  int32_t from = 0;
  int32_t to = 0;
  int64_t number = 0;  // among those of the pair
  int64_t round = 0;   // in which it is received
  int64_t depth = 0;   // of the pair
  int64_t matching = 0;
  std::vector<Piece> pieces;
  int64_t slot = -1;  // where it lands in the receiver's scratch; -1: in the output, as one piece
  std::vector<Relay> relays;
  bool forwarded = false;  // the receiver sends it on
  bool grants = false;     // the receiver signals that the sender may send another one
  int64_t signal = 0;      // that says that the message has come, to its receiver or this reader: see NumberSignals()

  const Relay* RelayTo(int32_t reader) const {
    const auto relay =
        std::find_if(relays.begin(), relays.end(), [&](const Relay& other) { return other.reader == reader; });
    return relay == relays.end() ? nullptr : &*relay;
  }
  bool Signals() const { return slot >= 0 || forwarded || grants || !relays.empty(); }
  // A forwarded message is sent in the round in which it has come, others kCredits rounds before they are received.
  int64_t sent() const { return round - (depth > 0 ? 1 : kCredits); }
  int64_t count() const {
    int64_t count = 0;
    for (const Piece& piece : pieces) count += piece.count;
    return count;
  }
};

// The messages of one rank over the network: those that it sends, receives, or reads parts of. All cells for a receiver
// form one sequence, which is cut into messages. The messages of a pair spread evenly over the rounds, so each round
// has the same part of all transfers, and the busiest link is busy from the first round to the last. This is the
// schedule of Gonzalez and Sahni (J. ACM 23(4), 1976) for an open shop with preemption: in a round, messages follow
// matchings. Rounds have no barrier: a sender waits only for the receiver of its fourth last message.
//
// A rank forwards the messages of a round while it receives those of the next one: k messages through a chain of R
// ranks take k + R - 1 rounds.
class Network {
 public:
  Network(const Request& request, const BoxMoves& moves, int32_t rank)
      : boxes_(*request.boxes), geometry_(request.geometry), chunk_count_(request.chunk_count), rank_(rank) {
    int64_t depth = 0;
    for (const BoxPair& pair : moves.pairs) {
      own_rounds_ = std::max(own_rounds_, NumChunks(pair.count, chunk_count_));
      depth = std::max(depth, pair.depth);
    }
    rounds_ = own_rounds_ + depth;
    std::map<int64_t, std::vector<Piece>> cells;     // by pair
    std::map<int32_t, std::vector<BoxMove>> relays;  // by receiver, then by its output
    std::set<int32_t> relaying;                      // receivers from which this rank reads
    for (const BoxMove& move : moves.moves) {
      if (!move.relayed || move.pair >= 0) continue;
      relays[move.from].push_back(move);
      if (move.to == rank) relaying.insert(move.from);
    }
    for (auto& [to, of_receiver] : relays) {
      std::stable_sort(of_receiver.begin(), of_receiver.end(),
                       [](const BoxMove& a, const BoxMove& b) { return a.from_offset < b.from_offset; });
    }
    for (const BoxMove& move : moves.moves) {
      if (move.pair < 0) continue;
      if (move.from == rank || move.to == rank || relaying.count(move.to) > 0) {
        cells[move.pair].push_back({move.from_offset, move.to_offset, move.count});
      }
    }
    int64_t slots = 0;
    int32_t receiver = -1;
    for (size_t i = 0; i < moves.pairs.size(); ++i) {
      const BoxPair& pair = moves.pairs[i];
      if (std::exchange(receiver, pair.to) != pair.to) slots = 0;
      const int64_t num_messages = NumChunks(pair.count, chunk_count_);
      const auto found = cells.find(static_cast<int64_t>(i));
      if (found != cells.end()) AddMessages(pair, found->first, std::move(found->second), slots, relays[pair.to]);
      slots += std::min(kCredits, num_messages) * MaxChunk(pair.count, num_messages);
      if (pair.to == rank) receive_slots_ = slots;
    }
    std::sort(messages_.begin(), messages_.end(), [&](const Message& a, const Message& b) { return Key(a) < Key(b); });
    NumberSignals();
  }

  // All steps of the rank. `read` adds those that need no message.
  template <typename Read>
  void AddSteps(const Read& read, Builder& plan) {
    for (int64_t round = 0; round < std::min(kCredits, rounds_); ++round) Send(round, false, plan);
    read();
    for (int64_t round = 0; round < rounds_; ++round) {
      Receive(round, plan);
      Send(round + 1, true, plan);
      Send(round + kCredits, false, plan);
    }
  }

  int64_t scratch_count() const { return receive_slots_ + packed_count_; }

 private:
  // A matching after the other, so that no rank receives from all others at first.
  static std::tuple<int64_t, int64_t, int32_t> Key(const Message& message) {
    return {message.round, message.matching, message.to};
  }

  // The cells of a pair are in the order of the array, so all pairs along a chain have the same messages.
  void AddMessages(const BoxPair& pair, int64_t index, std::vector<Piece> cells, int64_t first_slot,
                   const std::vector<BoxMove>& relays) {
    std::sort(cells.begin(), cells.end(), [](const Piece& a, const Piece& b) { return a.to_offset < b.to_offset; });
    const int64_t num_messages = NumChunks(pair.count, chunk_count_);
    const int64_t slot_count = MaxChunk(pair.count, num_messages);
    size_t at = 0;
    int64_t skipped = 0;  // elements of cells[at] that earlier messages have
    for (int64_t number = 0; number < num_messages; ++number) {
      Message message;
      message.pair = index;
      message.from = pair.from;
      message.to = pair.to;
      message.number = number;
      message.round = number * own_rounds_ / num_messages + pair.depth;
      message.depth = pair.depth;
      message.matching = pair.matching;
      message.forwarded = pair.forwarded;
      message.grants = number + kCredits < num_messages;
      for (int64_t left = Subrange({0, pair.count}, num_messages, number).count; left > 0;) {
        const Piece& cell = cells[at];
        const int64_t count = std::min(left, cell.count - skipped);
        const Piece piece = {cell.from_offset + skipped, cell.to_offset + skipped, count};
        Piece* last = message.pieces.empty() ? nullptr : &message.pieces.back();
        if (last != nullptr && last->from_offset + last->count == piece.from_offset &&
            last->to_offset + last->count == piece.to_offset) {
          last->count += count;
        } else {
          message.pieces.push_back(piece);
        }
        left -= count;
        skipped += count;
        if (skipped == cell.count) skipped = 0, ++at;
      }
      if (!boxes_.contiguous_outputs || message.pieces.size() > 1) {
        message.slot = first_slot + number % kCredits * slot_count;
      }
      if (pair.from == rank_ && message.pieces.size() > 1) packed_count_ = std::max(packed_count_, message.count());
      for (const Piece& piece : message.pieces) AddRelays(piece, relays, &message);
      messages_.push_back(std::move(message));
    }
  }

  // Cells of an output are disjoint, so those of `relays` are sorted by their ends too.
  static void AddRelays(const Piece& piece, const std::vector<BoxMove>& relays, Message* message) {
    auto move = std::partition_point(relays.begin(), relays.end(), [&](const BoxMove& other) {
      return other.from_offset + other.count <= piece.to_offset;
    });
    for (; move != relays.end() && move->from_offset < piece.to_offset + piece.count; ++move) {
      const int64_t begin = std::max(piece.to_offset, move->from_offset);
      const int64_t end = std::min(piece.to_offset + piece.count, move->from_offset + move->count);
      auto relay = std::find_if(message->relays.begin(), message->relays.end(),
                                [&](const Relay& other) { return other.reader == move->to; });
      if (relay == message->relays.end()) relay = message->relays.insert(relay, {move->to, {}});
      relay->pieces.push_back({begin, move->to_offset + begin - move->from_offset, end - begin});
    }
  }

  // Signals from one rank to another only count. So a wait needs the number of its signal among all from that rank to
  // this one. A rank signals in the order of AddSteps.
  void NumberSignals() {
    struct Signal {
      int32_t from;
      int64_t round;  // the iteration of AddSteps
      int stage;      // in the iteration
      int64_t* number;
    };
    std::vector<Signal> signals;
    for (Message& message : messages_) {
      if (message.to == rank_ && message.Signals()) {
        signals.push_back({message.from, message.sent(), message.depth > 0 ? 1 : 2, &message.signal});
      } else if (message.from == rank_ && message.grants) {
        std::vector<int64_t>& grants = grants_[message.pair];
        grants.resize(static_cast<size_t>(message.number) + 1);
      } else if (message.RelayTo(rank_) != nullptr) {
        signals.push_back({message.to, message.round, 0, &message.signal});
      }
    }
    for (const Message& message : messages_) {
      if (message.from != rank_ || !message.grants) continue;
      signals.push_back({message.to, message.round, 0, &grants_[message.pair][static_cast<size_t>(message.number)]});
    }
    std::stable_sort(signals.begin(), signals.end(), [](const Signal& a, const Signal& b) {
      return std::tie(a.from, a.round, a.stage) < std::tie(b.from, b.round, b.stage);
    });
    std::map<int32_t, int64_t> count;
    for (const Signal& signal : signals) *signal.number = ++count[signal.from];
  }

  template <typename Visit>
  void ForEach(int64_t round, const Visit& visit) const {
    auto message = std::partition_point(messages_.begin(), messages_.end(),
                                        [&](const Message& other) { return other.round < round; });
    for (; message != messages_.end() && message->round == round; ++message) visit(*message);
  }

  void WaitFor(int32_t peer, int64_t signal, Builder& plan) {
    for (int64_t& waits = waits_[peer]; waits < signal; ++waits) plan.Wait(peer);
  }

  void Send(int64_t round, bool relayed, Builder& plan) {
    const auto source = [&](const Piece& piece) {
      return relayed ? plan.Output(piece.from_offset) : plan.Input(piece.from_offset);
    };
    ForEach(round, [&](const Message& message) {
      if (message.from != rank_ || (message.depth > 0) != relayed) return;
      const int32_t to = message.to;
      if (message.number >= kCredits) {
        WaitFor(to, grants_[message.pair][static_cast<size_t>(message.number - kCredits)], plan);
      }
      const Piece& first = message.pieces[0];
      Place data = source(first);
      if (message.pieces.size() > 1) {
        data = plan.Scratch(receive_slots_);
        int64_t packed = data.offset;
        for (const Piece& piece : message.pieces) {
          plan.Move(source(piece), plan.Scratch(packed), piece.count);
          packed += piece.count;
        }
      }
      plan.Move(data,
                message.slot < 0 ? Builder::At(to, Space::kOutput, first.to_offset)
                                 : Builder::At(to, Space::kScratch, message.slot),
                message.count());
      if (message.Signals()) plan.Signal(to);
    });
  }

  void Receive(int64_t round, Builder& plan) {
    ForEach(round, [&](const Message& message) {
      if (message.to != rank_ || !message.Signals()) return;
      WaitFor(message.from, message.signal, plan);
      int64_t packed = message.slot;
      for (const Piece& piece : message.pieces) {
        if (message.slot < 0) break;
        plan.Move(plan.Scratch(packed), plan.Output(piece.to_offset), piece.count);
        packed += piece.count;
      }
      if (message.grants) plan.Signal(message.from);
      for (const Relay& relay : message.relays) plan.Signal(relay.reader);
    });
    ForEach(round, [&](const Message& message) {
      const Relay* relay = message.RelayTo(rank_);
      if (relay == nullptr) return;
      WaitFor(message.to, message.signal, plan);
      for (const Piece& piece : relay->pieces) {
        plan.Move(Builder::At(message.to, Space::kOutput, piece.from_offset), plan.Output(piece.to_offset),
                  piece.count);
      }
    });
  }

  const Boxes& boxes_;
  const Geometry& geometry_;
  const int64_t chunk_count_;
  const int32_t rank_;
  int64_t own_rounds_ = 0;  // of each pair
  int64_t rounds_ = 0;
  std::vector<Message> messages_;
  int64_t receive_slots_ = 0;  // elements of scratch for messages
  int64_t packed_count_ = 0;   // elements of scratch behind them, for the message that the rank sends next
  std::map<int64_t, std::vector<int64_t>> grants_;  // by pair and message: number of the receiver's signal to this rank
  std::map<int32_t, int64_t> waits_;                // by peer: so far
};

Plan BuildReshard(const Request& request, int32_t rank, const BoxMoves& moves) {
  const Geometry& geometry = request.geometry;
  const int32_t n = geometry.num_ranks();
  std::vector<BoxMove> reads;
  for (const BoxMove& move : moves.moves) {
    if (move.to == rank && !move.relayed && CanRead(geometry, rank, move.from)) reads.push_back(move);
  }
  std::stable_sort(reads.begin(), reads.end(), [&](const BoxMove& a, const BoxMove& b) {
    return (a.from - rank - 1 + n) % n < (b.from - rank - 1 + n) % n;
  });
  Builder plan(request, rank);
  Network network(request, moves, rank);
  const auto read = [&] {
    for (const BoxMove& move : reads) {
      plan.Move(Builder::At(move.from, Space::kInput, move.from_offset), plan.Output(move.to_offset), move.count);
    }
  };
  network.AddSteps(read, plan);
  return std::move(plan).Finish(network.scratch_count());
}

// Direct: each rank gets the cells that it lacks from their owners. It reads those of its node; owners of other nodes
// put them. Thakur, Choudhary, Ramanujam, IEEE TPDS 7(6), 1996, redistribute cyclic arrays.
Plan DirectReshard(const Request& request, int32_t rank) { return BuildReshard(request, rank, request.boxes->direct); }

// Hierarchical: a cell that several ranks of a node lack crosses the network once. One of them gets it, and the others
// read it there, message by message. Nodes forward cells that an owner would have to send too often: along chains, or
// along trees if the time of a link is short for the length of the chains. Zhuang et al., MLSys 2023, arXiv:2211.05322,
// broadcast between meshes along a chain.
Plan HierarchicalReshard(const Request& request, int32_t rank) {
  const Boxes& boxes = *request.boxes;
  const auto rounds = [&](const BoxMoves& moves) {
    return NumChunks(moves.busiest, request.chunk_count) + moves.depth;
  };
  const bool of_trees = boxes.chains.depth > 0 && rounds(boxes.trees) < rounds(boxes.chains);
  return BuildReshard(request, rank, of_trees ? boxes.trees : boxes.chains);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kReshard>() {
  static const std::vector<Algorithm> table = {
      {"direct", "Thakur, Choudhary, Ramanujam, IEEE TPDS 7(6), 1996", kAnyGeometry, DirectReshard},
      {"hierarchical", "Zhuang et al., MLSys 2023, arXiv:2211.05322", kNetworkOfNodes, HierarchicalReshard},
  };
  return table;
}

}  // namespace jaxcomm
