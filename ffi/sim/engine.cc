#include "sim/engine.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <string>

#include "sim/rates.h"

namespace jaxcomm {
namespace {

struct Counter {
  std::vector<int64_t> arrivals_ps;  // not received yet, from `next` on
  size_t next = 0;
  int32_t waiter = -1;  // rank that is blocked
};

struct QueueEntry {
  int32_t op = 0;
  int64_t ready_ps = 0;
};

struct RankState {
  size_t next = 0;        // position in the program
  int64_t clock_ps = 0;   // of the processor; may be later than the present
  int32_t transfer = -1;  // op under way or about to start on the processor
  std::vector<QueueEntry> queue;
  size_t queue_next = 0;
  int64_t queue_free_ps = 0;
  int32_t queue_transfer = -1;
  int64_t busy_ps = 0;
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
  Engine(const Workload& workload, bool with_bytes, size_t max_slices)
      : workload_(workload),
        with_bytes_(with_bytes),
        max_slices_(max_slices),
        rates_(workload, 2 * workload.programs.size()),
        ranks_(workload.programs.size()),
        counters_(static_cast<size_t>(workload.num_counters)),
        versions_(2 * workload.programs.size(), 0) {
    result_.bytes_on.resize(workload.links.size(), 0);
  }

  StatusOr<EngineResult> Run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      ranks_[rank].clock_ps = workload_.programs[rank].start_ps;
      ready_.push_back(static_cast<int32_t>(rank));
    }
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

  // The processor's next op; -1 at the end.
  int32_t Current(int32_t rank) const {
    const size_t next = ranks_[static_cast<size_t>(rank)].next;
    const std::vector<int32_t>& ops = workload_.programs[static_cast<size_t>(rank)].ops;
    return next < ops.size() ? ops[next] : -1;
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
    for (int32_t index = Current(rank); index >= 0; index = Current(rank)) {
      const Op& op = OpAt(index);
      if (op.kind == OpKind::kWait) {
        Counter& counter = counters_[static_cast<size_t>(op.counter)];
        if (counter.next == counter.arrivals_ps.size()) {
          counter.waiter = rank;
          return;
        }
        const int64_t arrival_ps = counter.arrivals_ps[counter.next++];
        if (counter.next == counter.arrivals_ps.size()) {
          counter.arrivals_ps.clear();
          counter.next = 0;
        }
        state.waited_ps += std::max<int64_t>(arrival_ps - state.clock_ps, 0);
        Record({rank, index, false, state.clock_ps, arrival_ps});
        state.clock_ps = std::max(state.clock_ps, arrival_ps);
      } else if (op.queued) {
        state.queue.push_back({index, state.clock_ps});
        ++state.next;
        if (state.queue_transfer < 0) RunQueue(rank);
        continue;
      } else {
        state.clock_ps += op.overhead_ps;
        state.busy_ps += op.overhead_ps;
        if (op.kind == OpKind::kSignal) {
          Send(op, state.clock_ps);
        } else if (TakesTime(op)) {
          ++state.next;
          state.transfer = index;
          return StartAt(2 * rank, state.clock_ps);
        }
      }
      ++state.next;
    }
  }

  void RunQueue(int32_t rank) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    while (state.queue_next < state.queue.size()) {
      const QueueEntry entry = state.queue[state.queue_next++];
      const Op& op = OpAt(entry.op);
      state.queue_free_ps = std::max(state.queue_free_ps, entry.ready_ps) + op.overhead_ps;
      if (op.kind == OpKind::kSignal) {
        Send(op, state.queue_free_ps);
      } else if (TakesTime(op)) {
        state.queue_transfer = entry.op;
        return StartAt(2 * rank + 1, state.queue_free_ps);
      }
    }
    state.queue.clear();
    state.queue_next = 0;
  }

  void Send(const Op& op, int64_t time_ps) {
    const auto entry = static_cast<size_t>(op.counter);
    for (int32_t i = workload_.target_first[entry]; i < workload_.target_first[entry + 1]; ++i) {
      Counter& counter = counters_[static_cast<size_t>(workload_.target_counters[static_cast<size_t>(i)])];
      counter.arrivals_ps.push_back(time_ps + op.latency_ps);
      if (counter.waiter < 0) continue;
      ready_.push_back(counter.waiter);
      counter.waiter = -1;
    }
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
    if (!with_bytes_) return false;
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
      state.queue_free_ps = now_ps_;
      return RunQueue(slot / 2);
    }
    state.busy_ps += now_ps_ - state.clock_ps;
    state.clock_ps = now_ps_;
    state.transfer = -1;
    ready_.push_back(slot / 2);
  }

  StatusOr<EngineResult> Collect() {
    double ranks = 0;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const RankState& state = ranks_[i];
      if (Current(static_cast<int32_t>(i)) >= 0) {
        return InvalidArgumentError("simulation: program " + std::to_string(i) +
                                    " waits for a signal that is never sent");
      }
      result_.time_ps = std::max({result_.time_ps, state.clock_ps, state.queue_free_ps});
      result_.num_ops += static_cast<int64_t>(state.next);
      const auto weight = static_cast<double>(workload_.programs[i].ranks);
      ranks += weight;
      result_.mean_work_s += weight * static_cast<double>(state.busy_ps) * 1e-12;
      result_.mean_wait_s += weight * static_cast<double>(state.waited_ps) * 1e-12;
    }
    result_.mean_work_s /= ranks;
    result_.mean_wait_s /= ranks;
    return std::move(result_);
  }

  const Workload& workload_;
  const bool with_bytes_;
  const size_t max_slices_;
  Rates rates_;
  std::vector<RankState> ranks_;
  std::vector<Counter> counters_;
  std::vector<uint32_t> versions_;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::vector<int32_t> ready_;
  int64_t now_ps_ = 0;
  EngineResult result_;
};

}  // namespace

StatusOr<EngineResult> RunEngine(const Workload& workload, bool with_bytes, size_t max_slices) {
  return Engine(workload, with_bytes, max_slices).Run();
}

}  // namespace jaxcomm
