// Collectives through the switch, which sums loads over all ranks and broadcasts stores to all ranks:
// Protocol::kMultimem on GPUs. Operands are copied into the arena, in units of 16 bytes. One rank sums each unit, so
// all ranks get the same bits.
//
// A channel copies in, exchanges and copies out the same units of every block, so it is independent of the other
// channels of the call. Peers access a rank's arena only between the entry barrier and the exit barrier. A rank may
// therefore write to its arena before the entry barrier: its previous kernel has ended, and passed the exit barrier
// only when all peers had finished with the arena.
#pragma once

#include "common/dtype.h"
#include "cuda/kernels/executor.cuh"
#include "cuda/program/kernel_args.h"
#include "include/jaxcomm/device.h"
#include "include/jaxcomm/multimem.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// A thread block's part of a call.
class MultimemCall {
 public:
  JAXCOMM_DEVICE MultimemCall(const MultimemArgs& args, int32_t channel, void* = nullptr)
      : args_(args),
        comm_(args.comm),
        channel_(channel),
        units_(Share({0, MultimemUnits(args)}, args.num_channels, channel)),
        own_block_(args.reduces && args.to_all ? 0 : comm_.local.rank) {}

  JAXCOMM_DEVICE void Run() {
    device::BeginCall(comm_);
    if (device::IsAborted(comm_)) return;
    for (int64_t block = 0; block < args_.input.num_blocks; ++block) {
      const int64_t place = args_.input.num_blocks > 1 ? block : own_block_;
      Move(InArena(place), InBuffer(const_cast<char*>(args_.x), args_.input, block));
    }
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return;
    Exchange();
    if (!device::Barrier(comm_, channel_, kExitBarrier)) return;
    for (int64_t block = 0; block < args_.output.num_blocks; ++block) {
      const int64_t place = args_.output.num_blocks > 1 ? block : own_block_;
      Move(InBuffer(args_.y, args_.output, block), InArena(place));
    }
    device::EndCall(comm_);
  }

 private:
  struct Units {
    int64_t begin;
    int64_t end;
  };

  // Part `i` of `n` parts, in whole lines of 128 bytes. Some parts may be empty.
  JAXCOMM_DEVICE static Units Share(Units all, int64_t n, int64_t i) {
    constexpr int64_t kLine = 8;
    const int64_t each = (all.end - all.begin + n * kLine - 1) / (n * kLine) * kLine;
    const auto limit = [&](int64_t at) { return at < all.end ? at : all.end; };
    return {limit(all.begin + i * each), limit(all.begin + (i + 1) * each)};
  }

  JAXCOMM_DEVICE int64_t BlockBytes() const { return MultimemUnits(args_) * kMultimemUnitBytes; }

  // The channel's elements of a block.
  JAXCOMM_DEVICE int64_t Begin() const { return units_.begin * kMultimemUnitBytes / args_.item_bytes; }
  JAXCOMM_DEVICE int64_t Count() const {
    const int64_t end = units_.end * kMultimemUnitBytes / args_.item_bytes;
    return (end < args_.input.count ? end : args_.input.count) - Begin();
  }
  JAXCOMM_DEVICE Elements InBuffer(char* base, const ChannelSlice& whole, int64_t block) const {
    Elements elements;
    elements.base = base;
    elements.flat = whole.contiguous_count == whole.count;
    elements.slice = {Count(), Begin(), whole.num_blocks, whole.contiguous_count};
    elements.first = elements.flat ? block * whole.count + Begin() : block * Count();
    return elements;
  }
  JAXCOMM_DEVICE Elements InArena(int64_t block) const {
    Elements elements;
    elements.base = comm_.arena.At(comm_.local.rank, block * BlockBytes());
    elements.flat = true;
    elements.first = Begin();
    return elements;
  }
  JAXCOMM_DEVICE void Move(const Elements& dst, const Elements& src) const {
    MoveElements(dst, src, Count(), args_.item_bytes, PlainCopies());
  }

  // Precondition: all ranks have copied their operands into the arena.
  JAXCOMM_DEVICE void Exchange() const {
    const int64_t block = own_block_ * BlockBytes();
    auto* const own = comm_.arena.At<device::Bytes16>(comm_.local.rank, block);
    auto* const all = comm_.arena_multicast.At<device::Bytes16>(block);
    if (!args_.reduces) return PassUnits<FromOwn, true>(own, all, units_);
    if (!args_.to_all) return Sum<false>(own, all, units_);
    Sum<true>(own, all, Share(units_, comm_.local.size, comm_.local.rank));
  }

  template <bool kToAll>
  JAXCOMM_DEVICE void Sum(device::Bytes16* own, device::Bytes16* all, Units units) const {
    switch (args_.dtype) {
      using namespace arithmetic;
      case DType::kBF16:
        return PassUnits<SumOf<Widened<BFloat16>>, kToAll>(own, all, units);
      case DType::kF16:
        return PassUnits<SumOf<Widened<Float16>>, kToAll>(own, all, units);
      default:
        return PassUnits<SumOf<Plain<float>>, kToAll>(own, all, units);
    }
  }

  struct FromOwn {
    JAXCOMM_DEVICE static device::Bytes16 Load(const device::Bytes16* own, const device::Bytes16*) { return *own; }
  };
  template <typename Codec>
  struct SumOf {
    JAXCOMM_DEVICE static device::Bytes16 Load(const device::Bytes16*, const device::Bytes16* all) {
      return device::MulticastSum<Codec>(all);
    }
  };

  // Stores the units of the source on all ranks, or on this rank. One thread loads a unit before it overwrites it. No
  // other thread accesses the unit.
  template <typename Source, bool kToAll>
  JAXCOMM_DEVICE_CALLED static void PassUnits(device::Bytes16* own, device::Bytes16* all, Units units) {
    const auto store = [&](int64_t unit, const device::Bytes16& value) {
      if constexpr (kToAll) {
        device::MulticastStore(all + unit, value);
      } else {
        own[unit] = value;
      }
    };
    device::Pass(
        units.end - units.begin, device::OfBlock(),
        [&](int64_t i) { return Source::Load(own + units.begin + i, all + units.begin + i); },
        [&](int64_t i, const device::Bytes16& value) { store(units.begin + i, value); });
  }

  const MultimemArgs& args_;
  const device::Comm& comm_;
  const int32_t channel_;
  const Units units_;        // of the channel, in every block
  const int64_t own_block_;  // index in the arena of the block that this rank sends or receives
};

}  // namespace jaxcomm::cuda
#endif
