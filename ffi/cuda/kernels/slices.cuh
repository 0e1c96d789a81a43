// all_to_all_v inside a node: the plan "direct" of plan/algorithms/all_to_all_v.cc, whose slices are read from device
// memory.
//
// Every rank has the table of slices, so both ends of a slice know where its rows lie. Bytes pass through an arena,
// whose stripes are distributed over the channels (kStripeBytes), so one long slice per peer occupies all thread
// blocks. A stripe has the same channel at both ends, so thread blocks of a rank do not wait for each other.
// - If peers read, a rank copies x to its arena. After a barrier the receivers copy their slices from it to y.
// - If peers put, a sender copies its slices to the receiver's arena. After a barrier the receiver copies them to y.
//   Slices do not overlap in y, so every byte of the arena has one writer.
// Slices of a rank for itself are copied from x to y.
#pragma once

#include "cuda/kernels/bulk_copy.cuh"
#include "cuda/kernels/row_loops.cuh"
#include "cuda/program/program.h"
#include "cuda/program/slice_args.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// A thread block's part of a call.
class SliceCall {
 public:
  // `shared`: SliceSharedBytes() for args.bulk.
  JAXCOMM_DEVICE SliceCall(const SliceArgs& args, int32_t channel, void* shared)
      : args_(args),
        comm_(args.comm),
        channel_(channel),
        per_pair_(args.slices_per_rank / args.comm.local.size),
        copies_(args.comm, channel, args.bulk, shared),
        moves_(reinterpret_cast<SliceMove*>(static_cast<char*>(shared) + BulkSharedBytes(args.bulk))),
        numbers_(reinterpret_cast<int32_t*>(moves_ + blockDim.x)) {}

  JAXCOMM_DEVICE void Run() {
    device::BeginCall(comm_);
    if (device::IsAborted(comm_) || !CheckTable()) return;
    Reads(args_) ? Read() : Put();
    device::EndCall(comm_);
  }

 private:
  enum Vector : int32_t { kInputOffset, kSendSize, kOutputOffset, kReceivedSize, kNumVectors };
  struct Slice {
    int64_t input;   // row of the sender's x
    int64_t output;  // row of the receiver's y
    int64_t size;    // rows
  };
  static constexpr int32_t kNone = 0x7fffffff;

  JAXCOMM_DEVICE int32_t n() const { return comm_.local.size; }
  JAXCOMM_DEVICE int32_t rank() const { return comm_.local.rank; }
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }

  JAXCOMM_DEVICE int64_t Number(int32_t rank, Vector vector, int32_t peer, int32_t i) const {
    const int64_t at = (int64_t{rank} * kNumVectors + vector) * args_.slices_per_rank + peer * per_pair_ + i;
    return args_.int64_table ? static_cast<const int64_t*>(args_.table)[at]
                             : static_cast<const int32_t*>(args_.table)[at];
  }
  // Slice i from rank `from` to rank `to`.
  JAXCOMM_DEVICE Slice At(int32_t from, int32_t to, int32_t i) const {
    return {Number(from, kInputOffset, to, i), Number(from, kOutputOffset, to, i), Number(from, kSendSize, to, i)};
  }

  JAXCOMM_DEVICE char* InArena(int32_t of, int64_t row) const { return comm_.arena.At(of, row * args_.row_bytes); }
  JAXCOMM_DEVICE const char* InX(const Slice& slice) const { return args_.x + slice.input * args_.row_bytes; }
  JAXCOMM_DEVICE char* InY(const Slice& slice) const { return args_.y + slice.output * args_.row_bytes; }

  JAXCOMM_DEVICE void Read() {
    CopyIn();
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return;
    MoveAll([&](int32_t peer, int32_t i) {
      const Slice slice = At(peer, rank(), i);
      if (slice.size == 0) return SliceMove{};
      const char* const from = peer == rank() ? InX(slice) : InArena(peer, slice.input);
      return SliceMove{InY(slice), from, slice.input * args_.row_bytes, slice.size * args_.row_bytes};
    });
    device::Barrier(comm_, channel_, kExitBarrier);  // the next call may overwrite the arena
  }

  JAXCOMM_DEVICE void CopyIn() {
    if (Thread() == 0) moves_[0] = {InArena(rank(), 0), args_.x, 0, args_.input_rows * args_.row_bytes};
    if (Thread() == 0) numbers_[0] = NumWarpStripes(moves_[0]);
    __syncthreads();
    MoveStripes(1);
    MoveInBulk(1);
    __syncthreads();
  }

  JAXCOMM_DEVICE void Put() {
    // A late rank may still copy the rows of an earlier call out of its arena.
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return;
    MoveAll([&](int32_t peer, int32_t i) {
      const Slice slice = At(rank(), peer, i);
      if (slice.size == 0) return SliceMove{};
      char* const to = peer == rank() ? InY(slice) : InArena(peer, slice.output);
      return SliceMove{to, InX(slice), slice.output * args_.row_bytes, slice.size * args_.row_bytes};
    });
    // Peers write to this arena after the next entry barrier only, so that the copies need no barrier behind them.
    if (!device::Barrier(comm_, channel_, kExitBarrier)) return;
    MoveAll([&](int32_t peer, int32_t i) {
      const Slice slice = At(peer, rank(), i);
      if (peer == rank() || slice.size == 0) return SliceMove{};
      return SliceMove{InY(slice), InArena(rank(), slice.output), slice.output * args_.row_bytes,
                       slice.size * args_.row_bytes};
    });
  }

  // The first stripe of this channel that a move may touch.
  JAXCOMM_DEVICE int64_t FirstStripe(const SliceMove& move) const {
    const int64_t first = move.begin / kStripeBytes, channels = args_.num_channels;
    return first + (channel_ - first % channels + channels) % channels;
  }
  JAXCOMM_DEVICE int32_t NumStripes(const SliceMove& move) const {
    const int64_t channels = args_.num_channels;
    const int64_t end = (move.begin + move.bytes + kStripeBytes - 1) / kStripeBytes, first = FirstStripe(move);
    return move.bytes > 0 && first < end ? static_cast<int32_t>((end - first + channels - 1) / channels) : 0;
  }

  // Whether all stripes of a move begin and end at whole units of bulk copies.
  JAXCOMM_DEVICE bool IsBulk(const SliceMove& move) const {
    const auto ends = reinterpret_cast<uintptr_t>(move.to) | static_cast<uintptr_t>(move.begin | move.bytes);
    return (ends & 15) == 0 && copies_.Takes({move.to, move.from, move.bytes});
  }
  // The stripes that warps copy.
  JAXCOMM_DEVICE int32_t NumWarpStripes(const SliceMove& move) const { return IsBulk(move) ? 0 : NumStripes(move); }

  // Stripe k of those that this channel has of a move.
  JAXCOMM_DEVICE device::CopyRange StripeOf(const SliceMove& move, int64_t k) const {
    const int64_t at = (FirstStripe(move) + k * args_.num_channels) * kStripeBytes - move.begin;
    const int64_t begin = at > 0 ? at : 0;
    const int64_t end = at + kStripeBytes < move.bytes ? at + kStripeBytes : move.bytes;
    return {move.to + begin, move.from + begin, end - begin};
  }

  // The stripes that warps don't copy. One thread takes them in order.
  JAXCOMM_DEVICE void MoveInBulk(int32_t num) const {
    if (!BulkCopies::Issues() || (num == 1 && !IsBulk(moves_[0]))) return;
    copies_.Begin();
    for (int32_t i = 0; i < num; ++i) {
      const SliceMove move = moves_[i];
      const int32_t stripes = IsBulk(move) ? NumStripes(move) : 0;
      for (int32_t k = 0; k < stripes; ++k) copies_.Push(StripeOf(move, k));
    }
    copies_.Finish();
  }

  // Makes the moves make(peer, i) for all peers and slices of a pair. Each rank begins with the next one, so that not
  // all use the same link at once. Warps take stripes of all moves in turn, so that loads of many slices are in flight
  // at once.
  template <typename Make>
  JAXCOMM_DEVICE void MoveAll(Make make) {
    for (int32_t base = 0; base < args_.slices_per_rank; base += Threads()) {
      const int32_t left = args_.slices_per_rank - base, num = left < Threads() ? left : Threads();
      bool in_bulk = false;
      if (Thread() < num) {
        const int32_t pair = (base + Thread()) / per_pair_, peer = (rank() + 1 + pair) % n();
        const SliceMove move = make(peer, base + Thread() - pair * per_pair_);
        moves_[Thread()] = move;
        numbers_[Thread()] = NumWarpStripes(move);
        in_bulk = IsBulk(move);
      }
      in_bulk = __syncthreads_or(in_bulk) != 0;
      SumSizes(numbers_, num, numbers_, [&](int32_t i) { return numbers_[i]; });
      MoveStripes(num);
      if (in_bulk) MoveInBulk(num);
      __syncthreads();
    }
  }

  JAXCOMM_DEVICE void MoveStripes(int32_t num) {
    const int32_t num_warps = (Threads() + device::kWarpThreads - 1) / device::kWarpThreads;
    for (int32_t stripe = Thread() / device::kWarpThreads; stripe < numbers_[num - 1]; stripe += num_warps) {
      const int32_t i = FirstEndBehind(numbers_, num, stripe);
      const device::CopyRange range = StripeOf(moves_[i], stripe - BeginOf(numbers_, i));
      device::Copy(range.dst, range.src, range.bytes, device::OfWarp());
    }
  }

  // Whether all slices of all ranks are right. Every rank has the same table, so all thread blocks of all ranks get the
  // same result, before a row moves. If not, every rank aborts, and reports the first wrong slice.
  JAXCOMM_DEVICE bool CheckTable() {
    const int32_t wrong = First([&](int32_t from, int32_t slice) {
      const int32_t to = slice / per_pair_;
      return ProblemOf(from, to, slice % per_pair_) != 0;
    });
    if (wrong != kNone) {
      const int32_t slice = wrong % args_.slices_per_rank;
      if (Thread() == 0) ReportSlice(wrong / args_.slices_per_rank, slice / per_pair_, slice % per_pair_);
    } else {
      // Each of these tests takes one pass over the table. Users number the slices in one of these two orders.
      if (__syncthreads_or(!Ascend(false)) == 0 || __syncthreads_or(!Ascend(true)) == 0) return true;
      const int32_t overlap = First([&](int32_t to, int32_t k) { return Overlapped(to, k) != kNone; });
      if (overlap == kNone) return true;
      if (Thread() == 0) ReportOverlap(overlap / args_.slices_per_rank, overlap % args_.slices_per_rank);
    }
    if (Thread() == 0) device::AbortChannel(comm_, channel_);
    return false;
  }

  // The smallest r slices_per_rank + k for which is_wrong(r, k) is true; kNone: there is none. The same in all threads.
  template <typename IsWrong>
  JAXCOMM_DEVICE int32_t First(IsWrong is_wrong) {
    int32_t first = kNone;
    const int32_t total = n() * args_.slices_per_rank;
    for (int32_t i = Thread(); i < total && first == kNone; i += Threads()) {
      if (is_wrong(i / args_.slices_per_rank, i % args_.slices_per_rank)) first = i;
    }
    if (__syncthreads_or(first != kNone) == 0) return kNone;
    numbers_[Thread()] = first;
    __syncthreads();
    for (int32_t i = 0; i < Threads(); ++i) first = numbers_[i] < first ? numbers_[i] : first;
    return first;
  }

  // Whether rows [offset, offset + size) exist. No sum can overflow.
  JAXCOMM_DEVICE static bool Inside(int64_t offset, int64_t size, int64_t num_rows) {
    return offset >= 0 && size <= num_rows && offset <= num_rows - size;
  }

  // A PseudoStep; 0: none. An empty slice may have any offsets.
  JAXCOMM_DEVICE int32_t ProblemOf(int32_t from, int32_t to, int32_t i) const {
    const Slice slice = At(from, to, i);
    if (slice.size < 0 || slice.size != Number(to, kReceivedSize, from, i)) return kWrongSliceSizes;
    if (slice.size == 0) return 0;
    if (!Inside(slice.input, slice.size, args_.input_rows)) return kOutsideOfOperand;
    return Inside(slice.output, slice.size, args_.output_rows) ? 0 : kOutsideOfOutput;
  }

  JAXCOMM_DEVICE void ReportSlice(int32_t from, int32_t to, int32_t i) const {
    const Slice slice = At(from, to, i);
    const int32_t problem = ProblemOf(from, to, i);
    const int64_t rows = problem == kWrongSliceSizes    ? Number(to, kReceivedSize, from, i)
                         : problem == kOutsideOfOperand ? slice.input
                                                        : slice.output;
    device::Fail(comm_, channel_, from, problem, PackRows(i, slice.size), PackRows(to, rows));
  }

  // Slice number k that arrives at rank `to`, numbered by sender, or with `by_slice` by slice of a pair.
  JAXCOMM_DEVICE int32_t SenderOf(int32_t k, bool by_slice) const { return by_slice ? k % n() : k / per_pair_; }
  JAXCOMM_DEVICE Slice Arriving(int32_t to, int32_t k, bool by_slice) const {
    return At(SenderOf(k, by_slice), to, by_slice ? k / n() : k % per_pair_);
  }

  // Whether each of this thread's slices begins behind the previous one that arrives at the same rank. Empty slices
  // between them are skipped one by one.
  JAXCOMM_DEVICE bool Ascend(bool by_slice) const {
    for (int32_t j = Thread(); j < n() * args_.slices_per_rank; j += Threads()) {
      const int32_t to = j / args_.slices_per_rank, k = j % args_.slices_per_rank;
      const Slice slice = Arriving(to, k, by_slice);
      if (slice.size == 0) continue;
      for (int32_t before = k - 1; before >= 0; --before) {
        const Slice previous = Arriving(to, before, by_slice);
        if (previous.size == 0) continue;
        if (previous.output + previous.size > slice.output) return false;
        break;
      }
    }
    return true;
  }

  // The first slice before number k that overlaps with it in the output of rank `to`; kNone: there is none.
  JAXCOMM_DEVICE int32_t Overlapped(int32_t to, int32_t k) const {
    const Slice slice = Arriving(to, k, false);
    for (int32_t before = 0; before < k && slice.size > 0; ++before) {
      const Slice other = Arriving(to, before, false);
      if (other.size > 0 && other.output < slice.output + slice.size && slice.output < other.output + other.size) {
        return before;
      }
    }
    return kNone;
  }

  JAXCOMM_DEVICE void ReportOverlap(int32_t to, int32_t k) const {
    const int32_t other = Overlapped(to, k);
    device::Fail(comm_, channel_, SenderOf(other, false), kSlicesOverlap,
                 PackRows(SenderOf(k, false), Arriving(to, k, false).output),
                 PackRows(to, Arriving(to, other, false).output));
  }

  const SliceArgs& args_;
  const device::Comm& comm_;
  const int32_t channel_;
  const int32_t per_pair_;  // slices
  const BulkCopies copies_;
  SliceMove* const moves_;  // shared memory
  int32_t* const numbers_;  // the same
};

}  // namespace jaxcomm::cuda
#endif
