// Executes a RankProgram with one thread block per channel. The same source runs on the GPU and, emulated, on the CPU.
#pragma once

#include "cuda/kernels/bulk_copy.cuh"
#include "cuda/kernels/reductions.h"
#include "cuda/program/kernel_args.h"
#include "cuda/program/program.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// The interface for steps that name ranks of other nodes. This implementation is for groups of one node. Put and Flush
// are called by all threads of a block, Signal and Wait by one thread per peer.
// - Put copies memory of this rank into the buffer of `to`. `number` is the number of the put in its step. A
//   __syncthreads() separates the put from earlier writes of other threads to the source. Put may return before the
//   source has been read. The data arrives before the next signal to the same rank, which follows a __syncthreads().
// - Flush waits until the sources of all puts of the channel have been read. It returns false if the channel has
//   aborted.
// - kSharesQueues: whether kernels of users put on the same queues.
struct NoNetwork {
  static constexpr bool kSharesQueues = false;
  JAXCOMM_DEVICE static void Put(int32_t, int32_t, const Place&, int64_t, const Place&, int64_t, int64_t) {}
  JAXCOMM_DEVICE static void Signal(int32_t, int32_t) {}
  JAXCOMM_DEVICE static bool Wait(int32_t, int32_t, int32_t) { return false; }
  JAXCOMM_DEVICE static bool Flush(int32_t) { return true; }
};

// The elements of a step in one buffer of one rank.
struct Elements {
  char* base = nullptr;  // of the buffer
  ChannelSlice slice;
  int64_t first = 0;  // the step's first element: its number in the plan, or its position in memory if flat
  bool flat = false;

  // Position of the step's element i in the buffer.
  JAXCOMM_DEVICE int64_t Position(int64_t i) const { return flat ? first + i : FindPosition(i); }
  // Number of contiguous elements of the step from i on; at most `most`.
  JAXCOMM_DEVICE int64_t Contiguous(int64_t i, int64_t most) const { return flat ? most : FindContiguous(i, most); }

  // Whether every `unit` elements, counted from the step's first, are contiguous and aligned, so that one access can
  // move them.
  JAXCOMM_DEVICE bool InUnits(int64_t unit, int64_t item_bytes) const {
    const int64_t bounds = flat ? first : first | slice.count | slice.begin | slice.contiguous_count;
    return bounds % unit == 0 && reinterpret_cast<uintptr_t>(base) % (unit * item_bytes) == 0;
  }
  // The same elements, counted in such units.
  JAXCOMM_DEVICE Elements OfUnits(int64_t unit) const {
    Elements units = *this;
    units.first /= unit;
    units.slice.count /= unit;
    units.slice.begin /= unit;
    units.slice.contiguous_count /= unit;
    return units;
  }

 private:
  JAXCOMM_DEVICE_CALLED int64_t FindPosition(int64_t i) const {
    const int64_t number = first + i;
    const int64_t element = slice.begin + number % slice.count;
    return element / slice.contiguous_count * (slice.num_blocks * slice.contiguous_count) +
           number / slice.count * slice.contiguous_count + element % slice.contiguous_count;
  }
  JAXCOMM_DEVICE_CALLED int64_t FindContiguous(int64_t i, int64_t most) const {
    const int64_t in_part = (first + i) % slice.count;
    const int64_t in_fragment = (slice.begin + in_part) % slice.contiguous_count;
    int64_t contiguous = slice.count - in_part;
    if (contiguous > slice.contiguous_count - in_fragment) contiguous = slice.contiguous_count - in_fragment;
    return contiguous < most ? contiguous : most;
  }
};

// The elements of `place` in `step`.
JAXCOMM_DEVICE Elements ElementsOf(const RankArgs& args, const ChannelProgram& program, const ProgramStep& step,
                                   const Place& place) {
  Elements elements;
  const bool input = place.space == Space::kInput;
  const device::Window& window = input ? args.input : place.space == Space::kOutput ? args.output : args.scratch;
  const int32_t local_rank = place.rank % args.ranks_per_node;
  elements.base = window.At(local_rank);  // not an address for a rank of another node
  elements.first = place.offset;
  elements.flat = step.flat || place.space == Space::kScratch;
  if (place.space == Space::kScratch) {
    elements.first += program.scratch_begin;
    return elements;
  }
  if (const int64_t* const at = input ? args.input_at : args.output_at) elements.base += at[local_rank];
  elements.slice = input ? program.input : program.output;
  if (step.flat) elements.first += elements.slice.begin;
  return elements;
}

// The operands of a reduce step.
struct Operands {
  const RankArgs& args;
  const ChannelProgram& program;
  const ProgramStep& step;
  const Place* places;

  // Address of element i of operand s.
  JAXCOMM_DEVICE_CALLED const char* At(int s, int64_t i) const {
    const Elements elements = ElementsOf(args, program, step, places[s]);
    return elements.base + elements.Position(i) * args.item_bytes;
  }
};

// With fewer contiguous bytes than this, too few threads of a block would be busy. Each thread then locates its own
// elements.
constexpr int64_t kShortFragmentBytes = 2048;

// Reduces elements i .. i + count, which are contiguous in all buffers unless `scattered`.
template <typename Codec, typename Op>
JAXCOMM_DEVICE_CALLED void ReduceRange(const Elements& dst, const Operands& operands, int64_t i, int64_t count,
                                       bool scattered, Codec codec) {
  using Storage = typename Codec::Storage;
  using Item = device::Unit<Codec, 1>;
  const int num_sources = operands.step.step.num_sources;
  auto* const to = reinterpret_cast<Storage*>(dst.base);
  if (!scattered) {
    device::Reduce<Codec, Op>(
        to + dst.Position(i), num_sources, [&](int s) { return reinterpret_cast<const Storage*>(operands.At(s, i)); },
        count, codec);
    return;
  }
  for (int64_t e = i + threadIdx.x; e < i + count; e += blockDim.x) {
    device::Accumulator<Codec, 1> sum = {codec, {}};
    sum.Set(*reinterpret_cast<const Item*>(operands.At(0, e)));
    for (int s = 1; s < num_sources; ++s) sum.template Add<Op>(*reinterpret_cast<const Item*>(operands.At(s, e)));
    reinterpret_cast<Item*>(to)[dst.Position(e)] = sum.Get();
  }
}

JAXCOMM_DEVICE void ReduceElements(const Elements& dst, const Operands& operands) {
  const Step& step = operands.step.step;
  for (int64_t i = 0; i < step.count;) {
    int64_t contiguous = dst.Contiguous(i, step.count - i);
    for (int32_t s = 0; s < step.num_sources && !operands.step.flat; ++s) {
      contiguous =
          ElementsOf(operands.args, operands.program, operands.step, operands.places[s]).Contiguous(i, contiguous);
    }
    const bool scattered = contiguous < step.count - i && contiguous * operands.args.item_bytes < kShortFragmentBytes;
    if (scattered) contiguous = step.count - i;
    VisitReduction(operands.args.operation, [&](auto codec, auto op) {
      ReduceRange<decltype(codec), decltype(op)>(dst, operands, i, contiguous, scattered, codec);
    });
    i += contiguous;
  }
}

template <typename Item>
JAXCOMM_DEVICE_CALLED void MoveItems(const Elements& dst, const Elements& src, int64_t begin, int64_t count) {
  for (int64_t i = begin + threadIdx.x; i < count; i += blockDim.x) {
    reinterpret_cast<Item*>(dst.base)[dst.Position(i)] = reinterpret_cast<const Item*>(src.base)[src.Position(i)];
  }
}

// Moves elements begin .. count in units of 16 bytes, or of as many bytes as fragments and addresses allow. A thread
// needs more time to locate an item than to move it.
JAXCOMM_DEVICE_CALLED void MoveShortFragments(const Elements& dst, const Elements& src, int64_t begin, int64_t count,
                                              int64_t item_bytes) {
  int64_t unit = 16 / item_bytes;
  while (unit > 1 &&
         ((begin | count) % unit != 0 || !dst.InUnits(unit, item_bytes) || !src.InUnits(unit, item_bytes))) {
    unit /= 2;
  }
  const Elements to = dst.OfUnits(unit), from = src.OfUnits(unit);
  begin /= unit;
  count /= unit;
  if (item_bytes * unit == 16) return MoveItems<device::Bytes16>(to, from, begin, count);
  WithItem(static_cast<int32_t>(item_bytes * unit),
           [&](auto item) { MoveItems<decltype(item)>(to, from, begin, count); });
}

// For kernels without bulk copies.
struct PlainCopies {
  JAXCOMM_DEVICE static void Copy(char* dst, const char* src, int64_t bytes) { device::Copy(dst, src, bytes); }
};

// `Copies`: BulkCopies or PlainCopies.
template <typename Copies>
JAXCOMM_DEVICE_CALLED void MoveElements(const Elements& dst, const Elements& src, int64_t count, int64_t item_bytes,
                                        Copies copies) {
  for (int64_t i = 0; i < count;) {
    const int64_t contiguous = src.Contiguous(i, dst.Contiguous(i, count - i));
    if (contiguous < count - i && contiguous * item_bytes < kShortFragmentBytes) {
      return MoveShortFragments(dst, src, i, count, item_bytes);
    }
    copies.Copy(dst.base + dst.Position(i) * item_bytes, src.base + src.Position(i) * item_bytes,
                contiguous * item_bytes);
    i += contiguous;
  }
}

JAXCOMM_DEVICE_CALLED void ZeroElements(const Elements& dst, int64_t count, int64_t item_bytes) {
  for (int64_t i = 0; i < count;) {
    const int64_t contiguous = dst.Contiguous(i, count - i);
    device::Zero(dst.base + dst.Position(i) * item_bytes, contiguous * item_bytes);
    i += contiguous;
  }
}

// Copies the channel's elements of a buffer. A row is one fragment of every block. Rows that belong to the channel
// entirely are contiguous.
JAXCOMM_DEVICE_CALLED void CopySlice(const BufferCopy& copy, const ChannelSlice& slice, int64_t item_bytes,
                                     BulkCopies copies) {
  const int64_t end = slice.begin + slice.count;
  for (int64_t element = slice.begin; element < end;) {
    const int64_t in_fragment = element % slice.contiguous_count;
    const int64_t left = end - element;
    const bool whole = in_fragment == 0 && left >= slice.contiguous_count;
    const int64_t rest = slice.contiguous_count - in_fragment < left ? slice.contiguous_count - in_fragment : left;
    const int64_t count = whole ? left / slice.contiguous_count * slice.contiguous_count : rest;  // of each block
    const int64_t first = (element - in_fragment) * slice.num_blocks + in_fragment;
    if (whole) {
      copies.Copy(copy.to + first * item_bytes, copy.from + first * item_bytes, count * slice.num_blocks * item_bytes);
    } else {
      copies.CopyRanges(static_cast<int32_t>(slice.num_blocks), count * item_bytes, [&](int32_t block) {
        const int64_t at = (first + block * slice.contiguous_count) * item_bytes;
        return device::CopyRange{copy.to + at, copy.from + at, count * item_bytes};
      });
    }
    element += count;
  }
}

template <typename Network>
class ChannelExecutor {
 public:
  // `shared`: BulkSharedBytes(args.bulk) of the thread block's shared memory.
  JAXCOMM_DEVICE ChannelExecutor(const RankArgs& args, Network& network, int32_t channel, void* shared = nullptr)
      : args_(args),
        network_(network),
        channel_(channel),
        program_(args.channels[channel]),
        copies_(args.comm, channel, args.bulk, shared) {}

  JAXCOMM_DEVICE void Run() {
    device::BeginCall(args_.comm);
    // The check is here and not in the first wait, because networks have counters of their own.
    if (device::IsAborted(args_.comm)) return;
    // Programs count their own puts only (packing.h). A user's kernel may have ended with puts outstanding.
    if (Network::kSharesQueues && __syncthreads_or(!network_.Flush(channel_)) != 0) return;
    if (args_.copy_in.to != nullptr) {
      CopySlice(args_.copy_in, program_.input, args_.item_bytes, copies_);
      __syncthreads();
    }
    const ProgramStep* steps = args_.steps + program_.first_step;
    // A thread whose wait or flush fails has aborted the channel.
    for (int32_t i = 0; i < program_.num_steps; ++i) {
      const ProgramStep& step = steps[i];
      if (step.flush && __syncthreads_or(!network_.Flush(channel_)) != 0) return;
      switch (step.step.kind) {
        case StepKind::kSignal:
          __syncthreads();  // all earlier writes are complete
          for (int32_t k = Thread(); k < step.num_concurrent; k += Threads()) SignalPeer(steps[i + k].step.peer);
          i += step.num_concurrent - 1;
          break;
        case StepKind::kWait: {
          bool ok = true;
          for (int32_t k = Thread(); ok && k < step.num_concurrent; k += Threads()) {
            ok = WaitForPeer(steps[i + k].step.peer, steps[i + k].origin);
          }
          i += step.num_concurrent - 1;
          if (__syncthreads_or(!ok) != 0) return;
          break;
        }
        default:
          if (step.sync) __syncthreads();
          if (step.num_concurrent == 1) {
            RunData(step);
          } else {
            MoveConcurrently(steps + i);
            i += step.num_concurrent - 1;
          }
      }
    }
    // XLA may reuse the memory once the kernel has ended.
    if (__syncthreads_or(!network_.Flush(channel_)) != 0) return;
    if (args_.copy_out.to != nullptr) CopySlice(args_.copy_out, program_.output, args_.item_bytes, copies_);
    device::EndCall(args_.comm);
  }

 private:
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }
  JAXCOMM_DEVICE int32_t Node(int32_t rank) const { return rank / args_.ranks_per_node; }
  JAXCOMM_DEVICE bool IsIntraNode(int32_t rank) const { return Node(rank) == Node(args_.comm.world.rank); }
  JAXCOMM_DEVICE int32_t Local(int32_t rank) const { return rank % args_.ranks_per_node; }

  JAXCOMM_DEVICE void SignalPeer(int32_t peer) {
    if (IsIntraNode(peer)) {
      device::Signal(args_.comm, channel_, Local(peer));
    } else {
      network_.Signal(channel_, peer);
    }
  }

  JAXCOMM_DEVICE bool WaitForPeer(int32_t peer, int32_t origin) {
    return IsIntraNode(peer) ? device::Wait(args_.comm, channel_, Local(peer), origin)
                             : network_.Wait(channel_, peer, origin);
  }

  JAXCOMM_DEVICE void RunData(const ProgramStep& step) {
    const Elements dst = ElementsOf(args_, program_, step, step.step.dst);
    switch (step.step.kind) {
      case StepKind::kCopy:
      case StepKind::kGet:
      case StepKind::kPut:
        return Move(step, dst, ElementsOf(args_, program_, step, step.step.src));
      case StepKind::kZero:
        return ZeroElements(dst, step.step.count, args_.item_bytes);
      default:
        ReduceElements(dst, {args_, program_, step, args_.sources + program_.first_source + step.step.first_source});
    }
  }

  // Moves between this rank and ranks of its node, each of contiguous elements.
  JAXCOMM_DEVICE_CALLED void MoveConcurrently(const ProgramStep* steps) const {
    copies_.CopyRanges(steps->num_concurrent, steps->longest_count * args_.item_bytes, [&](int32_t k) {
      const ProgramStep& step = steps[k];
      const Elements dst = ElementsOf(args_, program_, step, step.step.dst);
      const Elements src = ElementsOf(args_, program_, step, step.step.src);
      return device::CopyRange{dst.base + dst.first * args_.item_bytes, src.base + src.first * args_.item_bytes,
                               step.step.count * args_.item_bytes};
    });
  }

  JAXCOMM_DEVICE void Move(const ProgramStep& step, const Elements& dst, const Elements& src) {
    if (!IsIntraNode(step.step.dst.rank)) return PutInterNode(step.step, dst, src);
    MoveElements(dst, src, step.step.count, args_.item_bytes, copies_);
  }

  JAXCOMM_DEVICE void PutInterNode(const Step& step, const Elements& dst, const Elements& src) {
    int64_t i = 0;
    for (int32_t number = 0; i < step.count; ++number) {
      const int64_t contiguous = src.Contiguous(i, dst.Contiguous(i, step.count - i));
      network_.Put(channel_, number, step.dst, dst.Position(i) * args_.item_bytes, step.src,
                   src.Position(i) * args_.item_bytes, contiguous * args_.item_bytes);
      i += contiguous;
    }
  }

  const RankArgs& args_;
  Network& network_;
  const int32_t channel_;
  const ChannelProgram& program_;
  const BulkCopies copies_;
};

}  // namespace jaxcomm::cuda
#endif
