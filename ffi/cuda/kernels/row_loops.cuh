// Work of all threads of a block, for rows.cuh: sums of numbers, and loops over a piece of each row, which copy, zero
// or add. slices.cuh finds its moves by the same sums.
#pragma once

#include "cuda/kernels/reductions.h"
#include "cuda/program/row_args.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// The sum of the values of the threads before this one, and of all threads. Called by all threads. `sums`: shared
// memory, an integer per thread.
struct ThreadSum {
  int32_t before, all;
};
JAXCOMM_DEVICE ThreadSum SumOfThreads(int32_t value, int32_t* sums) {
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  sums[thread] = value;
  __syncthreads();
  for (int32_t step = 1; step < threads; step *= 2) {
    const int32_t before = thread >= step ? sums[thread - step] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  const ThreadSum sum = {sums[thread] - value, sums[threads - 1]};
  __syncthreads();  // the caller may overwrite them
  return sum;
}

// ends[i]: the sum of size(0) .. size(i), for i < num. Called by all threads. `shared`: as in SumOfThreads.
template <typename Size>
JAXCOMM_DEVICE void SumSizes(int32_t* ends, int32_t num, int32_t* shared, Size size) {
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  int32_t total = 0;
  for (int32_t base = 0; base < num; base += threads) {
    const int32_t i = base + thread, own = i < num ? static_cast<int32_t>(size(i)) : 0;
    const ThreadSum sum = SumOfThreads(own, shared);
    if (i < num) ends[i] = total + sum.before + own;
    total += sum.all;
  }
  __syncthreads();
}
// The sum of size(0) .. size(i - 1).
JAXCOMM_DEVICE int32_t BeginOf(const int32_t* ends, int32_t i) { return i > 0 ? ends[i - 1] : 0; }
// The first of `num` ends that lies behind j.
JAXCOMM_DEVICE int32_t FirstEndBehind(const int32_t* ends, int32_t num, int64_t j) {
  int32_t low = 0, high = num - 1;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (ends[middle] > j) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Units of one call of CopyMoves, CopyTokens or AddTokens: 31 bits count them. Fewer in the emulation, where calls are
// small.
#if defined(__CUDACC__)
constexpr int64_t kMostUnits = int64_t{1} << 30;
#else
constexpr int64_t kMostUnits = emulation::kMostUnits;
#endif

// Rows of a token that a thread loads before it adds the first.
constexpr int kRowLoads = 8;

// A product and a sum, each rounded, as on CPUs. nvcc would make one fused operation of `a * b + c`.
#if defined(__CUDACC__)
JAXCOMM_DEVICE float RoundedProduct(float a, float b) { return __fmul_rn(a, b); }
JAXCOMM_DEVICE double RoundedProduct(double a, double b) { return __dmul_rn(a, b); }
#else
template <typename T>
T RoundedProduct(T a, T b) {
  return a * b;
}
#endif

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

// Choices whose rows a thread block reads at once, in shared memory. The choices of one token are next to each other.
struct PlacedRows {
  const char** from;  // of each choice, then of each token; null: zeros
  int32_t* slot;      // of each choice
  int32_t* begin;     // of each token, among the choices
};

// Loads a piece of `units` units of `tokens` rows, and stores each of them to all slots of its token, by all threads of
// the block. `slots`: the piece of slot 0. `end`: of the last token.
template <typename Unit>
JAXCOMM_DEVICE_CALLED void CopyTokens(const PlacedRows rows, int32_t tokens, int32_t end, int32_t units, char* slots,
                                      int64_t row_bytes) {
#if defined(__CUDACC__)
  __builtin_assume(__isShared(rows.from));
  __builtin_assume(__isShared(rows.slot));
  __builtin_assume(__isShared(rows.begin));
#endif
  device::Pass(
      static_cast<int64_t>(tokens) * units, device::OfBlock(),
      [&](int64_t i) {
        const auto token = static_cast<uint32_t>(i) / static_cast<uint32_t>(units);
        const auto* const from = reinterpret_cast<const Unit*>(rows.from[token]);
        return from != nullptr ? from[static_cast<uint32_t>(i) - token * units] : Unit{};
      },
      [&](int64_t i, const Unit& unit) {
        const auto token = static_cast<int32_t>(static_cast<uint32_t>(i) / static_cast<uint32_t>(units));
        const int32_t last = token + 1 < tokens ? rows.begin[token + 1] : end;
        for (int32_t k = rows.begin[token]; k < last; ++k) {
          reinterpret_cast<Unit*>(slots + rows.slot[k] * row_bytes)[static_cast<int32_t>(i) - token * units] = unit;
        }
      });
}

template <typename Unit>
JAXCOMM_DEVICE_CALLED void ZeroPieces(char* first, int64_t row_bytes, int64_t num, int32_t units,
                                      device::Threads threads) {
  for (int64_t i = threads.rank; i < num * units; i += threads.size) {
    reinterpret_cast<Unit*>(first + i / units * row_bytes)[i % units] = Unit{};
  }
}

// The rows of each token, one for each of its choices: the same number for all, in shared memory.
struct EqualChoices {
  static constexpr bool kShared = true;
  const int32_t* positions;  // [token][choice]; -1: no row
  int32_t num;

  JAXCOMM_DEVICE int64_t Begin(uint32_t token) const { return static_cast<int64_t>(token) * num; }
  JAXCOMM_DEVICE int32_t Num(uint32_t /*token*/) const { return num; }
};

// The same for tokens with different numbers of choices, in device memory.
struct ListedChoices {
  static constexpr bool kShared = false;
  const int32_t* positions;  // one token after the other; -1: no row
  const int32_t* ends;       // by token
  int64_t first;             // the token that the others are counted from

  JAXCOMM_DEVICE int64_t Begin(uint32_t token) const { return first + token > 0 ? ends[first + token - 1] : 0; }
  JAXCOMM_DEVICE int32_t Num(uint32_t token) const { return static_cast<int32_t>(ends[first + token] - Begin(token)); }
};

// Where the sums of some tokens come from and go to: a piece of every row.
template <typename Acc, typename Choices>
struct TokenSums {
  const char* rows;
  int64_t from_bytes;  // from one row to the next
  char* y;             // of the first token
  int64_t to_bytes;    // from one token to the next
  Choices choices;
  const Acc* weights;  // of each choice; null: ones
  int32_t units;       // of kLanes elements, in a piece
};

// The sums of `num` tokens, by all threads of the block. A thread loads up to kRowLoads rows before it adds the first.
template <typename Codec, int kLanes, typename Choices>
JAXCOMM_DEVICE_CALLED void AddTokens(const TokenSums<typename Codec::Acc, Choices> sums, int32_t num) {
  using Acc = typename Codec::Acc;
  using Units = device::Unit<Codec, kLanes>;
  using Loaded = device::Raw<sizeof(Units)>;
#if defined(__CUDACC__)
  if constexpr (Choices::kShared) __builtin_assume(__isShared(sums.choices.positions));
#endif
  const auto units = static_cast<uint32_t>(sums.units);
  for (auto i = static_cast<uint32_t>(threadIdx.x); i < static_cast<uint32_t>(num) * units; i += blockDim.x) {
    const uint32_t token = i / units, unit = i - token * units;
    const int64_t choice = sums.choices.Begin(token);
    const int32_t choices = sums.choices.Num(token);
    device::Accumulator<Codec, kLanes> sum = {};
    for (int32_t k = 0; k < choices; k += kRowLoads) {
      int32_t at[kRowLoads];
      Acc weights[kRowLoads];
      Loaded rows[kRowLoads] = {};
      JAXCOMM_UNROLL
      for (int j = 0; j < kRowLoads; ++j) at[j] = k + j < choices ? sums.choices.positions[choice + k + j] : -1;
      JAXCOMM_UNROLL
      for (int j = 0; j < kRowLoads; ++j) {
        weights[j] = at[j] >= 0 && sums.weights != nullptr ? sums.weights[choice + k + j] : Acc(1);
        if (at[j] >= 0) rows[j] = reinterpret_cast<const Loaded*>(sums.rows + at[j] * sums.from_bytes)[unit];
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
    reinterpret_cast<Units*>(sums.y + token * sums.to_bytes)[unit] = sum.Get();
  }
}

}  // namespace jaxcomm::cuda
#endif
