// The input of the engine: programs of representative ranks, their transfers over classes of links.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/algorithms.h"
#include "sim/fold.h"
#include "sim/hash.h"
#include "sim/topology.h"

namespace jaxcomm {

// Links that carry the same load, of `capacity` bytes per second each.
struct LinkClass {
  LinkId id;  // one of them
  double capacity = 1;
};

// Links that a transfer crosses, as a range of Workload::uses. `limit`: bytes per second where nothing else transfers.
struct TransferRoute {
  int32_t first = 0;
  int32_t count = 0;
  double limit = kUnlimited;
};

struct ClassUse {
  int32_t link = 0;
  double weight = 1;  // bytes on each link of the class for each byte of one of the equal transfers
};

enum class OpKind : uint8_t { kTransfer, kSignal, kWait };

// A step, or the part of a reduce on one class of link. `queued`: the network executes it, after earlier ones.
struct Op {
  OpKind kind = OpKind::kTransfer;
  bool queued = false;
  int32_t route = 0;  // transfer
  double bytes = 0;
  int64_t overhead_ps = 0;
  int64_t latency_ps = 0;  // signal

  bool operator==(const Op& other) const {
    return kind == other.kind && queued == other.queued && route == other.route && bytes == other.bytes &&
           overhead_ps == other.overhead_ps && latency_ps == other.latency_ps;
  }
};

struct ProgramOp {
  int32_t op = 0;  // index of Workload::ops
  // The counter that a wait reads or a signal raises. A negative one of a signal: all counters of list -1 - counter.
  int32_t counter = 0;
};

struct RankOps {
  std::vector<ProgramOp> ops;
  int64_t ranks = 1;  // that run this program
};

struct Workload {
  std::vector<LinkClass> links;
  std::vector<ClassUse> uses;
  std::vector<TransferRoute> routes;
  std::vector<Op> ops;
  std::vector<RankOps> programs;
  // Lists of counters that a signal adds to: list i has those from target_first[i] on.
  std::vector<int32_t> target_first = {0};
  std::vector<int32_t> target_counters;
  int32_t num_counters = 0;
};

// Makes the workload of a collective. Memory: one plan, and 8 bytes for each op of a representative rank.
class WorkloadBuilder {
 public:
  // `bytes_per_item` counts all channels together. `copies`: of each rank. All references must outlive the builder.
  WorkloadBuilder(const Topology& topology, const Fold& fold, const Geometry& geometry, double bytes_per_item,
                  const ArenaCopies& copies);

  // Adds the program of a representative rank.
  void Add(const Plan& plan);
  Workload Finish() &&;

 private:
  struct Figures {
    double overhead_s = 0;
    double limit = kUnlimited;
    bool queued = false;
  };
  Figures FiguresOf(int32_t rank, int32_t peer) const;
  // What steps between a rank and a peer have in common.
  struct PeerFigures {
    Figures figures;
    double latency_s = 0;
    int32_t signal_op = -1;  // of a queued signal; -1: not known yet
  };
  // The reference is valid until the next call.
  PeerFigures& FiguresOfPeer(int32_t rank, int32_t peer);
  // Which levels a transfer between this rank and the peer crosses, as bits.
  uint32_t Crossed(int32_t rank, int32_t peer) const;
  // Adds to the weight of the link's class in sum_.
  void AddUse(const LinkId& link, double weight = 1);
  // The route with the weights of sum_, multiplied by `scale`. Clears sum_.
  int32_t TakeRoute(double scale, double limit);
  int32_t PeerRoute(int32_t rank, int32_t src, int32_t dst, const Figures& figures);
  int32_t OpOf(const Op& op);
  void Append(const Op& op, RankOps* program) { program->ops.push_back({OpOf(op), 0}); }
  int32_t CounterOf(const Fold::Counter& counter);
  // ProgramOp::counter of a signal.
  int32_t TargetsOf(int32_t rank, int64_t step, int32_t peer);
  // What determines the route between a rank and a peer: both numbers, or less.
  uint64_t RouteKey(int32_t rank, int32_t src, int32_t dst) const;
  // Whether the data step runs at once with its neighbours if they are short too.
  bool IsShort(const Step& step) const;
  // The order in which the steps of a plan run.
  std::vector<size_t> OrderOf(const Plan& plan) const;
  void AddStep(const Plan& plan, const Step& step, RankOps* program);
  void AddSignal(const Plan& plan, const Step& step, RankOps* program);
  void FindOperands(const Plan& plan, const Step& step);
  void AddReduce(const Plan& plan, const Step& step, RankOps* program);
  void AddCopy(int32_t rank, int64_t count, RankOps* program);
  // Adds bytes of a transfer to its use of a link in the row.
  void AddToRow(const ClassUse& use, double bytes);
  // Adds bytes over `level` (-1: own memory) to the row, which alone take bytes / limit there.
  void AddToRow(int32_t level, double bytes, double limit);
  // The steps of the row so far become one transfer.
  void RunRow(RankOps* program);

  const Topology& topology_;
  const Fold& fold_;
  const Geometry& geometry_;
  const double bytes_per_item_;
  const ArenaCopies copies_;
  Workload workload_;
  double multiplicity_ = 1;  // of this rank
  // Short steps that run at once. The link with most to do determines their time.
  struct Row {
    double overhead_s = 0;                 // of its moves, which share it
    std::vector<double> busy_s;            // by level + 1: time of the bytes
    double run_s = 0;                      // the part of this time that transfers in the program take
    std::vector<int32_t> links;            // of the steps that are not in the program; row_sum_: bytes on each link
    double bytes = 0, new_overhead_s = 0;  // of these steps
    bool IsEmpty() const { return bytes == 0 && new_overhead_s == 0; }
  };
  Row row_;
  double signals_s_ = 0;         // overhead of the signals since the last step that is none
  std::vector<LinkId> links_;    // scratch
  std::vector<double> sum_;      // by class of link; 0 where not in touched_
  std::vector<double> row_sum_;  // by class of link; 0 where not in Row::links
  std::vector<int32_t> touched_;
  std::unordered_map<uint64_t, int32_t> link_index_;
  Index route_index_;
  Index op_index_;
  Index counter_index_;
  std::vector<std::pair<uint64_t, int32_t>> counters_;  // by counter_index_
  // Counters by sender and receiver, as long as the table is small: a row for each sender, -1 for no counter.
  std::vector<int32_t> counter_row_;  // by rank; -1: none
  std::vector<std::vector<int32_t>> counter_rows_;
  std::map<std::vector<int32_t>, int32_t> targets_index_;
  // Routes to the peers of this rank.
  bool by_role_ = false;  // a route follows from the role of the peer
  Index peer_index_;
  std::vector<std::pair<uint64_t, int32_t>> peer_routes_;
  int32_t last_src_ = -1, last_dst_ = -1, last_route_ = -1;
  int32_t last_peer_ = -1;
  PeerFigures* last_figures_ = nullptr;
  std::vector<std::optional<PeerFigures>> by_crossed_;  // by_role_: figures follow from the crossed levels
  PeerFigures other_figures_;
  int32_t wait_op_ = -1;
  // The operands of the last reduction on each level, which others of this rank repeat.
  struct Operands {
    int32_t level = 0;
    double count = 0;
    Figures figures;
    std::vector<ClassUse> uses;  // weight: bytes for each byte of an operand
  };
  std::vector<Operands> operands_;
  std::vector<int32_t> operand_ranks_;
};

}  // namespace jaxcomm
