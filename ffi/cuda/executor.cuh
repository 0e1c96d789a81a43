// Walks a RankProgram: one thread block per channel. The same text runs on the GPU and, emulated, on the CPU.
#pragma once

#include "../include/jaxcomm/device.h"
#include "program.h"

namespace jaxcomm {
namespace cuda {

// One rank's call. Plain data; pointers are to memory of the device.
struct RankArgs {
  device::Comm comm;
  device::Window input;  // of the ranks of the node; own only where the program does not share it
  device::Window output;
  device::Window scratch;
  const ProgramStep* steps = nullptr;
  const Place* sources = nullptr;
  const ChannelProgram* channels = nullptr;
  int32_t item_bytes = 1;
  int32_t ranks_per_node = 1;
};

}  // namespace cuda
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

// Programs without a reduction.
struct NoReduction {};

template <typename Codec_, typename Op_>
struct Reduction {
  using Codec = Codec_;
  using Op = Op_;
};

// How steps that name ranks of other nodes are carried out; this one for groups of one node. Put, Flush: called by all
// threads of a block. Signal, Wait: by one thread per peer.
//  Put     from memory of this rank to byte `offset` of the buffer that `to` is in. What other threads have written
//          there comes before a __syncthreads(). May return before it has read the memory, and arrives before the next
//          signal to the same rank.
//  Flush   all puts of the channel have read their memory. False: gave up.
struct NoNetwork {
  JAXCOMM_DEVICE static void Put(int32_t, const Place&, int64_t, const char*, int64_t) {}
  JAXCOMM_DEVICE static void Signal(int32_t, int32_t) {}
  JAXCOMM_DEVICE static bool Wait(int32_t, int32_t, int32_t) { return false; }
  JAXCOMM_DEVICE static bool Flush(int32_t) { return true; }
};

// The elements of a step in one buffer of one rank.
struct Elements {
  char* base = nullptr;  // of the buffer
  Part part;
  int64_t first = 0;  // number of the step's first element, in the plan; if flat, in memory
  bool flat = false;

  // Where in the buffer the step's element i is.
  JAXCOMM_DEVICE int64_t Position(int64_t i) const {
    if (flat) return first + i;
    const int64_t number = first + i;
    const int64_t element = part.begin + number % part.count;
    return element / part.run * (part.num_blocks * part.run) + number / part.count * part.run + element % part.run;
  }
  // How many of the step's elements from i on lie side by side; at most `most`.
  JAXCOMM_DEVICE int64_t Side(int64_t i, int64_t most) const {
    if (flat) return most;
    const int64_t in_part = (first + i) % part.count;
    const int64_t in_run = (part.begin + in_part) % part.run;
    int64_t side = part.count - in_part;
    if (side > part.run - in_run) side = part.run - in_run;
    return side < most ? side : most;
  }
};

template <typename Network>
class Walk {
 public:
  JAXCOMM_DEVICE Walk(const RankArgs& args, Network& network, int32_t channel)
      : args_(args), network_(network), channel_(channel), program_(args.channels[channel]) {}

  template <typename Reduction>
  JAXCOMM_DEVICE void Run() {
    // Here, not in the first wait: networks have counters of their own.
    if (__syncthreads_or(device::HasGivenUp(args_.comm, channel_)) != 0) return;
    const ProgramStep* steps = args_.steps + program_.first_step;
    for (int32_t i = 0; i < program_.num_steps; ++i) {
      const ProgramStep& step = steps[i];
      if (step.flush && __syncthreads_or(!network_.Flush(channel_)) != 0) return device::GiveUp(args_.comm, channel_);
      switch (step.step.kind) {
        case StepKind::kSignal:
          __syncthreads();  // everything before has been written
          for (int32_t k = Thread(); k < step.together; k += Threads()) SignalPeer(steps[i + k].step.peer);
          i += step.together - 1;
          break;
        case StepKind::kWait: {
          bool ok = true;
          for (int32_t k = Thread(); ok && k < step.together; k += Threads()) {
            ok = WaitForPeer(steps[i + k].step.peer, steps[i + k].origin);
          }
          i += step.together - 1;
          if (__syncthreads_or(!ok) != 0) return device::GiveUp(args_.comm, channel_);
          break;
        }
        default:
          if (step.sync) __syncthreads();
          RunData<Reduction>(step);
      }
    }
    network_.Flush(channel_);  // XLA may reuse the memory once the kernel has ended
  }

 private:
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }
  JAXCOMM_DEVICE int32_t Node(int32_t rank) const { return rank / args_.ranks_per_node; }
  JAXCOMM_DEVICE bool Near(int32_t rank) const { return Node(rank) == Node(args_.comm.world.rank); }
  JAXCOMM_DEVICE int32_t Local(int32_t rank) const { return rank % args_.ranks_per_node; }

  JAXCOMM_DEVICE void SignalPeer(int32_t peer) {
    if (Near(peer)) {
      device::Signal(args_.comm, channel_, Local(peer));
    } else {
      network_.Signal(channel_, peer);
    }
  }

  JAXCOMM_DEVICE bool WaitForPeer(int32_t peer, int32_t origin) {
    return Near(peer) ? device::Wait(args_.comm, channel_, Local(peer), origin) : network_.Wait(channel_, peer, origin);
  }

  JAXCOMM_DEVICE Elements Of(const ProgramStep& step, const Place& place) const {
    Elements elements;
    const bool input = place.space == Space::kInput;
    const device::Window& window = input ? args_.input : place.space == Space::kOutput ? args_.output : args_.scratch;
    elements.base = window.At(Local(place.rank));  // of a rank of another node: not an address
    elements.first = place.offset;
    elements.flat = step.flat || place.space == Space::kScratch;
    if (place.space == Space::kScratch) {
      elements.first += program_.scratch_begin;
      return elements;
    }
    elements.part = input ? program_.input : program_.output;
    if (step.flat) elements.first += elements.part.begin;
    return elements;
  }

  template <typename Reduction>
  JAXCOMM_DEVICE void RunData(const ProgramStep& step) {
    const Elements dst = Of(step, step.step.dst);
    switch (step.step.kind) {
      case StepKind::kCopy:
      case StepKind::kGet:
        return Move(dst, Of(step, step.step.src), step.step.count);
      case StepKind::kPut:
        if (!Near(step.step.dst.rank)) return PutFar(dst, step.step.dst, Of(step, step.step.src), step.step.count);
        return Move(dst, Of(step, step.step.src), step.step.count);
      case StepKind::kZero:
        return Clear(dst, step.step.count);
      default:
        if constexpr (!std::is_same_v<Reduction, NoReduction>) Reduce<Reduction>(step, dst);
    }
  }

  JAXCOMM_DEVICE char* At(const Elements& elements, int64_t i) const {
    return elements.base + elements.Position(i) * args_.item_bytes;
  }

  JAXCOMM_DEVICE void Move(const Elements& dst, const Elements& src, int64_t count) const {
    for (int64_t i = 0; i < count;) {
      const int64_t side = src.Side(i, dst.Side(i, count - i));
      if (side < count - i && side * args_.item_bytes < kShortRunBytes) return MoveShort(dst, src, i, count);
      device::Copy(At(dst, i), At(src, i), side * args_.item_bytes);
      i += side;
    }
  }

  // Runs so short that a thread block has more threads than a run has units: every thread finds its own elements.
  JAXCOMM_DEVICE void MoveShort(const Elements& dst, const Elements& src, int64_t begin, int64_t count) const {
    switch (args_.item_bytes) {
      case 1:
        return MoveItems<uint8_t>(dst, src, begin, count);
      case 2:
        return MoveItems<uint16_t>(dst, src, begin, count);
      case 4:
        return MoveItems<uint32_t>(dst, src, begin, count);
      case 8:
        return MoveItems<uint64_t>(dst, src, begin, count);
      default:
        return MoveItems<device::Bytes16>(dst, src, begin, count);
    }
  }

  template <typename Item>
  JAXCOMM_DEVICE void MoveItems(const Elements& dst, const Elements& src, int64_t begin, int64_t count) const {
    for (int64_t i = begin + Thread(); i < count; i += Threads()) {
      *reinterpret_cast<Item*>(At(dst, i)) = *reinterpret_cast<const Item*>(At(src, i));
    }
  }

  JAXCOMM_DEVICE void Clear(const Elements& dst, int64_t count) const {
    for (int64_t i = 0; i < count;) {
      const int64_t side = dst.Side(i, count - i);
      device::Zero(At(dst, i), side * args_.item_bytes);
      i += side;
    }
  }

  JAXCOMM_DEVICE void PutFar(const Elements& dst, const Place& place, const Elements& src, int64_t count) {
    for (int64_t i = 0; i < count;) {
      const int64_t side = src.Side(i, dst.Side(i, count - i));
      network_.Put(channel_, place, dst.Position(i) * args_.item_bytes, At(src, i), side * args_.item_bytes);
      i += side;
    }
  }

  template <typename Reduction>
  JAXCOMM_DEVICE void Reduce(const ProgramStep& step, const Elements& dst) const {
    using Codec = typename Reduction::Codec;
    using Storage = typename Codec::Storage;
    const Place* sources = args_.sources + program_.first_source + step.step.first_source;
    const int32_t num_sources = step.step.num_sources;
    for (int64_t i = 0; i < step.step.count;) {
      int64_t side = dst.Side(i, step.step.count - i);
      for (int32_t s = 0; s < num_sources && !step.flat; ++s) side = Of(step, sources[s]).Side(i, side);
      const auto source = [&](int s) { return reinterpret_cast<const Storage*>(At(Of(step, sources[s]), i)); };
      device::Reduce<Codec, typename Reduction::Op>(reinterpret_cast<Storage*>(At(dst, i)), num_sources, source, side);
      i += side;
    }
  }

  static constexpr int64_t kShortRunBytes = 2048;

  const RankArgs& args_;
  Network& network_;
  const int32_t channel_;
  const ChannelProgram& program_;
};

}  // namespace cuda
}  // namespace jaxcomm
#endif
