// dst = sources[0] op sources[1] op ..., from left to right, by all threads of a block. Sources may be in the memory of
// peers of the node. The order of the sources is the order of reduction, so all ranks that pass the same order get the
// same bits. These functions neither wait nor order memory accesses; see copy.h.
#pragma once

#include "arithmetic.h"
#include "copy.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// kLanes elements that are loaded and stored at once.
template <typename Codec, int kLanes>
struct alignas(sizeof(typename Codec::Storage) * kLanes) Unit {
  typename Codec::Storage lanes[kLanes];
};

template <typename Codec, int kLanes>
struct Accumulator {
  Codec codec;
  typename Codec::Acc lanes[kLanes];

  JAXCOMM_DEVICE void Set(const Unit<Codec, kLanes>& unit) {
    JAXCOMM_UNROLL
    for (int i = 0; i < kLanes; ++i) lanes[i] = codec.Decode(unit.lanes[i]);
  }
  template <typename Op>
  JAXCOMM_DEVICE void Add(const Unit<Codec, kLanes>& unit) {
    JAXCOMM_UNROLL
    for (int i = 0; i < kLanes; ++i)
      lanes[i] = Op::Apply(lanes[i], static_cast<typename Codec::Acc>(codec.Decode(unit.lanes[i])));
  }
  JAXCOMM_DEVICE Unit<Codec, kLanes> Get() const {
    Unit<Codec, kLanes> unit;
    JAXCOMM_UNROLL
    for (int i = 0; i < kLanes; ++i) unit.lanes[i] = codec.Encode(lanes[i]);
    return unit;
  }
};

// Reduces the elements begin .. begin + count of source(0) .. source(num_sources - 1) into dst, kLanes elements at a
// time. All buffers must have the alignment of kLanes elements. Each thread has kTile outstanding loads.
template <typename Codec, typename Op, int kLanes, int kTile, typename Source>
JAXCOMM_DEVICE void ReduceUnits(typename Codec::Storage* dst, int num_sources, Source source, int64_t begin,
                                int64_t count, Codec codec) {
  using Units = Unit<Codec, kLanes>;
  const auto num_threads = static_cast<int64_t>(blockDim.x);
  const int64_t num_units = count / kLanes;
  auto* to = reinterpret_cast<Units*>(dst + begin);
  auto first = static_cast<int64_t>(threadIdx.x);
  for (; first + (kTile - 1) * num_threads < num_units; first += kTile * num_threads) {
    Accumulator<Codec, kLanes> sums[kTile];
    const auto* own = reinterpret_cast<const Units*>(source(0) + begin) + first;
    JAXCOMM_UNROLL
    for (int k = 0; k < kTile; ++k) {
      sums[k].codec = codec;
      sums[k].Set(own[k * num_threads]);
    }
    for (int s = 1; s < num_sources; ++s) {
      const auto* from = reinterpret_cast<const Units*>(source(s) + begin) + first;
      Units units[kTile];
      JAXCOMM_UNROLL
      for (int k = 0; k < kTile; ++k) units[k] = from[k * num_threads];
      JAXCOMM_UNROLL
      for (int k = 0; k < kTile; ++k) sums[k].template Add<Op>(units[k]);
    }
    JAXCOMM_UNROLL
    for (int k = 0; k < kTile; ++k) to[first + k * num_threads] = sums[k].Get();
  }
  for (; first < num_units; first += num_threads) {
    Accumulator<Codec, kLanes> sum = {codec, {}};
    sum.Set(reinterpret_cast<const Units*>(source(0) + begin)[first]);
    for (int s = 1; s < num_sources; ++s) {
      sum.template Add<Op>(reinterpret_cast<const Units*>(source(s) + begin)[first]);
    }
    to[first] = sum.Get();
  }
}

// `source` returns the address of an operand's first element. Codec: arithmetic::Plain<T>, arithmetic::Widened<Format>,
// or a class of the caller, whose object may choose the conversion at run time. Op: arithmetic::Sum, Max or Min. dst
// may be one of the sources; otherwise dst and the sources must not overlap.
template <typename Codec, typename Op, typename Source>
JAXCOMM_DEVICE void Reduce(typename Codec::Storage* dst, int num_sources, Source source, int64_t count,
                           Codec codec = {}) {
  using Storage = typename Codec::Storage;
  constexpr int kMostLanes = 8;  // limited by the registers of the accumulators
  constexpr int kLanes = sizeof(Storage) >= 16  ? 1
                         : sizeof(Storage) == 1 ? kMostLanes
                                                : static_cast<int>(16 / sizeof(Storage));
  constexpr int kTile = kLanes == kMostLanes ? 2 : 4;
  const auto position = [](const void* at) { return reinterpret_cast<uintptr_t>(at) & 15; };
  bool aligned = sizeof(Storage) < 16;
  for (int s = 0; s < num_sources; ++s) aligned = aligned && position(source(s)) == position(dst);
  const auto to_boundary = static_cast<int64_t>((-position(dst) & 15) / sizeof(Storage));
  const int64_t head = aligned && to_boundary < count ? to_boundary : count;
  const int64_t body = (count - head) / kLanes * kLanes;
  ReduceUnits<Codec, Op, kLanes, kTile>(dst, num_sources, source, head, body, codec);
  // The elements before and after the body, or all elements if alignments differ.
  for (int64_t begin = 0, end = head; begin < count; begin = head + body, end = count) {
    ReduceUnits<Codec, Op, 1, 4>(dst, num_sources, source, begin, end - begin, codec);
    if (end == count) break;
  }
}

}  // namespace device
}  // namespace jaxcomm
#endif
