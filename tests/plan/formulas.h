// Formulas for the times of algorithms on a power of two of ranks with links of one class and free local copies:
// messages and bytes of Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, and the signals between them.
#pragma once

#include "../../ffi/plan/cost.h"

namespace jaxcomm {

constexpr LinkModel kFree = {0, 1e30, 0};

inline Machine MakeMachine(LinkModel self, LinkModel node, LinkModel network) {
  Machine machine;
  machine.links = {self, node, network};
  return machine;
}

// Messages of a rank one after the other, their blocks in total, and the signals of which each releases the next one.
struct Chain {
  double messages, blocks, signals;

  // A step of s bytes takes o + s / beta. A signal takes o and arrives lambda later.
  double time_s(double block_bytes, const LinkModel& link) const {
    return messages * link.overhead_s + blocks * block_bytes / link.bytes_per_s +
           signals * (link.overhead_s + link.latency_s);
  }
};

struct Formula {
  Collective collective;
  const char* algorithm;
  Chain (*chain)(double n, double rounds);  // rounds: log2 n
};

constexpr Formula kFormulas[] = {
    {Collective::kAllToAll, "pairwise", [](double n, double) { return Chain{n - 1, n - 1, n - 2}; }},
    {Collective::kAllToAll, "bruck", [](double n, double k) { return Chain{k, k * n / 2, k}; }},
    {Collective::kAllGather, "ring", [](double n, double) { return Chain{n - 1, n - 1, n - 2}; }},
    {Collective::kAllGather, "recursive_doubling", [](double n, double k) { return Chain{k, n - 1, k - 1}; }},
    {Collective::kReduceScatter, "recursive_halving", [](double n, double k) { return Chain{k, n - 1, k}; }},
    {Collective::kReduceScatter, "ring", [](double n, double) { return Chain{n - 1, n - 1, n - 1}; }},
    {Collective::kAllReduce, "rabenseifner",
     [](double n, double k) { return Chain{2 * k, 2 * (n - 1) / n, 2 * k - 1}; }},
    {Collective::kAllReduce, "recursive_doubling", [](double, double k) { return Chain{k, k, k}; }},
    {Collective::kAllReduce, "ring", [](double n, double) { return Chain{2 * n - 2, 2 * (n - 1) / n, 2 * n - 3}; }},
    {Collective::kAllReduce, "tree", [](double, double k) { return Chain{2 * k, 2 * k, 2 * k - 1}; }},
    {Collective::kBroadcast, "tree", [](double, double k) { return Chain{k, k, k - 1}; }},
    {Collective::kBroadcast, "ring", [](double n, double) { return Chain{n - 1, n - 1, n - 2}; }},
    {Collective::kBarrier, "dissemination", [](double, double k) { return Chain{0, 0, k}; }},
};

}  // namespace jaxcomm
