// Max-min fair rates of the transfers that are under way.
//
// Progressive filling: all rates rise together; those of a full link stop. Source: Bertsekas, Gallager, Data Networks,
// 1992, section 6.5.2. Only the connected part that changed is computed again, where only links connect transfers that
// could limit them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sim/workload.h"

namespace jaxcomm {

class Rates {
 public:
  // `num_slots`: transfers that can be under way at once.
  Rates(const Workload& workload, size_t num_slots);

  void Start(int32_t slot, int32_t route, double bytes, int64_t now_ps);
  void Finish(int32_t slot);
  // Computes the rates that Start and Finish changed. Calls changed(slot, finish_ps) for each of them.
  template <typename Changed>
  void Update(int64_t now_ps, Changed changed) {
    ++visit_;
    for (size_t i = 0; i < dirty_.size(); ++i) {
      if (!Collect(dirty_[i], now_ps)) continue;
      Fill();
      for (int32_t slot : part_) {
        Transfer& transfer = transfers_[static_cast<size_t>(slot)];
        if (transfer.new_rate == transfer.rate) continue;
        transfer.rate = transfer.new_rate;
        changed(slot, now_ps + Remaining(transfer));
      }
    }
    dirty_.clear();
  }

 private:
  struct Transfer {
    int32_t route = -1;  // -1: none
    double bytes = 0;    // left at `since_ps`
    double rate = 0;
    double new_rate = 0;
    int64_t since_ps = 0;
    uint64_t visit = 0;
    bool frozen = false;
    std::vector<int32_t> position;  // in the lists of its links
  };
  struct Link {
    double capacity = 1;
    double demand = 0;  // if no other link limited
    double free = 0;
    double weight = 0;   // of transfers whose rates still rise
    int32_t rising = 0;  // their number
    uint64_t visit = 0;
    std::vector<std::pair<int32_t, int32_t>> users;  // slot, index of the use in its route
  };
  // Whether the link can limit its transfers.
  static bool Tight(const Link& link) { return link.demand > link.capacity * (1 + 1e-9); }
  static int64_t Remaining(const Transfer& transfer);
  const TransferRoute& RouteOf(const Transfer& transfer) const;
  const ClassUse* Uses(const Transfer& transfer) const;
  // The transfers that `slot` is connected with: part_, and the links that connect them: tight_. False if the slot is
  // empty or belongs to an earlier part of this update.
  bool Collect(int32_t slot, int64_t now_ps);
  void Fill();

  const Workload& workload_;
  std::vector<Transfer> transfers_;
  std::vector<Link> links_;
  std::vector<int32_t> dirty_;
  std::vector<int32_t> part_;
  std::vector<int32_t> tight_;
  std::vector<int32_t> rising_;
  uint64_t visit_ = 0;
};

}  // namespace jaxcomm
