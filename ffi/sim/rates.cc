#include "sim/rates.h"

#include <algorithm>
#include <cmath>

namespace jaxcomm {
namespace {

// Relative difference of rates that count as equal.
constexpr double kEqualRate = 1e-12;

}  // namespace

Rates::Rates(const Workload& workload, size_t num_slots)
    : workload_(workload), transfers_(num_slots), links_(workload.links.size()) {
  for (size_t i = 0; i < links_.size(); ++i) links_[i].capacity = workload.links[i].capacity;
}

int64_t Rates::Remaining(const Transfer& transfer) {
  return transfer.rate < kUnlimited ? std::llround(transfer.bytes / transfer.rate * 1e12) : 0;
}

const TransferRoute& Rates::RouteOf(const Transfer& transfer) const {
  return workload_.routes[static_cast<size_t>(transfer.route)];
}

const ClassUse* Rates::Uses(const Transfer& transfer) const { return workload_.uses.data() + RouteOf(transfer).first; }

void Rates::Start(int32_t slot, int32_t route, double bytes, int64_t now_ps) {
  Transfer& transfer = transfers_[static_cast<size_t>(slot)];
  transfer.route = route;
  transfer.bytes = bytes;
  transfer.rate = 0;
  transfer.since_ps = now_ps;
  const ClassUse* uses = Uses(transfer);
  const int32_t count = RouteOf(transfer).count;
  transfer.position.resize(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    Link& link = links_[static_cast<size_t>(uses[i].link)];
    transfer.position[static_cast<size_t>(i)] = static_cast<int32_t>(link.users.size());
    link.users.push_back({slot, i});
    link.demand += uses[i].weight * RouteOf(transfer).limit;
  }
  dirty_.push_back(slot);
}

void Rates::Finish(int32_t slot) {
  Transfer& transfer = transfers_[static_cast<size_t>(slot)];
  const ClassUse* uses = Uses(transfer);
  for (int32_t i = 0; i < RouteOf(transfer).count; ++i) {
    Link& link = links_[static_cast<size_t>(uses[i].link)];
    const bool was_tight = Tight(link);
    const auto at = static_cast<size_t>(transfer.position[static_cast<size_t>(i)]);
    link.users[at] = link.users.back();
    link.users.pop_back();
    if (at < link.users.size()) {
      const auto [moved, use] = link.users[at];
      transfers_[static_cast<size_t>(moved)].position[static_cast<size_t>(use)] = static_cast<int32_t>(at);
    }
    link.demand = link.users.empty() ? 0 : link.demand - uses[i].weight * RouteOf(transfer).limit;
    if (!was_tight) continue;
    for (const auto& [user, use] : link.users) dirty_.push_back(user);
  }
  transfer.route = -1;
}

bool Rates::Collect(int32_t slot, int64_t now_ps) {
  part_.clear();
  tight_.clear();
  const auto add = [&](int32_t index) {
    Transfer& transfer = transfers_[static_cast<size_t>(index)];
    if (transfer.route < 0 || transfer.visit == visit_) return;
    transfer.visit = visit_;
    transfer.frozen = false;
    transfer.bytes -= transfer.rate * static_cast<double>(now_ps - transfer.since_ps) * 1e-12;
    transfer.bytes = std::max(transfer.bytes, 0.0);
    transfer.since_ps = now_ps;
    part_.push_back(index);
  };
  add(slot);
  for (size_t next = 0; next < part_.size(); ++next) {
    const Transfer& transfer = transfers_[static_cast<size_t>(part_[next])];
    const ClassUse* uses = Uses(transfer);
    for (int32_t i = 0; i < RouteOf(transfer).count; ++i) {
      Link& link = links_[static_cast<size_t>(uses[i].link)];
      if (link.visit == visit_ || !Tight(link)) continue;
      link.visit = visit_;
      link.free = link.capacity;
      link.weight = 0;
      link.rising = 0;
      tight_.push_back(uses[i].link);
      for (const auto& [user, use] : link.users) add(user);
    }
  }
  for (int32_t index : part_) {
    const Transfer& transfer = transfers_[static_cast<size_t>(index)];
    const ClassUse* uses = Uses(transfer);
    for (int32_t i = 0; i < RouteOf(transfer).count; ++i) {
      Link& link = links_[static_cast<size_t>(uses[i].link)];
      if (link.visit != visit_) continue;
      link.weight += uses[i].weight;
      ++link.rising;
    }
  }
  return !part_.empty();
}

void Rates::Fill() {
  std::vector<int32_t>& rising = rising_;
  rising = part_;
  while (!rising.empty()) {
    if (tight_.empty()) {  // a single transfer
      for (int32_t slot : rising) {
        Transfer& transfer = transfers_[static_cast<size_t>(slot)];
        transfer.new_rate = RouteOf(transfer).limit;
      }
      return;
    }
    double level = kUnlimited;
    for (int32_t slot : rising) level = std::min(level, RouteOf(transfers_[static_cast<size_t>(slot)]).limit);
    for (int32_t index : tight_) {
      const Link& link = links_[static_cast<size_t>(index)];
      if (link.weight > 0) level = std::min(level, std::max(link.free, 0.0) / link.weight);
    }
    const double reached = level * (1 + kEqualRate);
    // All decisions use the state before this level.
    std::vector<int32_t> stopped;
    const auto stops = [&](const Transfer& transfer) {
      if (RouteOf(transfer).limit <= reached) return true;
      const ClassUse* uses = Uses(transfer);
      for (int32_t i = 0; i < RouteOf(transfer).count; ++i) {
        const Link& link = links_[static_cast<size_t>(uses[i].link)];
        if (link.visit == visit_ && link.free <= reached * link.weight) return true;
      }
      return false;
    };
    for (int32_t slot : rising) {
      Transfer& transfer = transfers_[static_cast<size_t>(slot)];
      transfer.frozen = stops(transfer);
      if (transfer.frozen) stopped.push_back(slot);
    }
    for (int32_t slot : stopped) {
      Transfer& transfer = transfers_[static_cast<size_t>(slot)];
      transfer.new_rate = level;
      const ClassUse* uses = Uses(transfer);
      for (int32_t i = 0; i < RouteOf(transfer).count; ++i) {
        Link& link = links_[static_cast<size_t>(uses[i].link)];
        if (link.visit != visit_) continue;
        link.free -= uses[i].weight * level;
        // Without the count, a remainder of rounding would limit nothing at a rate of 0 forever.
        link.weight = --link.rising == 0 ? 0 : std::max(link.weight - uses[i].weight, 0.0);
      }
    }
    rising.erase(std::remove_if(rising.begin(), rising.end(),
                                [&](int32_t slot) { return transfers_[static_cast<size_t>(slot)].frozen; }),
                 rising.end());
  }
}

}  // namespace jaxcomm
