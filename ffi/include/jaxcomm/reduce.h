// dst = sources[0] op sources[1] op ..., from left to right, by all threads of a block. Sources may be in the memory of
// peers of the node. The order of the sources is the order of reduction, so all ranks that pass the same order get the
// same bits. These functions neither wait nor order memory accesses; see copy.h.
#pragma once

#include <cstring>
#include <type_traits>

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

// A unit as it is loaded. Units that are still in flight must not be split into lanes, which would take a register
// each.
template <size_t kBytes>
using Raw = std::conditional_t<
    kBytes == 16, Bytes16,
    std::conditional_t<kBytes == 8, uint64_t,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

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
    if constexpr (arithmetic::kConvertsPairs<Codec> && kLanes % 2 == 0) {
      uint32_t pairs[kLanes / 2];
      JAXCOMM_UNROLL
      for (int i = 0; i < kLanes / 2; ++i) pairs[i] = Codec::Bits::EncodePair(lanes[2 * i], lanes[2 * i + 1]);
      std::memcpy(&unit, pairs, sizeof(unit));
    } else {
      JAXCOMM_UNROLL
      for (int i = 0; i < kLanes; ++i) unit.lanes[i] = codec.Encode(lanes[i]);
    }
    return unit;
  }
};

// Reduces the elements begin .. begin + count of source(0) .. source(num_sources - 1) into dst, kLanes elements at a
// time. All buffers must have the alignment of kLanes elements. A thread loads kTile units of a group of up to kSources
// sources before it adds the first, then the next group. The order of the sums is that of the sources, whatever the
// groups. All ranks begin with source 0, but a thread needs only a few cycles to address a whole group.
template <typename Codec, typename Op, int kLanes, int kSources, int kTile, typename Source>
JAXCOMM_DEVICE void ReduceUnits(typename Codec::Storage* dst, int num_sources, Source source, int64_t begin,
                                int64_t count, Codec codec) {
  using Units = Unit<Codec, kLanes>;
  using Loaded = Raw<sizeof(Units)>;
  const auto num_threads = static_cast<int64_t>(blockDim.x);
  const int64_t num_units = count / kLanes;
  auto* to = reinterpret_cast<Units*>(dst + begin);
  const int num_groups = (num_sources + kSources - 1) / kSources;
  const int group = (num_sources + num_groups - 1) / num_groups;
  const Loaded* from[kSources] = {};
  const auto locate = [&](int s, int size) {
    JAXCOMM_UNROLL
    for (int k = 0; k < kSources; ++k) {
      if (k < size) from[k] = reinterpret_cast<const Loaded*>(source(s + k) + begin);
    }
  };
  locate(0, group);
  for (auto first = static_cast<int64_t>(threadIdx.x); first < num_units; first += kTile * num_threads) {
    Accumulator<Codec, kLanes> sums[kTile] = {};
    JAXCOMM_UNROLL
    for (int t = 0; t < kTile; ++t) sums[t].codec = codec;
    for (int s = 0; s < num_sources; s += group) {
      const int size = num_sources - s < group ? num_sources - s : group;
      if (num_groups > 1) locate(s, size);
      // Initialized, because ptxas keeps registers for undefined values across all functions of the kernel.
      Loaded units[kSources][kTile] = {};
      JAXCOMM_UNROLL
      for (int k = 0; k < kSources; ++k) {
        JAXCOMM_UNROLL
        for (int t = 0; t < kTile; ++t) {
          if (k < size && first + t * num_threads < num_units) units[k][t] = from[k][first + t * num_threads];
        }
      }
      JAXCOMM_UNROLL
      for (int k = 0; k < kSources; ++k) {
        if (k >= size) continue;
        JAXCOMM_UNROLL
        for (int t = 0; t < kTile; ++t) {
          Units unit;
          std::memcpy(&unit, &units[k][t], sizeof(unit));
          if (s + k == 0) {
            sums[t].Set(unit);
          } else {
            sums[t].template Add<Op>(unit);
          }
        }
      }
    }
    JAXCOMM_UNROLL
    for (int t = 0; t < kTile; ++t) {
      if (first + t * num_threads < num_units) to[first + t * num_threads] = sums[t].Get();
    }
  }
}

// `source` returns the address of an operand's first element. Codec: arithmetic::Plain<T>, arithmetic::Widened<Format>,
// or a class of the caller, whose object may choose the conversion at run time. Op: arithmetic::Sum, Max or Min. dst
// may be one of the sources; otherwise dst and the sources must not overlap.
template <typename Codec, typename Op, typename Source>
JAXCOMM_DEVICE void Reduce(typename Codec::Storage* dst, int num_sources, Source source, int64_t count,
                           Codec codec = {}) {
  using Storage = typename Codec::Storage;
  // Bytes take 8 lanes instead of 16, because each lane's accumulator takes a register.
  constexpr int kLanes = sizeof(Storage) >= 16 ? 1 : sizeof(Storage) == 1 ? 8 : static_cast<int>(16 / sizeof(Storage));
  const auto position = [](const void* at) { return reinterpret_cast<uintptr_t>(at) & 15; };
  bool aligned = sizeof(Storage) < 16;
  for (int s = 0; s < num_sources; ++s) aligned = aligned && position(source(s)) == position(dst);
  const auto to_boundary = static_cast<int64_t>((-position(dst) & 15) / sizeof(Storage));
  const int64_t head = aligned && to_boundary < count ? to_boundary : count;
  const int64_t body = (count - head) / kLanes * kLanes;
  if (num_sources <= 4 || sizeof(Storage) == 1) {  // one variant for bytes: fewer instances to compile
    ReduceUnits<Codec, Op, kLanes, 4, kUnroll / 4>(dst, num_sources, source, head, body, codec);
  } else if constexpr (sizeof(Storage) > 1) {
    ReduceUnits<Codec, Op, kLanes, 8, kUnroll / 8>(dst, num_sources, source, head, body, codec);
  }
  constexpr int kSingles = sizeof(Storage) > 8 ? 2 : 4;
  // The elements before and after the body, or all elements if alignments differ.
  for (int64_t begin = 0, end = head; begin < count; begin = head + body, end = count) {
    ReduceUnits<Codec, Op, 1, 4, kSingles>(dst, num_sources, source, begin, end - begin, codec);
    if (end == count) break;
  }
}

}  // namespace device
}  // namespace jaxcomm
#endif
