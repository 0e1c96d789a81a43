// dispatch and combine inside a node: the plans "direct" of plan/dispatch.cc and plan/combine.cc, whose lists of rows
// are read from device memory.
//
// A channel has the same piece of every row, so thread blocks of a rank wait for each other neither to copy rows nor to
// add them. Every rank has the table of slices, so every rank knows where each row lies at both ends.
// - dispatch: a rank copies its payload and the list of its packed choices to its arena. After a barrier the ranks of
//   the experts read the rows that the lists name, straight into their slots.
// - combine: the ranks of the experts put their rows to the packed choices in the arena of the rank that adds them.
//   After a barrier that rank adds the rows of each token in the order of the choices.
// dispatch reads and combine writes, because the arena then has T and T K rows of a rank, whatever the number of slots.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls, for the two stages; the order of the rows is jaxcomm's.
#pragma once

#include "cuda/program/program.h"
#include "cuda/program/row_args.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

// Rows of a token that a thread loads before it adds the first.
constexpr int kRowLoads = 8;

// A product and a sum, each rounded, as on CPUs. nvcc would make one fused operation of `a * b + c`.
JAXCOMM_DEVICE float RoundedProduct(float a, float b) {
#if defined(__CUDACC__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
JAXCOMM_DEVICE double RoundedProduct(double a, double b) {
#if defined(__CUDACC__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// Copies a piece of `units` units of moves[0] .. moves[num - 1], by all threads of the block.
template <typename Unit>
JAXCOMM_DEVICE_CALLED void CopyMoves(const RowMove* moves, int32_t num, int32_t units) {
#if defined(__CUDACC__)
  __builtin_assume(__isShared(moves));
#endif
  device::Pass(
      static_cast<int64_t>(num) * units, device::OfBlock(),
      [&](int64_t i) {
        const auto row = static_cast<uint32_t>(i) / static_cast<uint32_t>(units);
        const auto* const from = reinterpret_cast<const Unit*>(moves[row].from);
        return from != nullptr ? from[static_cast<uint32_t>(i) - row * units] : Unit{};
      },
      [&](int64_t i, const Unit& unit) {
        const auto row = static_cast<uint32_t>(i) / static_cast<uint32_t>(units);
        reinterpret_cast<Unit*>(moves[row].to)[static_cast<uint32_t>(i) - row * units] = unit;
      });
}

template <typename Unit>
JAXCOMM_DEVICE_CALLED void ZeroPieces(char* first, int64_t row_bytes, int64_t num, int32_t units,
                                      device::Threads threads) {
  for (int64_t i = threads.rank; i < num * units; i += threads.size) {
    reinterpret_cast<Unit*>(first + i / units * row_bytes)[i % units] = Unit{};
  }
}

// Where the sums of some tokens come from and go to: a piece of every row.
template <typename Acc>
struct TokenSums {
  const char* rows;          // packed choices
  char* y;                   // of the first token
  const int32_t* positions;  // [token][choice], packed; -1: no row
  const Acc* weights;        // [token][choice]; null: ones
  int64_t row_bytes;
  int32_t choices;
  int32_t units;  // of kLanes elements, in a piece
};

// The sums of `num` tokens, by all threads of the block. A thread loads up to kRowLoads rows before it adds the first.
template <typename Codec, int kLanes>
JAXCOMM_DEVICE_CALLED void AddTokens(const TokenSums<typename Codec::Acc> sums, int32_t num) {
  using Acc = typename Codec::Acc;
  using Units = device::Unit<Codec, kLanes>;
  using Loaded = device::Raw<sizeof(Units)>;
#if defined(__CUDACC__)
  __builtin_assume(__isShared(sums.positions));
#endif
  const auto units = static_cast<uint32_t>(sums.units);
  for (auto i = static_cast<uint32_t>(threadIdx.x); i < static_cast<uint32_t>(num) * units; i += blockDim.x) {
    const uint32_t token = i / units, unit = i - token * units;
    const int64_t choice = static_cast<int64_t>(token) * sums.choices;
    device::Accumulator<Codec, kLanes> sum = {};
    for (int32_t k = 0; k < sums.choices; k += kRowLoads) {
      int32_t at[kRowLoads];
      Acc weights[kRowLoads];
      Loaded rows[kRowLoads] = {};
      JAXCOMM_UNROLL
      for (int j = 0; j < kRowLoads; ++j) at[j] = k + j < sums.choices ? sums.positions[choice + k + j] : -1;
      JAXCOMM_UNROLL
      for (int j = 0; j < kRowLoads; ++j) {
        weights[j] = at[j] >= 0 && sums.weights != nullptr ? sums.weights[choice + k + j] : Acc(1);
        if (at[j] >= 0) rows[j] = reinterpret_cast<const Loaded*>(sums.rows + at[j] * sums.row_bytes)[unit];
      }
      JAXCOMM_UNROLL
      for (int j = 0; j < kRowLoads; ++j) {
        Units row;
        std::memcpy(&row, &rows[j], sizeof(row));
        JAXCOMM_UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
          const Acc added = sum.lanes[lane] + RoundedProduct(weights[j], Acc(Codec::Decode(row.lanes[lane])));
          sum.lanes[lane] = at[j] >= 0 ? added : sum.lanes[lane];
        }
      }
    }
    reinterpret_cast<Units*>(sums.y + token * sums.row_bytes)[unit] = sum.Get();
  }
}

// A thread block's part of a call.
class RowCall {
 public:
  // `shared`: RowSharedBytes().
  JAXCOMM_DEVICE RowCall(const RowArgs& args, int32_t channel, void* shared)
      : args_(args),
        comm_(args.comm),
        channel_(channel),
        num_local_(args.num_experts / args.comm.local.size),
        piece_at_(channel * args.piece_bytes),
        moves_(static_cast<RowMove*>(shared)),
        positions_(static_cast<int32_t*>(shared)),
        ends_(reinterpret_cast<int32_t*>(static_cast<char*>(shared) +
                                         RowMovesBytes(args, static_cast<int32_t>(blockDim.x)))) {
    const int64_t left = args.row_bytes - piece_at_;
    piece_bytes_ = left < args.piece_bytes ? left : args.piece_bytes;
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.y) |
                                static_cast<uintptr_t>(args.row_bytes) | 16;
    unit_bytes_ = static_cast<int32_t>(alignment & -alignment);
  }

  JAXCOMM_DEVICE void Run() {
    if (device::IsAborted(comm_) || !CheckTable()) return;
    args_.combines ? Combine() : Dispatch();
    __syncthreads();  // after the last Update() of a thread that found a wrong row
    if (Thread() == 0) EndBlock();
  }

 protected:  // for rail_rows.cuh
  enum Vector : int32_t { kInputOffset, kSize, kOutputOffset, kNumVectors = 4 };
  JAXCOMM_DEVICE int32_t n() const { return comm_.local.size; }
  JAXCOMM_DEVICE int32_t rank() const { return comm_.local.rank; }
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }
  // Of the slice that rank `from` sends to `expert`.
  JAXCOMM_DEVICE int64_t At(int32_t from, Vector vector, int32_t expert) const {
    return args_.table[(static_cast<int64_t>(from) * kNumVectors + vector) * args_.num_experts + expert];
  }
  JAXCOMM_DEVICE char* ArenaRow(int32_t of, int64_t row) const {
    return comm_.arena.At(of, row * args_.row_bytes + piece_at_);
  }
  JAXCOMM_DEVICE int32_t* List(int32_t of) const {
    return comm_.arena.At<int32_t>(of, ArenaRowsBytes(args_) + channel_ * ArenaListBytes(args_));
  }

  // The slot behind the slice of `from` for `expert`: the first of the next rank or of the next expert.
  JAXCOMM_DEVICE int64_t Limit(int32_t from, int32_t expert) const {
    if (from + 1 < n()) return At(from + 1, kOutputOffset, expert);
    return expert % num_local_ + 1 < num_local_ ? At(0, kOutputOffset, expert + 1) : args_.num_slots;
  }

  // Whether all slices of all ranks fit. Every rank has the same table, so all thread blocks of all ranks get the same
  // result, before a row moves. If not, every rank aborts: one thread reports why.
  JAXCOMM_DEVICE bool CheckTable() {
    bool ok = true;
    ForSlices([&](int32_t from, int32_t expert) { ok = ok && ProblemOf(from, expert) == kNoProblem; });
    if (__syncthreads_or(!ok) == 0) return true;
    // A negative size is part of both cumulative sums of the table, so that slices behind it seem to be wrong too.
    // Hence the most certain problem of all slices is reported.
    for (int32_t problem = kNegativeSize; problem < kNoProblem; ++problem) {
      bool found = false;
      ForSlices([&](int32_t from, int32_t expert) {
        if (ProblemOf(from, expert) != problem) return;
        found = true;
        ReportSlice(from, expert, problem);
      });
      if (__syncthreads_or(found) != 0) break;
    }
    if (Thread() == 0) device::AbortChannel(comm_, channel_);
    return false;
  }

  // In the order in which they are reported.
  enum Problem : int32_t { kNegativeSize, kExpertOverflows, kRankOverflows, kOutsideOfChoices, kNoProblem };
  JAXCOMM_DEVICE int32_t ProblemOf(int32_t from, int32_t expert) const {
    const int64_t size = At(from, kSize, expert), input = At(from, kInputOffset, expert);
    const int64_t output = At(from, kOutputOffset, expert);
    if (size < 0) return kNegativeSize;
    if (output < 0 || output + size > Limit(from, expert)) {
      return from + 1 == n() && expert % num_local_ + 1 < num_local_ ? kExpertOverflows : kRankOverflows;
    }
    return input < 0 || input + size > args_.num_choices ? kOutsideOfChoices : kNoProblem;
  }

  JAXCOMM_DEVICE void ReportSlice(int32_t from, int32_t expert, int32_t problem) const {
    const int64_t size = At(from, kSize, expert), input = At(from, kInputOffset, expert);
    const int64_t end = At(from, kOutputOffset, expert) + size, first = At(0, kOutputOffset, expert);
    switch (problem) {
      case kNegativeSize:
        // The mark of ids that are no experts, made by jaxcomm/moe/check.py.
        return Report(from, kUnknownExperts, -size, args_.num_experts);
      case kExpertOverflows:
        return Report(expert / num_local_, kTooManyRowsOfExpert, end - first, Limit(from, expert) - first);
      case kRankOverflows:
        return Report(expert / num_local_, kTooManyRows, end, args_.num_slots);
      default:
        return Report(from, kUnknownRow, input + size, args_.num_choices);
    }
  }

  template <typename F>
  JAXCOMM_DEVICE void ForSlices(F f) const {
    for (int32_t i = Thread(); i < n() * args_.num_experts; i += Threads()) {
      f(i / args_.num_experts, i % args_.num_experts);
    }
  }

  JAXCOMM_DEVICE void Report(int32_t peer, int32_t problem, int64_t expected, int64_t seen) const {
    device::Fail(comm_, channel_, peer, problem, static_cast<uint64_t>(expected), static_cast<uint64_t>(seen));
  }

  // args_.state: the number of thread blocks that have ended, kWrong, and the row in the upper half.
  static constexpr uint64_t kWrong = uint64_t{1} << 31;

  // Changes args_.state to change(state), which it returns.
  template <typename F>
  JAXCOMM_DEVICE uint64_t Update(F change) const {
    for (;;) {
      const uint64_t state = device::LoadAcquire(args_.state), changed = change(state);
      if (state == changed || device::Claim(args_.state, state, changed)) return changed;
    }
  }

  // A routing that names a row that does not exist. The row counts as zero, and the next call of this process fails.
  JAXCOMM_DEVICE void RememberRow(int32_t row) const {
    Update([&](uint64_t state) {
      return (state & kWrong) != 0 ? state : state | kWrong | uint64_t{static_cast<uint32_t>(row)} << 32;
    });
  }

  // The last thread block of the call reports a wrong row. An earlier report would end the other blocks of this rank
  // before they have signaled to their peers.
  JAXCOMM_DEVICE void EndBlock() const {
    const uint64_t state = Update([](uint64_t state) { return state + 1; });
    if ((state & (kWrong - 1)) != static_cast<uint64_t>(args_.num_channels)) return;
    device::StoreRelease(args_.state, 0);
    if ((state & kWrong) == 0) return;
    const auto row = static_cast<int32_t>(static_cast<uint32_t>(state >> 32));
    Report(rank(), kUnknownRow, row, args_.combines ? args_.num_slots : args_.num_rows);
    device::SetAbortFlag(comm_);
  }

  // Calls moves[i] = make(j) for j = 0 .. total - 1 and copies them, many at a time.
  template <typename Make>
  JAXCOMM_DEVICE void Move(int64_t total, Make make) {
    const auto units = static_cast<int32_t>(piece_bytes_ / unit_bytes_);
    int64_t most = (int64_t{1} << 30) / units;
    if (most > kRowsPerThread * Threads()) most = kRowsPerThread * Threads();
    for (int64_t first = 0; first < total; first += most) {
      const auto num = static_cast<int32_t>(total - first < most ? total - first : most);
      for (int32_t i = Thread(); i < num; i += Threads()) moves_[i] = make(first + i);
      __syncthreads();
      switch (unit_bytes_) {
        case 1:
          CopyMoves<uint8_t>(moves_, num, units);
          break;
        case 2:
          CopyMoves<uint16_t>(moves_, num, units);
          break;
        case 4:
          CopyMoves<uint32_t>(moves_, num, units);
          break;
        case 8:
          CopyMoves<uint64_t>(moves_, num, units);
          break;
        default:
          CopyMoves<device::Bytes16>(moves_, num, units);
      }
      __syncthreads();
    }
  }

  // ends_[i]: the rows of the slices 0 .. i of this rank's experts, which are ordered by expert and then by sender.
  JAXCOMM_DEVICE void SumSizes() {
    for (int32_t base = 0; base < args_.num_experts; base += Threads()) {
      const int32_t i = base + Thread();
      const bool own = i < args_.num_experts;
      if (own) {
        int32_t value = static_cast<int32_t>(At(i % n(), kSize, rank() * num_local_ + i / n()));
        if (Thread() == 0 && base > 0) value += ends_[base - 1];
        ends_[i] = value;
      }
      __syncthreads();
      for (int32_t step = 1; step < Threads(); step *= 2) {
        const int32_t before = own && Thread() >= step ? ends_[i - step] : 0;
        __syncthreads();
        if (own) ends_[i] += before;
        __syncthreads();
      }
    }
  }

  // Row number `j` of this rank's slots.
  struct Row {
    int32_t home;    // the rank whose token it belongs to
    int64_t packed;  // the choice of that rank
    int64_t slot;
  };
  JAXCOMM_DEVICE Row FindRow(int64_t j) const {
    int32_t low = 0, high = args_.num_experts - 1;  // the first slice that ends behind j
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (ends_[middle] > j) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int32_t home = low % n(), expert = rank() * num_local_ + low / n();
    const int64_t k = j - (low > 0 ? ends_[low - 1] : 0);
    return {home, At(home, kInputOffset, expert) + k, At(home, kOutputOffset, expert) + k};
  }
  JAXCOMM_DEVICE int64_t NumSlotRows() const { return ends_[args_.num_experts - 1]; }

  JAXCOMM_DEVICE bool Dispatch() {
    SumSizes();
    Move(args_.num_rows,
         [&](int64_t row) { return RowMove{ArenaRow(rank(), row), args_.x + row * args_.row_bytes + piece_at_}; });
    device::Copy(List(rank()), args_.index, args_.num_choices * static_cast<int64_t>(sizeof(int32_t)));
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;
    Move(NumSlotRows(), [&](int64_t j) {
      const Row found = FindRow(j);
      const int32_t row = List(found.home)[found.packed];
      const bool exists = row >= 0 && row < args_.num_rows;
      if (!exists) RememberRow(row);
      return RowMove{Slot(found.slot), exists ? ArenaRow(found.home, row) : nullptr};
    });
    ZeroGaps();
    return device::Barrier(comm_, channel_, kExitBarrier);  // the next call may overwrite the arena
  }

  JAXCOMM_DEVICE char* Slot(int64_t slot) const { return args_.y + slot * args_.row_bytes + piece_at_; }

  // Zeroes the slots without a row: before, between and after the experts. Each warp has some of the gaps; the last
  // one, which may be long, has all threads.
  JAXCOMM_DEVICE void ZeroGaps() const {
    const int32_t first_expert = rank() * num_local_,
                  num_warps = (Threads() + device::kWarpThreads - 1) / device::kWarpThreads;
    for (int32_t i = Thread() / device::kWarpThreads; i < num_local_; i += num_warps) {
      const int64_t begin = i > 0 ? EndOf(first_expert + i - 1) : 0;
      Zero(begin, At(0, kOutputOffset, first_expert + i), device::OfWarp());
    }
    Zero(EndOf(first_expert + num_local_ - 1), args_.num_slots, device::OfBlock());
  }
  JAXCOMM_DEVICE int64_t EndOf(int32_t expert) const {
    return At(n() - 1, kOutputOffset, expert) + At(n() - 1, kSize, expert);
  }
  JAXCOMM_DEVICE void Zero(int64_t begin, int64_t end, device::Threads threads) const {
    if (begin >= end) return;
    const auto units = static_cast<int32_t>(piece_bytes_ / unit_bytes_);
    switch (unit_bytes_) {
      case 16:
        return ZeroPieces<device::Bytes16>(Slot(begin), args_.row_bytes, end - begin, units, threads);
      case 8:
        return ZeroPieces<uint64_t>(Slot(begin), args_.row_bytes, end - begin, units, threads);
      default:
        return ZeroPieces<uint8_t>(Slot(begin), args_.row_bytes, end - begin, static_cast<int32_t>(piece_bytes_),
                                   threads);
    }
  }

  JAXCOMM_DEVICE bool Combine() {
    SumSizes();
    // A late rank may still copy the result of an earlier call out of its arena.
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;
    Move(NumSlotRows(), [&](int64_t j) {
      const Row found = FindRow(j);
      return RowMove{ArenaRow(found.home, found.packed), args_.x + found.slot * args_.row_bytes + piece_at_};
    });
    // Peers write to this arena after the next entry barrier only, so that the sums need no barrier behind them.
    if (!device::Barrier(comm_, channel_, kExitBarrier)) return false;
    if (args_.choices_per_row == 1 && args_.weights == nullptr) {
      Move(args_.num_rows, [&](int64_t choice) {
        const int32_t packed = Packed(choice);
        return RowMove{Slot(choice), packed >= 0 ? ArenaRow(rank(), packed) : nullptr};
      });
    } else {
      AddRows();
    }
    return true;
  }

  // The packed choice; -1: it has no row.
  JAXCOMM_DEVICE int32_t Packed(int64_t choice) {
    const int32_t slot = args_.index[choice];
    if (slot < 0) return -1;
    const int32_t expert = args_.expert[choice];
    if (expert >= 0 && expert < args_.num_experts) {
      const int64_t k = slot - At(rank(), kOutputOffset, expert);
      if (k >= 0 && k < At(rank(), kSize, expert)) {
        return static_cast<int32_t>(At(rank(), kInputOffset, expert) + k);
      }
    }
    RememberRow(slot);
    return -1;
  }

  JAXCOMM_DEVICE void AddRows() {
    using namespace arithmetic;
    switch (args_.dtype) {
      case DType::kF16:
        return AddRowsOf<Widened<Float16>>();
      case DType::kBF16:
        return AddRowsOf<Widened<BFloat16>>();
      case DType::kF32:
        return AddRowsOf<Plain<float>>();
      default:
        return AddRowsOf<Plain<double>>();
    }
  }

  template <typename Codec>
  JAXCOMM_DEVICE void AddRowsOf() {
    constexpr int kItem = static_cast<int>(sizeof(typename Codec::Storage));
    const int32_t choices = args_.choices_per_row;
    const auto units = static_cast<int32_t>(piece_bytes_ / (unit_bytes_ == 16 ? 16 : kItem));
    int64_t most = RowMovesBytes(args_, Threads()) / (choices * static_cast<int64_t>(sizeof(int32_t)));
    if (most > (int64_t{1} << 30) / units) most = (int64_t{1} << 30) / units;
    for (int64_t first = 0; first < args_.num_rows; first += most) {
      const auto num = static_cast<int32_t>(args_.num_rows - first < most ? args_.num_rows - first : most);
      for (int32_t i = Thread(); i < num * choices; i += Threads()) positions_[i] = Packed(first * choices + i);
      __syncthreads();
      using Acc = typename Codec::Acc;
      const auto* const weights = static_cast<const Acc*>(args_.weights);
      const TokenSums<Acc> sums = {
          ArenaRow(rank(), 0), Slot(first), positions_, weights != nullptr ? weights + first * choices : nullptr,
          args_.row_bytes,     choices,     units};
      if (unit_bytes_ == 16) {
        AddTokens<Codec, 16 / kItem>(sums, num);
      } else {
        AddTokens<Codec, 1>(sums, num);
      }
      __syncthreads();
    }
  }

  const RowArgs& args_;
  const device::Comm& comm_;
  const int32_t channel_;
  const int32_t num_local_;  // experts of a rank
  const int64_t piece_at_;   // the channel's piece of a row, in bytes
  int64_t piece_bytes_ = 0;
  int32_t unit_bytes_ = 1;    // of loads and stores
  RowMove* const moves_;      // shared memory
  int32_t* const positions_;  // the same memory
  int32_t* const ends_;
};

}  // namespace cuda
}  // namespace jaxcomm
#endif
