// dispatch and combine inside a node: the plans "direct" of dispatch.cc and combine.cc in plan/algorithms, whose lists
// of rows are read from device memory.
//
// A channel moves the same piece of every row, so thread blocks of a rank never wait for each other. Every rank has the
// table of slices, so every rank knows where each row lies at both ends.
// - dispatch: a rank copies its rows to its arena, and lists the places of its choices: which row, and which slot at
// the
//   rank of the expert. Choices of a token at one rank follow each other. After a barrier, the ranks of the experts
//   read each row once and store it to all its slots.
// - combine: the ranks of the experts write their rows to the packed choices in the arena of the source rank of the
//   token. After a barrier, the source rank adds the rows of each token in the order of the choices.
// dispatch reads and combine writes: the arena then has T and T K rows of a rank, whatever the number of slots.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls, for the two stages; the order of the rows is jaxcomm's.
#pragma once

#include "cuda/kernels/row_loops.cuh"
#include "cuda/program/program.h"
#include "cuda/program/row_args.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

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
        placed_{static_cast<const char**>(shared), static_cast<int32_t*>(shared) + 2 * kRowsPerThread * Threads(),
                static_cast<int32_t*>(shared) + 3 * kRowsPerThread * Threads()},
        ends_(reinterpret_cast<int32_t*>(static_cast<char*>(shared) +
                                         RowMovesBytes(args, static_cast<int32_t>(blockDim.x)))) {
    const int64_t left = args.row_bytes - piece_at_;
    piece_bytes_ = left < args.piece_bytes ? left : args.piece_bytes;
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.y) |
                                static_cast<uintptr_t>(args.row_bytes) | 16;
    unit_bytes_ = static_cast<int32_t>(alignment & -alignment);
  }

  JAXCOMM_DEVICE void Run() {
    RunChecked([&] { args_.combines ? Combine() : Dispatch(); });
  }

 protected:  // for rail_call.cuh
  // Runs `call` after the table has passed its checks.
  template <typename F>
  JAXCOMM_DEVICE void RunChecked(F call) {
    device::BeginCall(comm_);
    if (device::IsAborted(comm_) || !CheckTable()) return;
    call();
    __syncthreads();  // after the last Update() of a thread that found a wrong row
    if (Thread() == 0) EndBlock();
    device::EndCall(comm_);
  }

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
  JAXCOMM_DEVICE RowPlace* Places(int32_t of) const {
    return comm_.arena.At<RowPlace>(of, ArenaRowsBytes(args_) + channel_ * ArenaPlacesBytes(args_));
  }

  // Behind the packed choices of rank `from` for the experts 0 .. `expert`.
  JAXCOMM_DEVICE int64_t EndOfChoices(int32_t from, int32_t expert) const {
    return expert < 0 ? 0 : At(from, kInputOffset, expert) + At(from, kSize, expert);
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
    // A negative size is part of both cumulative sums of the table, so slices behind it seem wrong too. The order of
    // Problem puts the most certain problem first.
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
    // Slices are packed.
    return input != EndOfChoices(from, expert - 1) || input + size > args_.num_choices ? kOutsideOfChoices : kNoProblem;
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
    device::AbortChannel(comm_, channel_);
  }

  // Rows that are copied at once. They fit into shared memory, and their units into kMostUnits.
  JAXCOMM_DEVICE int32_t MostRows() const {
    const int64_t most = kMostUnits / units(), fit = kRowsPerThread * Threads();
    return static_cast<int32_t>(most < fit ? most : fit);
  }
  JAXCOMM_DEVICE int32_t units() const { return static_cast<int32_t>(piece_bytes_ / unit_bytes_); }

  // Calls f with a value of the type of loads and stores.
  template <typename F>
  JAXCOMM_DEVICE void WithUnit(F f) const {
    return unit_bytes_ == 16 ? f(device::Bytes16{}) : WithItem(unit_bytes_, f);
  }

  // Calls moves[i] = make(j) for j = 0 .. total - 1 and copies them, many at a time.
  template <typename Make>
  JAXCOMM_DEVICE void Move(int64_t total, Make make) {
    const int32_t most = MostRows();
    for (int64_t first = 0; first < total; first += most) {
      const auto num = static_cast<int32_t>(total - first < most ? total - first : most);
      for (int32_t i = Thread(); i < num; i += Threads()) moves_[i] = make(first + i);
      __syncthreads();
      WithUnit([&](auto unit) { CopyMoves<decltype(unit)>(moves_, num, units()); });
      __syncthreads();
    }
  }

  JAXCOMM_DEVICE bool Dispatch() {
    Move(args_.num_rows,
         [&](int64_t row) { return RowMove{ArenaRow(rank(), row), args_.x + row * args_.row_bytes + piece_at_}; });
    ListPlaces();
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;
    ReadPlaces();
    ZeroGaps();
    return device::Barrier(comm_, channel_, kExitBarrier);  // the next call may overwrite the arena
  }

  // Lists the places of the own packed choices, rank by rank. Those of one rank are sorted by row: a counting sort. The
  // order of the choices of one row depends on the threads, the slots do not.
  JAXCOMM_DEVICE void ListPlaces() {
    for (int32_t e = Thread(); e < args_.num_experts; e += Threads()) {
      ends_[e] = static_cast<int32_t>(EndOfChoices(rank(), e));
    }
    __syncthreads();
    const int64_t total = ends_[args_.num_experts - 1];
    const bool groups = GroupsPlaces(args_);
    RowPlace* const places = Places(rank());
    auto* const counters = reinterpret_cast<uint64_t*>(places + args_.num_choices);
    const auto counter = [&](int64_t i, int32_t row) {
      const int64_t to = FirstEndBehind(ends_, args_.num_experts, i) / num_local_;
      return counters + to * args_.num_rows + (Exists(row) ? row : 0);
    };
    if (groups) {
      const int64_t num = NumPlaceCounters(args_);
      for (int64_t i = Thread(); i < num; i += Threads()) counters[i] = 0;
      __syncthreads();
      device::Pass(
          total, device::OfBlock(), [&](int64_t i) { return args_.index[i]; },
          [&](int64_t i, int32_t row) { device::FetchAdd(counter(i, row), 1); });
      __syncthreads();
      AddCounters(counters, num);
    }
    constexpr int kUnroll = device::kUnroll;
    for (int64_t first = Thread(); first < total; first += int64_t{kUnroll} * Threads()) {
      int32_t rows[kUnroll] = {};
      int64_t at[kUnroll] = {};
      JAXCOMM_UNROLL
      for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = first + int64_t{k} * Threads();
        if (i < total) rows[k] = args_.index[i];
      }
      JAXCOMM_UNROLL
      for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = first + int64_t{k} * Threads();
        if (i < total) at[k] = groups ? static_cast<int64_t>(device::FetchAdd(counter(i, rows[k]), 1)) : i;
      }
      JAXCOMM_UNROLL
      for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = first + int64_t{k} * Threads();
        if (i >= total) continue;
        if (!Exists(rows[k])) RememberRow(rows[k]);
        const int32_t expert = FirstEndBehind(ends_, args_.num_experts, i);
        const int64_t slot = At(rank(), kOutputOffset, expert) + i - BeginOf(ends_, expert);
        places[at[k]] = {Exists(rows[k]) ? rows[k] : -1, static_cast<int32_t>(slot)};
      }
    }
  }
  JAXCOMM_DEVICE bool Exists(int32_t row) const { return row >= 0 && row < args_.num_rows; }

  // Replaces each of `num` counters by the sum of those before it.
  JAXCOMM_DEVICE void AddCounters(uint64_t* counters, int64_t num) {
    const int64_t each = (num + Threads() - 1) / Threads();
    const int64_t begin = each * Thread(), end = begin + each < num ? begin + each : num;
    uint64_t own = 0;
    for (int64_t i = begin; i < end; ++i) own += counters[i];
    auto sum = static_cast<uint64_t>(SumOfThreads(static_cast<int32_t>(own), positions_).before);
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t count = counters[i];
      counters[i] = sum;
      sum += count;
    }
    __syncthreads();
  }

  // Reads the rows of this rank's experts and stores each of them to all its slots. Channels begin with the places of
  // different ranks, so that all links are in use.
  JAXCOMM_DEVICE void ReadPlaces() {
    const auto source_rank_of = [&](int32_t i) { return (rank() + 1 + channel_ + i) % n(); };
    const auto first_choice = [&](int32_t source_rank) { return EndOfChoices(source_rank, rank() * num_local_ - 1); };
    SumSizes(ends_, n(), positions_, [&](int32_t i) {
      return EndOfChoices(source_rank_of(i), (rank() + 1) * num_local_ - 1) - first_choice(source_rank_of(i));
    });
    const int64_t total = ends_[n() - 1];
    const int32_t most = MostRows();
    for (int64_t first = 0; first < total;) {
      const auto num = static_cast<int32_t>(total - first < most ? total - first : most);
      for (int32_t j = Thread(); j < num; j += Threads()) {
        const int32_t i = FirstEndBehind(ends_, n(), first + j), source_rank = source_rank_of(i);
        const RowPlace place = Places(source_rank)[first_choice(source_rank) + first + j - BeginOf(ends_, i)];
        placed_.from[j] = place.row >= 0 ? ArenaRow(source_rank, place.row) : nullptr;
        placed_.slot[j] = place.slot;
      }
      __syncthreads();
      int32_t tokens = FindTokens(num), end = num;
      // The last token may have more choices, which belong to the next turn.
      if (first + num < total && tokens > 1) end = placed_.begin[--tokens];
      WithUnit([&](auto unit) { CopyTokens<decltype(unit)>(placed_, tokens, end, units(), Slot(0), args_.row_bytes); });
      __syncthreads();
      first += end;
    }
  }

  // Returns the number of tokens among `num` choices, and makes placed_.from and placed_.begin those of the tokens.
  JAXCOMM_DEVICE int32_t FindTokens(int32_t num) const {
    const char* from[kRowsPerThread];
    bool begins[kRowsPerThread];
    int32_t own = 0;
    JAXCOMM_UNROLL
    for (int32_t k = 0; k < kRowsPerThread; ++k) {
      const int32_t j = Thread() * kRowsPerThread + k;
      begins[k] = j < num && (j == 0 || placed_.from[j] != placed_.from[j - 1]);
      from[k] = begins[k] ? placed_.from[j] : nullptr;
      own += begins[k] ? 1 : 0;
    }
    const ThreadSum sum = SumOfThreads(own, placed_.begin);
    int32_t token = sum.before;
    JAXCOMM_UNROLL
    for (int32_t k = 0; k < kRowsPerThread; ++k) {
      if (!begins[k]) continue;
      placed_.from[token] = from[k];
      placed_.begin[token++] = Thread() * kRowsPerThread + k;
    }
    __syncthreads();
    return sum.all;
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
    WithUnit(
        [&](auto unit) { ZeroPieces<decltype(unit)>(Slot(begin), args_.row_bytes, end - begin, units(), threads); });
  }

  JAXCOMM_DEVICE bool Combine() {
    // By expert and then by sender, as the slots are.
    SumSizes(ends_, args_.num_experts, positions_,
             [&](int32_t i) { return At(i % n(), kSize, rank() * num_local_ + i / n()); });
    // A late rank may still copy the result of an earlier call out of its arena.
    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;
    Move(ends_[args_.num_experts - 1], [&](int64_t j) {
      const int32_t slice = FirstEndBehind(ends_, args_.num_experts, j);
      const int32_t source_rank = slice % n(), expert = rank() * num_local_ + slice / n();
      const int64_t k = j - BeginOf(ends_, slice), slot = At(source_rank, kOutputOffset, expert) + k;
      return RowMove{ArenaRow(source_rank, At(source_rank, kInputOffset, expert) + k),
                     args_.x + slot * args_.row_bytes + piece_at_};
    });
    // Peers write to this arena after the next entry barrier only, so that the sums need no barrier behind them.
    if (!device::Barrier(comm_, channel_, kExitBarrier)) return false;
    AddChoices(ArenaRow(rank(), 0), args_.row_bytes);
    return true;
  }

  // y: of each token, the rows of its choices. `rows`: those of the packed choices, `row_bytes` apart.
  JAXCOMM_DEVICE void AddChoices(const char* rows, int64_t row_bytes) {
    if (args_.choices_per_row > 1 || args_.weights != nullptr) {
      return WithCodec([&](auto codec) { AddRowsOf<decltype(codec)>(rows, row_bytes); });
    }
    Move(args_.num_rows, [&](int64_t choice) {
      const int32_t packed = Packed(choice);
      return RowMove{Slot(choice), packed >= 0 ? rows + packed * row_bytes : nullptr};
    });
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

  // Calls f with a codec of the type of sums.
  template <typename F>
  JAXCOMM_DEVICE void WithCodec(F f) const {
    using namespace arithmetic;
    switch (args_.dtype) {
      case DType::kF16:
        return f(Widened<Float16>());
      case DType::kBF16:
        return f(Widened<BFloat16>());
      case DType::kF32:
        return f(Plain<float>());
      default:
        return f(Plain<double>());
    }
  }

  template <typename Codec>
  JAXCOMM_DEVICE void AddRowsOf(const char* rows, int64_t row_bytes) {
    using Acc = typename Codec::Acc;
    const int32_t choices = args_.choices_per_row, units = SumUnits<Codec>();
    int64_t most = RowMovesBytes(args_, Threads()) / (choices * static_cast<int64_t>(sizeof(int32_t)));
    if (most > kMostUnits / units) most = kMostUnits / units;
    for (int64_t first = 0; first < args_.num_rows; first += most) {
      const auto num = static_cast<int32_t>(args_.num_rows - first < most ? args_.num_rows - first : most);
      for (int32_t i = Thread(); i < num * choices; i += Threads()) positions_[i] = Packed(first * choices + i);
      __syncthreads();
      const auto* const weights = static_cast<const Acc*>(args_.weights);
      Add<Codec>(TokenSums<Acc, EqualChoices>{rows,
                                              row_bytes,
                                              Slot(first),
                                              args_.row_bytes,
                                              {positions_, choices},
                                              weights != nullptr ? weights + first * choices : nullptr,
                                              units},
                 num);
      __syncthreads();
    }
  }

  // Units of AddTokens in a piece.
  template <typename Codec>
  JAXCOMM_DEVICE int32_t SumUnits() const {
    constexpr int kItem = static_cast<int>(sizeof(typename Codec::Storage));
    return static_cast<int32_t>(piece_bytes_ / (unit_bytes_ == 16 ? 16 : kItem));
  }
  template <typename Codec, typename Choices>
  JAXCOMM_DEVICE void Add(const TokenSums<typename Codec::Acc, Choices>& sums, int32_t num) const {
    constexpr int kItem = static_cast<int>(sizeof(typename Codec::Storage));
    if (unit_bytes_ == 16) {
      AddTokens<Codec, 16 / kItem>(sums, num);
    } else {
      AddTokens<Codec, 1>(sums, num);
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
  const PlacedRows placed_;   // the same memory
  int32_t* const ends_;
};

}  // namespace jaxcomm::cuda
#endif
