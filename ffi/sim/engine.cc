#include "sim/engine.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <string>
#include <utility>

#include "sim/rates.h"

namespace jaxcomm {
namespace {

// Signals that were not received yet form a list of entries of Engine::arrivals_; -1: none.
struct Counter {
  int32_t first = -1;
  int32_t last = -1;
  int32_t waiter = -1;  // rank that is blocked
};

// A time, and what it would be if all transfers were empty. Both follow from the same steps: the k-th wait on a counter
// ends with its k-th signal in either case.
struct Moment {
  int64_t ps = 0;
  int64_t empty_ps = 0;

  void Add(int64_t duration_ps) {
    ps += duration_ps;
    empty_ps += duration_ps;
  }
  void AtLeast(const Moment& other) {
    ps = std::max(ps, other.ps);
    empty_ps = std::max(empty_ps, other.empty_ps);
  }
};

struct Arrival {
  Moment time;
  int32_t next = -1;
};

struct QueueEntry {
  ProgramOp op;
  Moment ready;
};

struct RankState {
  size_t next = 0;        // position in the program
  Moment clock;           // of the processor; may be later than the present
  int32_t transfer = -1;  // op under way or about to start on the processor
  std::vector<QueueEntry> queue;
  size_t queue_next = 0;
  Moment queue_free;
  int32_t queue_transfer = -1;
  int64_t waited_ps = 0;
  int64_t started_ps[2] = {0, 0};  // transfers of the processor and of the queue
};

// `start`: otherwise the transfer of the slot ends, if its version is still current.
struct Event {
  int64_t time_ps;
  int32_t slot;
  uint32_t version;
  bool start;
  bool operator>(const Event& other) const { return time_ps > other.time_ps; }
};

// Slots of transfers: 2 * rank for the processor, 2 * rank + 1 for the queue.
class Engine {
 public:
  Engine(const Workload& workload, size_t max_slices)
      : workload_(workload),
        max_slices_(max_slices),
        rates_(workload, 2 * workload.programs.size()),
        ranks_(workload.programs.size()),
        counters_(static_cast<size_t>(workload.num_counters)),
        versions_(2 * workload.programs.size(), 0) {
    result_.bytes_on.resize(workload.links.size(), 0);
  }

  StatusOr<EngineResult> Run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) ready_.push_back(static_cast<int32_t>(rank));
    RunReady();
    while (true) {
      rates_.Update(now_ps_, [&](int32_t slot, int64_t finish_ps) {
        events_.push({finish_ps, slot, ++versions_[static_cast<size_t>(slot)], false});
      });
      if (events_.empty()) break;
      now_ps_ = events_.top().time_ps;
      while (!events_.empty() && events_.top().time_ps == now_ps_) {
        const Event event = events_.top();
        events_.pop();
        if (event.start) {
          Start(event.slot);
        } else if (event.version == versions_[static_cast<size_t>(event.slot)]) {
          Finish(event.slot);
        }
        RunReady();
      }
    }
    return Collect();
  }

 private:
  const Op& OpAt(int32_t index) const { return workload_.ops[static_cast<size_t>(index)]; }
  RankState& RankOf(int32_t slot) { return ranks_[static_cast<size_t>(slot / 2)]; }

  // Whether the processor has executed all ops.
  bool AtEnd(int32_t rank) const {
    const auto index = static_cast<size_t>(rank);
    return ranks_[index].next == workload_.programs[index].ops.size();
  }

  void RunReady() {
    while (!ready_.empty()) {
      const int32_t rank = ready_.back();
      ready_.pop_back();
      RunSteps(rank);
    }
  }

  // Executes ops of the processor up to the next transfer or to a wait for a signal that has not been sent.
  void RunSteps(int32_t rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    const std::vector<ProgramOp>& program = workload_.programs[static_cast<size_t>(rank)].ops;
    while (state.next < program.size()) {
      const ProgramOp current = program[state.next];
      const Op& op = OpAt(current.op);
      if (op.kind == OpKind::kWait) {
        Counter& counter = counters_[static_cast<size_t>(current.counter)];
        if (counter.first < 0) {
          counter.waiter = rank;
          return;
        }
        const Moment arrival = TakeArrival(&counter);
        state.waited_ps += std::max<int64_t>(arrival.ps - state.clock.ps, 0);
        Record({rank, current.op, false, state.clock.ps, arrival.ps});
        state.clock.AtLeast(arrival);
      } else if (op.queued) {
        state.queue.push_back({current, state.clock});
        ++state.next;
        if (state.queue_transfer < 0) RunQueue(rank);
        continue;
      } else {
        state.clock.Add(op.overhead_ps);
        if (op.kind == OpKind::kSignal) {
          Send(op, current.counter, state.clock);
        } else if (TakesTime(op)) {
          ++state.next;
          state.transfer = current.op;
          return StartAt(2 * rank, state.clock.ps);
        }
      }
      ++state.next;
    }
  }

  void RunQueue(int32_t rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    while (state.queue_next < state.queue.size()) {
      const QueueEntry entry = state.queue[state.queue_next++];
      const Op& op = OpAt(entry.op.op);
      state.queue_free.AtLeast(entry.ready);
      state.queue_free.Add(op.overhead_ps);
      if (op.kind == OpKind::kSignal) {
        Send(op, entry.op.counter, state.queue_free);
      } else if (TakesTime(op)) {
        state.queue_transfer = entry.op.op;
        return StartAt(2 * rank + 1, state.queue_free.ps);
      }
    }
    state.queue.clear();
    state.queue_next = 0;
  }

  Moment TakeArrival(Counter* counter) {
    const int32_t entry = counter->first;
    Arrival& arrival = arrivals_[static_cast<size_t>(entry)];
    counter->first = std::exchange(arrival.next, free_arrival_);
    free_arrival_ = entry;
    return arrival.time;
  }

  void Send(const Op& op, int32_t target, Moment time) {
    time.Add(op.latency_ps);
    if (target >= 0) return Arrive(target, time);
    const auto list = static_cast<size_t>(-1 - target);
    for (int32_t i = workload_.target_first[list]; i < workload_.target_first[list + 1]; ++i) {
      Arrive(workload_.target_counters[static_cast<size_t>(i)], time);
    }
  }

  void Arrive(int32_t target, const Moment& time) {
    Counter& counter = counters_[static_cast<size_t>(target)];
    int32_t entry = free_arrival_;
    if (entry < 0) {
      entry = static_cast<int32_t>(arrivals_.size());
      arrivals_.emplace_back();
    } else {
      free_arrival_ = arrivals_[static_cast<size_t>(entry)].next;
    }
    arrivals_[static_cast<size_t>(entry)] = {time, -1};
    (counter.first < 0 ? counter.first : arrivals_[static_cast<size_t>(counter.last)].next) = entry;
    counter.last = entry;
    if (counter.waiter < 0) return;
    ready_.push_back(counter.waiter);
    counter.waiter = -1;
  }

  void StartAt(int32_t slot, int64_t time_ps) {
    if (time_ps > now_ps_) {
      events_.push({time_ps, slot, 0, true});
    } else {
      Start(slot);
    }
  }

  // Counts the bytes of a transfer. Returns whether it takes time.
  bool TakesTime(const Op& op) {
    const TransferRoute& route = workload_.routes[static_cast<size_t>(op.route)];
    for (int32_t i = route.first; i < route.first + route.count; ++i) {
      const ClassUse& use = workload_.uses[static_cast<size_t>(i)];
      result_.bytes_on[static_cast<size_t>(use.link)] += op.bytes * use.weight;
    }
    return op.bytes > 0 && route.limit < kUnlimited;
  }

  void Record(const Interval& slice) {
    if (slice.end_ps > slice.start_ps && result_.slices.size() < max_slices_) result_.slices.push_back(slice);
  }

  void Start(int32_t slot) {
    RankState& state = RankOf(slot);
    const Op& op = OpAt(slot % 2 == 0 ? state.transfer : state.queue_transfer);
    state.started_ps[slot % 2] = now_ps_;
    rates_.Start(slot, op.route, op.bytes, now_ps_);
  }

  void Finish(int32_t slot) {
    rates_.Finish(slot);
    ++versions_[static_cast<size_t>(slot)];
    RankState& state = RankOf(slot);
    const bool queued = slot % 2 == 1;
    Record({slot / 2, queued ? state.queue_transfer : state.transfer, queued, state.started_ps[slot % 2], now_ps_});
    if (queued) {
      state.queue_transfer = -1;
      state.queue_free.ps = now_ps_;
      return RunQueue(slot / 2);
    }
    state.clock.ps = now_ps_;
    state.transfer = -1;
    ready_.push_back(slot / 2);
  }

  StatusOr<EngineResult> Collect() {
    double ranks = 0;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const RankState& state = ranks_[i];
      if (!AtEnd(static_cast<int32_t>(i))) {
        return InvalidArgumentError("simulation: program " + std::to_string(i) +
                                    " waits for a signal that is never sent");
      }
      result_.time_ps = std::max({result_.time_ps, state.clock.ps, state.queue_free.ps});
      result_.empty_ps = std::max({result_.empty_ps, state.clock.empty_ps, state.queue_free.empty_ps});
      result_.num_ops += static_cast<int64_t>(state.next);
      const auto weight = static_cast<double>(workload_.programs[i].ranks);
      ranks += weight;
      result_.mean_wait_s += weight * static_cast<double>(state.waited_ps) * 1e-12;
    }
    result_.mean_wait_s /= ranks;
    return std::move(result_);
  }

  const Workload& workload_;
  const size_t max_slices_;
  Rates rates_;
  std::vector<RankState> ranks_;
  std::vector<Counter> counters_;
  std::vector<Arrival> arrivals_;
  int32_t free_arrival_ = -1;  // first of a list
  std::vector<uint32_t> versions_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::vector<int32_t> ready_;
  int64_t now_ps_ = 0;
  EngineResult result_;
};

}  // namespace

StatusOr<EngineResult> RunEngine(const Workload& workload, size_t max_slices) {
  return Engine(workload, max_slices).Run();
}

}  // namespace jaxcomm
