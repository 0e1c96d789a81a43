// Formulas for the times of algorithms on a power of two of ranks with links of one class and free local copies:
// messages and bytes of Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, and the signals between them.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "../../ffi/plan/cost.h"

namespace jaxcomm {

constexpr LinkModel kFree = {0, 1e30, 0};

inline Machine MakeMachine(LinkModel self, LinkModel node, LinkModel network) {
  Machine machine;
  machine.links = {self, node, network};
  return machine;
}

struct Formula {
  Collective collective;
  const char* algorithm;
  // For n ranks and blocks of `bytes` bytes. A step of s bytes takes o + s / beta. A signal takes o and arrives lambda
  // later.
  double (*time_s)(int32_t n, double bytes, const LinkModel& link);
};

inline const std::vector<Formula>& Formulas() {
  // `messages` messages one after the other with `bytes` bytes in total; `signals` of them release the next one.
  static const auto chain = [](double messages, double bytes, double signals, const LinkModel& link) {
    return messages * link.overhead_s + bytes / link.bytes_per_s + signals * (link.overhead_s + link.latency_s);
  };
  static const std::vector<Formula> formulas = {
      {Collective::kAllToAll, "direct",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, 0, link); }},
      {Collective::kAllToAll, "pairwise",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, n - 2, link); }},
      {Collective::kAllToAll, "bruck",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(std::log2(n), std::log2(n) * n / 2 * b, std::log2(n), link);
       }},
      {Collective::kAllGather, "direct",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, 0, link); }},
      {Collective::kAllGather, "ring",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, n - 2, link); }},
      {Collective::kAllGather, "recursive_doubling",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(std::log2(n), (n - 1) * b, std::log2(n) - 1, link);
       }},
      {Collective::kReduceScatter, "direct",  // all operands in one step
       [](int32_t n, double b, const LinkModel& link) { return chain(1, (n - 1) * b, 0, link); }},
      {Collective::kReduceScatter, "recursive_halving",
       [](int32_t n, double b, const LinkModel& link) { return chain(std::log2(n), (n - 1) * b, std::log2(n), link); }},
      {Collective::kReduceScatter, "ring",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, n - 1, link); }},
      {Collective::kAllReduce, "direct",
       [](int32_t n, double b, const LinkModel& link) { return chain(n, 2 * (n - 1) * b / n, 0, link); }},
      {Collective::kAllReduce, "root",
       [](int32_t n, double b, const LinkModel& link) { return chain(n, 2 * (n - 1) * b, 0, link); }},
      {Collective::kAllReduce, "one_shot",
       [](int32_t n, double b, const LinkModel& link) { return chain(1, (n - 1) * b, 0, link); }},
      {Collective::kAllReduce, "rabenseifner",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(2 * std::log2(n), 2 * (n - 1) * b / n, 2 * std::log2(n) - 1, link);
       }},
      {Collective::kAllReduce, "recursive_doubling",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(std::log2(n), std::log2(n) * b, std::log2(n), link);
       }},
      {Collective::kAllReduce, "ring",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(2 * (n - 1), 2 * (n - 1) * b / n, 2 * (n - 1) - 1, link);
       }},
      {Collective::kAllReduce, "tree",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(2 * std::log2(n), 2 * std::log2(n) * b, 2 * std::log2(n) - 1, link);
       }},
      {Collective::kPermute, "direct", [](int32_t, double b, const LinkModel& link) { return chain(1, b, 0, link); }},
      {Collective::kBroadcast, "direct",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, 0, link); }},
      {Collective::kBroadcast, "scatter_all_gather",
       [](int32_t n, double b, const LinkModel& link) { return chain(n, b, 0, link); }},
      {Collective::kBroadcast, "tree",
       [](int32_t n, double b, const LinkModel& link) {
         return chain(std::log2(n), std::log2(n) * b, std::log2(n) - 1, link);
       }},
      {Collective::kBroadcast, "ring",
       [](int32_t n, double b, const LinkModel& link) { return chain(n - 1, (n - 1) * b, n - 2, link); }},
      {Collective::kBarrier, "direct",
       [](int32_t n, double, const LinkModel& link) { return (n - 1) * link.overhead_s + link.latency_s; }},
      {Collective::kBarrier, "dissemination",
       [](int32_t n, double, const LinkModel& link) { return chain(0, 0, std::log2(n), link); }},
  };
  return formulas;
}

}  // namespace jaxcomm
