// Collectives of small blocks in one or two exchanges of LL messages: Protocol::kLl and kLlTwoShot on GPUs. Every rank
// sends each peer the data that this peer would read in the plan. The receiver stores the data, or reduces it in rank
// order as the plan does. There are no entry and exit barriers, because ranks access nothing but the slots in each
// other's memory.
#pragma once

#include "common/dtype.h"
#include "cuda/kernels/executor.cuh"
#include "cuda/kernels/reductions.h"
#include "cuda/program/kernel_args.h"
#include "include/jaxcomm/device.h"
#include "include/jaxcomm/ll.h"
#include "plan/channels.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// Outstanding loads of slots per thread.
constexpr int kLlLoads = 8;

// One block of a buffer as a row of units. The last unit may be padded with zeros.
struct UnitsOfBlock {
  char* base;
  LlBlocks blocks;
  int32_t block;
  int32_t block_count;
  int32_t item_bytes;

  JAXCOMM_DEVICE uint64_t Load(int32_t unit) const {
    if (const char* whole = Whole(unit)) return *reinterpret_cast<const uint64_t*>(whole);
    uint64_t payload = 0;
    for (int32_t lane = 0, element = First(unit); lane < Lanes() && element < block_count; ++lane, ++element) {
      payload |= LoadItem(At(element)) << (8 * item_bytes * lane);
    }
    return payload;
  }

  JAXCOMM_DEVICE void Store(int32_t unit, uint64_t payload) const {
    if (char* whole = Whole(unit)) {
      *reinterpret_cast<uint64_t*>(whole) = payload;
      return;
    }
    for (int32_t lane = 0, element = First(unit); lane < Lanes() && element < block_count; ++lane, ++element) {
      StoreItem(At(element), payload >> (8 * item_bytes * lane));
    }
  }

 private:
  JAXCOMM_DEVICE int32_t Lanes() const { return kLlUnitBytes / item_bytes; }
  JAXCOMM_DEVICE int32_t First(int32_t unit) const { return unit * Lanes(); }
  JAXCOMM_DEVICE char* At(int32_t element) const { return base + blocks.Position(block, element) * item_bytes; }

  // The address of the unit if its 8 bytes are contiguous and aligned; otherwise null.
  JAXCOMM_DEVICE char* Whole(int32_t unit) const {
    const int32_t first = First(unit), last = first + Lanes() - 1;
    if (last >= block_count || (blocks.num > 1 && first / blocks.contiguous_count != last / blocks.contiguous_count))
      return nullptr;
    char* at = At(first);
    return reinterpret_cast<uintptr_t>(at) % kLlUnitBytes == 0 ? at : nullptr;
  }

  JAXCOMM_DEVICE uint64_t LoadItem(const char* at) const {
    return WithItem(item_bytes, [&](auto item) -> uint64_t { return *reinterpret_cast<const decltype(item)*>(at); });
  }
  JAXCOMM_DEVICE void StoreItem(char* at, uint64_t value) const {
    WithItem(item_bytes, [&](auto item) {
      using Item = decltype(item);
      *reinterpret_cast<Item*>(at) = static_cast<Item>(value);
    });
  }
};

// A thread block's part of a call: some units of every block. For units beyond the end of a block, zeros are sent and
// nothing is stored.
class LlCall {
 public:
  JAXCOMM_DEVICE LlCall(const LlArgs& args, int32_t channel, void* = nullptr)
      : args_(args), comm_(args.comm), channel_(channel) {
    const int32_t parts = args.num_channels * (args.two_shot ? comm_.local.size : 1);
    const int32_t part_count = kLlUnitBytes / args.item_bytes * parts;
    num_units_ = (args.block_count + part_count - 1) / part_count;
  }

  JAXCOMM_DEVICE void Run() {
    device::BeginCall(comm_);
    Exchange();
    device::EndCall(comm_);
  }

 private:
  JAXCOMM_DEVICE void Exchange() {
    if (!device::BeginLlExchange(comm_, channel_, &exchange_)) return;
    Send([&](int32_t peer) { return LlSlice{Input(peer), Begin(peer)}; });
    bool received = args_.reduces ? Reduce() : Store();
    received = device::EndLlExchange(comm_, exchange_, received);
    if (!args_.two_shot || !received || !device::BeginLlExchange(comm_, channel_, &exchange_)) return;
    Send([&](int32_t) { return LlSlice{Output(0), Begin(rank())}; });
    device::EndLlExchange(comm_, exchange_, Store());
  }

  JAXCOMM_DEVICE int32_t n() const { return comm_.local.size; }
  JAXCOMM_DEVICE int32_t rank() const { return comm_.local.rank; }
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }
  // The s-th peer. Each rank begins with a different one.
  JAXCOMM_DEVICE int32_t Peer(int32_t s) const { return (rank() + 1 + s) % n(); }

  // The first of the channel's units among those that `owner` handles: in a block or, with two shots, in its share of
  // the single block.
  JAXCOMM_DEVICE int32_t Begin(int32_t owner) const {
    return ((args_.two_shot ? owner * args_.num_channels : 0) + channel_) * num_units_;
  }

  // The block of this rank's input that goes to `rank`.
  JAXCOMM_DEVICE UnitsOfBlock Input(int32_t rank) const {
    return {const_cast<char*>(args_.x), args_.input, args_.input.num > 1 ? rank : 0, args_.block_count,
            args_.item_bytes};
  }
  // The output block that receives the block of `rank`.
  JAXCOMM_DEVICE UnitsOfBlock Output(int32_t rank) const {
    return {args_.y, args_.output, args_.output.num > 1 ? rank : 0, args_.block_count, args_.item_bytes};
  }

  struct LlSlice {
    UnitsOfBlock units;
    int32_t begin;
  };
  template <typename Source>
  JAXCOMM_DEVICE void Send(Source source) {
    for (int32_t i = Thread(); i < num_units_ * (n() - 1); i += Threads()) {
      const int32_t peer = Peer(i / num_units_), unit = i % num_units_;
      const LlSlice slice = source(peer);
      device::SendUnit(comm_, exchange_, peer, unit, slice.units.Load(slice.begin + unit));
    }
  }

  // Every thread waits for some units and stores them.
  JAXCOMM_DEVICE bool Store() {
    for (int32_t unit = Thread(); unit < num_units_ && !args_.two_shot; unit += Threads()) {
      Output(rank()).Store(Begin(rank()) + unit, Input(rank()).Load(Begin(rank()) + unit));
    }
    const int32_t all = num_units_ * (n() - 1);
    for (int32_t first = Thread(); first < all; first += kLlLoads * Threads()) {
      const int32_t left = (all - first + Threads() - 1) / Threads();
      const int count = left < kLlLoads ? left : kLlLoads;
      const auto units = [&](int k) {
        const int32_t i = first + k * Threads();
        return device::LlUnit{Peer(i / num_units_), i % num_units_};
      };
      uint64_t payloads[kLlLoads];
      if (!device::ReceiveUnits<kLlLoads>(comm_, exchange_, count, units, payloads, kLlExchange)) return false;
      JAXCOMM_UNROLL
      for (int k = 0; k < kLlLoads; ++k) {
        if (k >= count) continue;
        const device::LlUnit from = units(k);
        Output(from.peer).Store(Begin(from.peer) + from.unit, payloads[k]);
      }
    }
    return true;
  }

  JAXCOMM_DEVICE bool Reduce() {
    bool received = true;
    VisitReduction(args_.operation, [&](auto codec, auto op) {
      // MakeLlArgs splits larger elements in two.
      if constexpr (sizeof(typename decltype(codec)::Storage) <= kLlUnitBytes) {
        received = ReduceUnits<decltype(codec), decltype(op)>(codec);
      }
    });
    return received;
  }

  // Every thread waits for some units of all peers and reduces them in rank order.
  template <typename Codec, typename Op>
  JAXCOMM_DEVICE_CALLED bool ReduceUnits(Codec codec) {
    constexpr int kLanes = kLlUnitBytes / static_cast<int>(sizeof(typename Codec::Storage));
    using Lanes = device::Unit<Codec, kLanes>;
    for (int32_t unit = Thread(); unit < num_units_; unit += Threads()) {
      const uint64_t own = Input(rank()).Load(Begin(rank()) + unit);
      device::Accumulator<Codec, kLanes> sum = {codec, {}};
      for (int32_t first = 0; first < n(); first += kLlLoads) {
        const int count = n() - first < kLlLoads ? n() - first : kLlLoads;
        // A rank receives nothing from itself. In place of its own unit, it polls a neighbour's unit a second time.
        const int32_t stand_in = first > 0 ? first - 1 : rank() == 0 ? 1 : 0;
        uint64_t payloads[kLlLoads];
        const auto units = [&](int k) { return device::LlUnit{first + k == rank() ? stand_in : first + k, unit}; };
        if (n() > 1 && !device::ReceiveUnits<kLlLoads>(comm_, exchange_, count, units, payloads, kLlExchange)) {
          return false;
        }
        JAXCOMM_UNROLL
        for (int k = 0; k < kLlLoads; ++k) {
          if (k >= count) continue;
          const uint64_t payload = first + k == rank() ? own : payloads[k];
          Lanes lanes;
          std::memcpy(&lanes, &payload, sizeof(lanes));
          if (first + k == 0) {
            sum.Set(lanes);
          } else {
            sum.template Add<Op>(lanes);
          }
        }
      }
      const Lanes lanes = sum.Get();
      uint64_t payload;
      std::memcpy(&payload, &lanes, sizeof(payload));
      Output(0).Store(Begin(rank()) + unit, payload);
    }
    return true;
  }

  const LlArgs& args_;
  const device::Comm& comm_;
  const int32_t channel_;
  int32_t num_units_ = 0;  // units that a rank sends to each peer in an exchange
  device::LlExchange exchange_;
};

}  // namespace jaxcomm::cuda
#endif
