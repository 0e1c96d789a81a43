// What small plans do, found by trying every order of their steps: an oracle for Validate. It knows plan.h, and neither
// clocks nor expressions: two ranks race if some state lets both do their next steps, and these touch the same element.
#pragma once

#include <bitset>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "../../ffi/plan/plan.h"
#include "../check.h"
#include "expected.h"

namespace jaxcomm {

// What may be wrong with a group of plans; a set of bits.
enum PlanFault : uint32_t {
  kIllegalStep = 1,
  kDeadlock = 2,
  kSignalLeftOver = 4,
  kRace = 8,
  kReadsUnwritten = 16,
  kBadSum = 32,
  kWrongOutput = 64,
  kOrdersDiffer = 128,
  kEndsEarly = 256,  // a barrier
};

class Interleavings {
 public:
  // More states than this are not tried.
  static constexpr int64_t kMaxStates = 20000;

  Interleavings(const std::vector<Plan>& plans, const Request& request)
      : plans_(plans), request_(request), n_(static_cast<int32_t>(plans.size())) {
    for (const Plan& plan : plans) {
      for (int64_t count : {InputCount(request), OutputCount(request), plan.scratch_count}) {
        first_cell_.push_back(num_cells_);
        num_cells_ += count;
      }
    }
    first_cell_.push_back(num_cells_);
  }

  int64_t NumStates() const {
    int64_t states = 1;
    for (const Plan& plan : plans_) states *= static_cast<int64_t>(plan.steps.size()) + 1;
    return states;
  }

  // Empty if the plans are correct. Data is moved along `num_runs` random orders.
  uint32_t Faults(std::mt19937* random, int num_runs) {
    CHECK(num_cells_ <= kMaxCells && NumStates() <= kMaxStates);
    for (const Plan& plan : plans_) {
      for (const Step& step : plan.steps) {
        if (!Legal(plan, step)) return kIllegalStep;
      }
    }
    Prepare();
    Explore();
    for (int i = 0; i < num_runs; ++i) RunOnce(random);
    return faults_;
  }

 private:
  static constexpr int64_t kMaxCells = 256;
  using Cells = std::bitset<kMaxCells>;
  using State = std::vector<int32_t>;  // steps that each rank has done

  struct Access {
    bool data = false;
    bool inter_node = false;  // a put across the network
    Cells read, written;
    bool Conflicts(const Access& other) const {
      return (written & (other.read | other.written)).any() || (read & other.written).any();
    }
  };
  // Data: a number to add up, whose inputs it holds and how often, which element of them, and in which order added.
  struct Element {
    bool written = false;
    int32_t number = 0;
    uint32_t ranks = 0;  // 8 bits for each
    int64_t at = 0;
    uint64_t order = 0;
  };

  bool IsIntraNode(int32_t a, int32_t b) const {
    const int32_t locals = request_.geometry.ranks_per_node;
    return request_.geometry.all_addressable || a / locals == b / locals;
  }
  int64_t Size(const Place& place) const {
    const auto buffer = static_cast<size_t>(place.rank) * 3 + static_cast<size_t>(place.space);
    return first_cell_[buffer + 1] - first_cell_[buffer];
  }
  bool IsRank(int32_t rank) const { return 0 <= rank && rank < n_; }
  bool Exists(const Place& place, int64_t count) const {
    return IsRank(place.rank) && place.offset >= 0 && place.offset + count <= Size(place);
  }
  int64_t Cell(const Place& place) const {
    return first_cell_[static_cast<size_t>(place.rank) * 3 + static_cast<size_t>(place.space)] + place.offset;
  }

  std::vector<Place> SourcesOf(const Plan& plan, const Step& step) const {
    if (step.kind == StepKind::kZero) return {};
    if (step.kind != StepKind::kReduce) return {step.src};
    return {plan.sources.begin() + step.first_source, plan.sources.begin() + step.first_source + step.num_sources};
  }

  bool Legal(const Plan& plan, const Step& step) const {
    const bool sync = step.kind == StepKind::kSignal || step.kind == StepKind::kWait;
    if (sync || step.kind == StepKind::kPut || step.kind == StepKind::kGet) {
      if (!IsRank(step.peer) || step.peer == plan.rank) return false;
    }
    if (sync) return true;
    const int32_t target = step.kind == StepKind::kPut ? step.peer : plan.rank;
    if (step.count < 1 || step.dst.rank != target || step.dst.space == Space::kInput) return false;
    if (!Exists(step.dst, step.count)) return false;
    if (step.kind == StepKind::kReduce && step.num_sources < 1) return false;
    for (const Place& src : SourcesOf(plan, step)) {
      if (!Exists(src, step.count) || !IsIntraNode(plan.rank, src.rank)) return false;
      if (step.kind == StepKind::kGet && src.rank != step.peer) return false;
      if ((step.kind == StepKind::kCopy || step.kind == StepKind::kPut) && src.rank != plan.rank) return false;
      const int64_t apart = Cell(src) - Cell(step.dst);
      const bool same = apart == 0 && step.kind == StepKind::kReduce;
      if (!same && -step.count < apart && apart < step.count) return false;
    }
    return true;
  }

  void Prepare() {
    const auto n = static_cast<size_t>(n_);
    for (const Plan& plan : plans_) {
      accesses_.emplace_back();
      // By peer: how many signals and waits there are before each step.
      std::vector<std::vector<int32_t>> signals(n, {0}), waits(n, {0});
      for (const Step& step : plan.steps) {
        Access access;
        access.data = step.kind != StepKind::kSignal && step.kind != StepKind::kWait;
        for (int64_t k = 0; access.data && k < step.count; ++k) {
          access.written.set(static_cast<size_t>(Cell(step.dst) + k));
          for (const Place& src : SourcesOf(plan, step)) access.read.set(static_cast<size_t>(Cell(src) + k));
        }
        access.inter_node = step.kind == StepKind::kPut && !IsIntraNode(plan.rank, step.peer);
        accesses_.back().push_back(access);
        for (size_t peer = 0; peer < n; ++peer) {
          const bool with = step.peer == static_cast<int32_t>(peer);
          signals[peer].push_back(signals[peer].back() + (with && step.kind == StepKind::kSignal));
          waits[peer].push_back(waits[peer].back() + (with && step.kind == StepKind::kWait));
        }
      }
      signals_.push_back(signals);
      waits_.push_back(waits);
    }
  }

  int32_t Signals(const State& state, int32_t from, int32_t to) const {
    return signals_[Index(from)][Index(to)][Index(state[Index(from)])];
  }
  int32_t Waits(const State& state, int32_t of, int32_t on) const {
    return waits_[Index(of)][Index(on)][Index(state[Index(of)])];
  }
  bool Ended(const State& state, int32_t rank) const {
    return state[Index(rank)] == static_cast<int32_t>(plans_[Index(rank)].steps.size());
  }
  const Step& Next(const State& state, int32_t rank) const {
    return plans_[Index(rank)].steps[Index(state[Index(rank)])];
  }
  bool Enabled(const State& state, int32_t rank) const {
    if (Ended(state, rank)) return false;
    const Step& step = Next(state, rank);
    return step.kind != StepKind::kWait || Waits(state, rank, step.peer) < Signals(state, step.peer, rank);
  }

  void Explore() {
    std::vector<bool> seen(static_cast<size_t>(NumStates()));
    std::vector<State> open = {State(Index(n_), 0)};
    while (!open.empty()) {
      const State state = open.back();
      open.pop_back();
      Look(state);
      for (int32_t rank = 0; rank < n_; ++rank) {
        if (!Enabled(state, rank)) continue;
        State next = state;
        ++next[Index(rank)];
        size_t number = 0;
        for (int32_t r = 0; r < n_; ++r) number = number * (plans_[Index(r)].steps.size() + 1) + Index(next[Index(r)]);
        if (!seen[number]) open.push_back(next);
        seen[number] = true;
      }
    }
  }

  // The faults of one state.
  void Look(const State& state) {
    bool stuck = true, ended = true;
    for (int32_t a = 0; a < n_; ++a) {
      stuck = stuck && !Enabled(state, a);
      ended = ended && Ended(state, a);
      for (int32_t b = 0; b < n_; ++b) {
        if (request_.collective == Collective::kBarrier && a != b && Ended(state, a) && state[Index(b)] == 0) {
          faults_ |= kEndsEarly;
        }
        if (a == b || Ended(state, b)) continue;
        const Access& next = accesses_[Index(b)][Index(state[Index(b)])];
        if (!next.data) continue;
        if (!Ended(state, a) && next.Conflicts(accesses_[Index(a)][Index(state[Index(a)])])) faults_ |= kRace;
        for (int32_t i = 0; i < state[Index(a)]; ++i) {  // puts of rank a that may still be under way
          const Access& put = accesses_[Index(a)][Index(i)];
          if (!put.inter_node) continue;
          const int32_t to = plans_[Index(a)].steps[Index(i)].peer;
          if (Waits(state, to, a) > signals_[Index(a)][Index(to)][Index(i)]) continue;
          if ((put.written & (next.read | next.written)).any()) faults_ |= kRace;
        }
      }
    }
    if (stuck && !ended) faults_ |= kDeadlock;
    for (int32_t a = 0; a < n_ && ended; ++a) {
      for (int32_t b = 0; b < n_; ++b) {
        if (Signals(state, a, b) > Waits(state, b, a)) faults_ |= kSignalLeftOver;
      }
    }
  }

  // One order, with data. What is put across the network arrives at any time until the wait that ensures it.
  void RunOnce(std::mt19937* random) {
    struct Flight {
      int32_t from, to, signal;  // before which signal of that pair it was put
      int64_t cell;
      std::vector<Element> elements;
    };
    const auto below = [&](size_t count) { return (*random)() % count; };
    std::vector<Element> memory(Index(num_cells_));
    Values inputs(Index(n_));
    for (int32_t rank = 0; rank < n_; ++rank) {
      for (int64_t i = 0; i < InputCount(request_); ++i) {
        const auto number = static_cast<int32_t>(1 + below(1 << 24));
        inputs[Index(rank)].push_back(number);
        memory[Index(Cell({rank, Space::kInput, i}))] = {true, number, 1u << (8 * rank), i, Index(rank) + 1};
      }
    }
    std::deque<Flight> flights;
    const auto land = [&](size_t i) {
      for (size_t k = 0; k < flights[i].elements.size(); ++k) {
        memory[Index(flights[i].cell) + k] = flights[i].elements[k];
      }
      flights.erase(flights.begin() + static_cast<std::ptrdiff_t>(i));
    };
    State state(Index(n_), 0);
    while (true) {
      if (!flights.empty() && below(4) == 0) {
        size_t i = below(flights.size());  // those of one pair land in order
        for (size_t j = 0; j < i; ++j) {
          if (flights[j].from == flights[i].from && flights[j].to == flights[i].to) i = j;
        }
        land(i);
      }
      std::vector<int32_t> enabled;
      for (int32_t rank = 0; rank < n_; ++rank) {
        if (Enabled(state, rank)) enabled.push_back(rank);
      }
      if (enabled.empty()) break;
      const int32_t rank = enabled[below(enabled.size())];
      const Step& step = Next(state, rank);
      if (step.kind == StepKind::kWait) {
        const int32_t signal = Waits(state, rank, step.peer);
        for (size_t i = 0; i < flights.size();) {
          const Flight& flight = flights[i];
          if (flight.from == step.peer && flight.to == rank && flight.signal <= signal) {
            land(i);
          } else {
            ++i;
          }
        }
      } else if (step.kind != StepKind::kSignal) {
        std::vector<Element> elements;
        for (int64_t k = 0; k < step.count; ++k) elements.push_back(Compute(memory, plans_[Index(rank)], step, k));
        flights.push_back({rank, step.peer, Signals(state, rank, std::max(step.peer, 0)), Cell(step.dst), elements});
        if (!accesses_[Index(rank)][Index(state[Index(rank)])].inter_node) land(flights.size() - 1);
      }
      ++state[Index(rank)];
    }
    while (!flights.empty()) land(0);
    for (int32_t rank = 0; rank < n_; ++rank) {
      if (!Ended(state, rank)) return;  // stuck: reported by Explore
    }
    Compare(memory, Expected(request_, inputs));
  }

  Element Compute(const std::vector<Element>& memory, const Plan& plan, const Step& step, int64_t k) {
    const std::vector<Place> sources = SourcesOf(plan, step);
    Element sum;
    sum.written = true;
    sum.order = 0;
    if (sources.size() > 1) sum.order = 1469598103u * sources.size();
    for (size_t i = 0; i < sources.size(); ++i) {
      const Element& operand = memory[Index(Cell(sources[i]) + k)];
      if (!operand.written) faults_ |= kReadsUnwritten;
      if (sources.size() == 1) return operand;
      for (int32_t rank = 0; rank < n_; ++rank) {
        if ((sum.ranks >> (8 * rank) & 255) + (operand.ranks >> (8 * rank) & 255) > 1) faults_ |= kBadSum;
      }
      if (operand.ranks == 0 || (i > 0 && operand.at != sum.at)) faults_ |= kBadSum;
      sum.number = static_cast<int32_t>(static_cast<uint32_t>(sum.number) + static_cast<uint32_t>(operand.number));
      sum.ranks |= operand.ranks;
      sum.at = operand.at;
      sum.order = (sum.order ^ operand.order) * 1099511628211u + 1;
    }
    return sum;
  }

  void Compare(const std::vector<Element>& memory, const Values& expected) {
    for (int32_t rank = 0; rank < n_; ++rank) {
      for (int64_t i = 0; i < OutputCount(request_); ++i) {
        const Element& element = memory[Index(Cell({rank, Space::kOutput, i}))];
        if (!element.written || element.number != expected[Index(rank)][Index(i)]) faults_ |= kWrongOutput;
        const bool same = element.order == memory[Index(Cell({0, Space::kOutput, i}))].order;
        if (request_.collective == Collective::kAllReduce && !same) faults_ |= kOrdersDiffer;
      }
    }
  }

  static size_t Index(int64_t i) { return static_cast<size_t>(i); }

  const std::vector<Plan>& plans_;
  const Request& request_;
  int32_t n_;
  int64_t num_cells_ = 0;
  std::vector<int64_t> first_cell_;  // of input, output and scratch of rank 0, of rank 1, ...
  std::vector<std::vector<Access>> accesses_;
  std::vector<std::vector<std::vector<int32_t>>> signals_, waits_;
  uint32_t faults_ = 0;
};

}  // namespace jaxcomm
