// route and dispatch of few tokens inside a node, in one exchange of LL messages (include/jaxcomm/ll.h).
//
// Each rank sends the expert ids of all its choices to all ranks, and each row to the ranks that have one of its
// experts. From the ids of all ranks, every thread block computes the place of every choice, and learns which rows
// arrive here. It waits for these rows only, and stores them to the slots of their experts.
//
// A channel moves the same piece of every row, and exchanges all ids. So the thread blocks of a rank never wait for
// each other, and all of them find the same overflow before they write a slot of an expert. Nothing depends on the
// order of arrival: places are counted in the order of routing.py.
//
// Slots. All calls that have the same arena share its two sets of slots, whatever their shapes. A call that needs a
// larger arena makes another, with epochs of its own. An exchange is a kernel, and its epoch is the same on all
// channels. The slots of sender s in a set are [channel][unit] of this call.
// Proof that two sets suffice: a rank sends in epoch e once its own kernel of epoch e - 1 has ended. Every channel of
// it had then received the ids of every rank in epoch e - 1. So every rank had begun its kernel of epoch e - 1, and its
// kernel of epoch e - 2 had ended, the last one that read this set. No channel of an older call has a claim on a slot,
// even if that call had another shape.
//
// Sources: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls, for rows in slots of their own that are sent before the
// counts are known; NVIDIA/nccl:src/device/prims_ll.h, for LL. The order of the rows is jaxcomm's.
#pragma once

#include "cuda/kernels/rows.cuh"
#include "cuda/program/route_and_dispatch_args.h"
#include "include/jaxcomm/device.h"
#include "include/jaxcomm/ll.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// Outstanding loads of slots per thread.
constexpr int kRouteAndDispatchLoads = 4;

// Choices of each rank that are counted at once.
constexpr int32_t kCountedAtOnce = 32;

// The first `bytes` bytes of a unit, at most kUnitBytes, a multiple of the size of an Item. `from` is aligned to Items.
template <typename Item>
JAXCOMM_DEVICE uint64_t LoadUnit(const char* from, int64_t bytes) {
  constexpr int kItem = static_cast<int>(sizeof(Item));
  uint64_t payload = 0;
  JAXCOMM_UNROLL
  for (int at = 0; at < kUnitBytes; at += kItem) {
    if (at < bytes) payload |= static_cast<uint64_t>(*reinterpret_cast<const Item*>(from + at)) << (8 * at);
  }
  return payload;
}

template <typename Item>
JAXCOMM_DEVICE void StoreUnit(char* to, uint64_t payload, int64_t bytes) {
  constexpr int kItem = static_cast<int>(sizeof(Item));
  JAXCOMM_UNROLL
  for (int at = 0; at < kUnitBytes; at += kItem) {
    if (at < bytes) *reinterpret_cast<Item*>(to + at) = static_cast<Item>(payload >> (8 * at));
  }
}

// A thread block's part of a call.
class RouteAndDispatchCall {
 public:
  // `shared`: RouteAndDispatchSharedBytes().
  JAXCOMM_DEVICE RouteAndDispatchCall(const RouteAndDispatchArgs& args, int32_t channel, void* shared)
      : args_(args),
        comm_(args.comm),
        channel_(channel),
        num_local_(args.num_experts / args.comm.local.size),
        num_choices_(args.tokens * args.choices),
        padded_(IdUnits(args) * kIdsPerUnit),
        piece_at_(channel * args.piece_bytes),
        ids_(static_cast<int16_t*>(shared)),
        index_(reinterpret_cast<uint16_t*>(ids_ + padded_ * args.comm.local.size)),
        counts_(reinterpret_cast<int32_t*>(index_ + padded_ * args.comm.local.size)),
        totals_(counts_ + (args.num_experts + 1) * args.comm.local.size),
        starts_(totals_ + args.num_experts),
        first_(starts_ + args.num_experts) {
    const int64_t left = args.row_bytes - piece_at_;
    piece_bytes_ = left < args.piece_bytes ? left : args.piece_bytes;
    num_units_ = static_cast<int32_t>((piece_bytes_ + kUnitBytes - 1) / kUnitBytes);
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.y) |
                                static_cast<uintptr_t>(args.row_bytes) | kUnitBytes;
    item_bytes_ = static_cast<int32_t>(alignment & -alignment);
  }

  JAXCOMM_DEVICE void Run() {
    device::BeginCall(comm_);
    if (!Exchange() && channel_ == 0) WriteEmptyRouting();
    device::EndCall(comm_);
  }

 private:
  JAXCOMM_DEVICE int32_t n() const { return comm_.local.size; }
  JAXCOMM_DEVICE int32_t rank() const { return comm_.local.rank; }
  JAXCOMM_DEVICE static int32_t Thread() { return static_cast<int32_t>(threadIdx.x); }
  JAXCOMM_DEVICE static int32_t Threads() { return static_cast<int32_t>(blockDim.x); }
  JAXCOMM_DEVICE static int32_t Warp() { return Thread() / device::kWarpThreads; }
  JAXCOMM_DEVICE static int32_t Warps() { return (Threads() + device::kWarpThreads - 1) / device::kWarpThreads; }
  // The s-th peer. Each rank begins with a different one.
  JAXCOMM_DEVICE int32_t Peer(int32_t s) const { return (rank() + 1 + s) % n(); }

  // Choices are numbered as they are counted: first choices of all tokens before second ones.
  JAXCOMM_DEVICE int16_t& Id(int32_t of, int32_t choice) const { return ids_[of * padded_ + choice]; }
  JAXCOMM_DEVICE uint16_t& Index(int32_t of, int32_t choice) const { return index_[of * padded_ + choice]; }
  JAXCOMM_DEVICE int32_t& Count(int32_t of, int32_t expert) const {
    return counts_[of * (args_.num_experts + 1) + expert];
  }
  // Whether a row of rank `of` goes to an expert of rank `to`.
  JAXCOMM_DEVICE bool Goes(int32_t of, int32_t token, int32_t to) const {
    bool goes = false;
    for (int32_t k = 0; k < args_.choices; ++k) goes = goes || IsLocal(Id(of, k * args_.tokens + token), to);
    return goes;
  }
  JAXCOMM_DEVICE bool IsLocal(int32_t expert, int32_t to) const {
    return expert >= to * num_local_ && expert < (to + 1) * num_local_;
  }

  // In the slots of a sender: the channel's units of ids, and of the piece of a row.
  JAXCOMM_DEVICE int32_t IdUnit(int32_t unit) const { return channel_ * ChannelUnits(args_) + unit; }
  JAXCOMM_DEVICE int32_t RowUnit(int32_t token, int32_t unit) const {
    return IdUnit(IdUnits(args_)) + token * PieceUnits(args_) + unit;
  }
  JAXCOMM_DEVICE int64_t BytesBehind(int32_t unit) const { return piece_bytes_ - int64_t{unit} * kUnitBytes; }
  JAXCOMM_DEVICE const char* Piece(int32_t token) const { return args_.x + token * args_.row_bytes + piece_at_; }
  JAXCOMM_DEVICE char* Slot(int64_t slot) const { return args_.y + slot * args_.row_bytes + piece_at_; }

  // Returns false if the call has been refused, or a wait has ended without success: the kernel must end.
  JAXCOMM_DEVICE bool Exchange() {
    if (device::IsAborted(comm_)) return false;
    Begin();
    SendIds();
    __syncthreads();  // the own ids are in shared memory
    WithItem(item_bytes_, [&](auto item) {
      SendRows<decltype(item)>();
      return true;
    });
    if (__syncthreads_or(!ReceiveIds()) != 0) return false;
    CountChoices();
    if (!FindStarts()) return false;
    FindFirstRows();
    if (channel_ == 0) WriteRouting();
    ZeroGaps();
    const bool stored = WithItem(item_bytes_, [&](auto item) { return StoreRows<decltype(item)>(); });
    if (__syncthreads_or(!stored) != 0) return false;
    End();
    return true;
  }

  // Flags repeat after 2^32 exchanges: see IsSwept. Each channel sweeps its own units at all peers. The first one also
  // sweeps those behind, which belong to calls of other shapes. The thread that sweeps a unit of ids sends it, and a
  // barrier precedes the units of rows.
  JAXCOMM_DEVICE void Begin() {
    exchange_.epoch = device::LoadRelaxed(comm_.ll_slots.epochs + channel_) + 1;
    if (!device::IsSwept(exchange_.epoch)) return;
    Sweep(IdUnit(0), IdUnit(ChannelUnits(args_)));
    if (channel_ == 0) Sweep(args_.num_channels * ChannelUnits(args_), comm_.ll_slots.num_units);
  }
  JAXCOMM_DEVICE void Sweep(int32_t begin, int32_t end) const {
    for (int32_t s = 0; s + 1 < n(); ++s) {
      for (int32_t unit = begin + Thread(); unit < end; unit += Threads()) {
        device::StoreLl(device::SlotOf(comm_, exchange_, Peer(s), {rank(), unit}), 0, exchange_.flag() - 2);
      }
    }
  }

  // Also counts the epoch of channels that this call does not use: a later call with more channels needs equal epochs.
  JAXCOMM_DEVICE void End() const {
    if (Thread() != 0) return;
    device::StoreRelaxed(comm_.ll_slots.epochs + channel_, exchange_.epoch);
    for (int32_t c = args_.num_channels; channel_ == 0 && c < args_.num_epochs; ++c) {
      device::StoreRelaxed(comm_.ll_slots.epochs + c, exchange_.epoch);
    }
  }

  JAXCOMM_DEVICE void SendIds() {
    for (int32_t unit = Thread(); unit < IdUnits(args_); unit += Threads()) {
      uint64_t payload = 0;
      for (int32_t i = 0; i < kIdsPerUnit; ++i) {
        const int32_t choice = unit * kIdsPerUnit + i;
        int32_t id = -1;
        if (choice < num_choices_) id = args_.ids[choice % args_.tokens * args_.choices + choice / args_.tokens];
        id = id < 0 ? -1 : id < args_.num_experts ? id : args_.num_experts;
        Id(rank(), choice) = static_cast<int16_t>(id);
        payload |= static_cast<uint64_t>(static_cast<uint16_t>(id)) << (16 * i);
      }
      for (int32_t s = 0; s + 1 < n(); ++s) device::SendUnit(comm_, exchange_, Peer(s), IdUnit(unit), payload);
    }
  }

  // Each warp sends some rows. A rank sends without a wait: every row has slots of its own at the receiver.
  template <typename Item>
  JAXCOMM_DEVICE_CALLED void SendRows() {
    const device::Threads warp = device::OfWarp();
    for (int32_t i = Warp(); i < args_.tokens * (n() - 1); i += Warps()) {
      const int32_t token = i / (n() - 1), peer = Peer(i % (n() - 1));
      if (!Goes(rank(), token, peer)) continue;
      for (int32_t unit = warp.rank; unit < num_units_; unit += warp.size) {
        const uint64_t payload = LoadUnit<Item>(Piece(token) + int64_t{unit} * kUnitBytes, BytesBehind(unit));
        device::SendUnit(comm_, exchange_, peer, RowUnit(token, unit), payload);
      }
    }
  }

  JAXCOMM_DEVICE bool ReceiveIds() {
    const int32_t num = IdUnits(args_), all = num * (n() - 1);
    for (int32_t first = Thread(); first < all; first += kRouteAndDispatchLoads * Threads()) {
      const int32_t left = (all - first + Threads() - 1) / Threads();
      const int count = left < kRouteAndDispatchLoads ? left : kRouteAndDispatchLoads;
      const auto units = [&](int k) {
        const int32_t i = first + k * Threads();
        return device::LlUnit{Peer(i / num), IdUnit(i % num)};
      };
      uint64_t payloads[kRouteAndDispatchLoads];
      if (!device::ReceiveUnits<kRouteAndDispatchLoads>(comm_, exchange_, count, units, payloads, kLlExchange))
        return false;
      JAXCOMM_UNROLL
      for (int k = 0; k < kRouteAndDispatchLoads; ++k) {
        if (k >= count) continue;
        const int32_t i = first + k * Threads();
        for (int32_t j = 0; j < kIdsPerUnit; ++j) {
          Id(Peer(i / num), i % num * kIdsPerUnit + j) = static_cast<int16_t>(payloads[k] >> (16 * j));
        }
      }
    }
    return true;
  }

  // Counts the choices of every rank for every expert, and numbers them. Some choices at a time, in order: a choice
  // adds the earlier ones of the same expert among them to the count so far. The last one of an expert sets its count.
  JAXCOMM_DEVICE void CountChoices() {
    for (int32_t i = Thread(); i < n() * (args_.num_experts + 1); i += Threads()) counts_[i] = 0;
    for (int32_t first = 0; first < num_choices_; first += kCountedAtOnce) {
      const int32_t end = first + kCountedAtOnce < num_choices_ ? first + kCountedAtOnce : num_choices_;
      __syncthreads();
      ForChoices(first, end, [&](int32_t of, int32_t choice, int32_t expert) {
        int32_t index = Count(of, expert);
        for (int32_t c = first; c < choice; ++c) index += Id(of, c) == expert ? 1 : 0;
        Index(of, choice) = static_cast<uint16_t>(index);
      });
      __syncthreads();
      ForChoices(first, end, [&](int32_t of, int32_t choice, int32_t expert) {
        bool last = true;
        for (int32_t c = choice + 1; c < end; ++c) last = last && Id(of, c) != expert;
        if (last) Count(of, expert) = Index(of, choice) + 1;
      });
    }
    __syncthreads();
  }
  // f(rank, choice, expert) for the choices first .. end - 1 of all ranks. A choice has the same thread in every call.
  template <typename F>
  JAXCOMM_DEVICE void ForChoices(int32_t first, int32_t end, F f) const {
    for (int32_t i = Thread(); i < n() * kCountedAtOnce; i += Threads()) {
      const int32_t of = i / kCountedAtOnce, choice = first + i % kCountedAtOnce;
      const int32_t expert = choice < end ? Id(of, choice) : -1;
      if (expert >= 0) f(of, choice, expert);
    }
  }

  // The first row of every expert, at its rank. Returns false if the rows of a rank or expert do not fit, or if an
  // expert does not exist. All thread blocks of all ranks get the same result.
  JAXCOMM_DEVICE bool FindStarts() {
    for (int32_t e = Thread(); e < args_.num_experts; e += Threads()) {
      totals_[e] = 0;
      for (int32_t r = 0; r < n(); ++r) totals_[e] += Count(r, e);
    }
    __syncthreads();
    bool ok = true;
    for (int32_t r = Thread(); r < n(); r += Threads()) {
      int64_t next = 0;
      for (int32_t i = 0; i < num_local_; ++i) {
        const int32_t e = r * num_local_ + i;
        starts_[e] = args_.slots > 0 ? i * args_.slots : static_cast<int32_t>(next);
        next += Aligned(totals_[e]);
        ok = ok && (args_.slots == 0 || totals_[e] <= args_.slots);
      }
      ok = ok && (args_.slots > 0 || next <= args_.capacity) && Count(r, args_.num_experts) == 0;
    }
    if (__syncthreads_or(!ok) == 0) return true;
    if (Thread() == 0) {
      Report();
      device::AbortChannel(comm_, channel_);
    }
    return false;
  }
  JAXCOMM_DEVICE int64_t Aligned(int64_t rows) const { return (rows + args_.align - 1) / args_.align * args_.align; }

  // Rows that a rank needs, with padding.
  JAXCOMM_DEVICE int64_t Demand(int32_t of) const {
    int64_t demand = 0;
    for (int32_t e = of * num_local_; e < (of + 1) * num_local_; ++e) demand += Aligned(totals_[e]);
    return demand;
  }

  // Why the call is refused: the same problem on all ranks.
  JAXCOMM_DEVICE void Report() const {
    for (int32_t r = 0; r < n(); ++r) {
      const int32_t unknown = Count(r, args_.num_experts);
      if (unknown > 0) return Fail(r, kUnknownExperts, unknown, args_.num_experts);
    }
    for (int32_t e = 0; e < args_.num_experts && args_.slots > 0; ++e) {
      if (totals_[e] > args_.slots) return Fail(e / num_local_, kTooManyRowsOfExpert, totals_[e], args_.slots);
    }
    for (int32_t r = 0; r < n(); ++r) {
      if (Demand(r) > args_.capacity) return Fail(r, kTooManyRows, Demand(r), args_.capacity);
    }
  }
  JAXCOMM_DEVICE void Fail(int32_t peer, int32_t problem, int64_t expected, int64_t seen) const {
    device::Fail(comm_, channel_, peer, problem, static_cast<uint64_t>(expected), static_cast<uint64_t>(seen));
  }

  // The first row of each rank for each of the own experts.
  JAXCOMM_DEVICE void FindFirstRows() {
    for (int32_t i = Thread(); i < num_local_; i += Threads()) {
      int32_t next = starts_[rank() * num_local_ + i];
      for (int32_t r = 0; r < n(); ++r) {
        first_[r * num_local_ + i] = next;
        next += Count(r, rank() * num_local_ + i);
      }
    }
    __syncthreads();
  }

  JAXCOMM_DEVICE void WriteRouting() const {
    for (int32_t i = Thread(); i < num_choices_; i += Threads()) {
      const int32_t choice = i % args_.choices * args_.tokens + i / args_.choices;
      const int32_t expert = Id(rank(), choice);
      int32_t slot = -1;
      if (expert >= 0) {
        slot = starts_[expert] + Index(rank(), choice);
        for (int32_t r = 0; r < rank(); ++r) slot += Count(r, expert);
      }
      args_.slot[i] = slot;
      args_.expert[i] = expert;
    }
    for (int32_t i = Thread(); i < num_local_; i += Threads()) {
      const int32_t rows = totals_[rank() * num_local_ + i];
      args_.group_counts[i] = rows;
      args_.group_sizes[i] = args_.slots > 0 ? args_.slots : static_cast<int32_t>(Aligned(rows));
    }
    for (int32_t i = Thread(); i < n() * args_.num_experts; i += Threads()) {
      args_.table[i] = Count(i / args_.num_experts, i % args_.num_experts);
    }
    if (Thread() != 0) return;
    *args_.demand = static_cast<int32_t>(Demand(rank()));
    *args_.dropped = 0;
  }

  // After an error, the program runs on until its next call, so no group may reach outside of the slots.
  JAXCOMM_DEVICE void WriteEmptyRouting() const {
    for (int32_t i = Thread(); i < num_choices_; i += Threads()) args_.slot[i] = args_.expert[i] = -1;
    for (int32_t i = Thread(); i < num_local_; i += Threads()) args_.group_counts[i] = args_.group_sizes[i] = 0;
    for (int32_t i = Thread(); i < n() * args_.num_experts; i += Threads()) args_.table[i] = 0;
    if (Thread() == 0) *args_.demand = *args_.dropped = 0;
  }

  // Zeroes the slots without a row, while rows arrive. Each warp zeroes some of the gaps between groups. All threads
  // zero the gap behind the last group, which may be long.
  JAXCOMM_DEVICE void ZeroGaps() const {
    const int32_t first = rank() * num_local_;
    for (int32_t i = Warp(); i + 1 < num_local_; i += Warps()) {
      Zero(starts_[first + i] + totals_[first + i], starts_[first + i + 1], device::OfWarp());
    }
    const int32_t last = first + num_local_ - 1;
    Zero(starts_[last] + totals_[last], args_.capacity, device::OfBlock());
  }
  JAXCOMM_DEVICE void Zero(int64_t begin, int64_t end, device::Threads threads) const {
    if (begin >= end) return;
    const auto bytes = static_cast<int32_t>(piece_bytes_);
    const uintptr_t alignment = reinterpret_cast<uintptr_t>(args_.y) | static_cast<uintptr_t>(args_.row_bytes);
    if (alignment % sizeof(device::Bytes16) == 0) {
      ZeroPieces<device::Bytes16>(Slot(begin), args_.row_bytes, end - begin, bytes / 16, threads);
    } else {
      ZeroPieces<uint8_t>(Slot(begin), args_.row_bytes, end - begin, bytes, threads);
    }
  }

  // Each warp waits for some of the rows that arrive here, and stores them once per choice. The rank's own rows come
  // from its operand.
  template <typename Item>
  JAXCOMM_DEVICE_CALLED bool StoreRows() {
    const device::Threads warp = device::OfWarp();
    for (int32_t i = Warp(); i < args_.tokens * n(); i += Warps()) {
      const int32_t token = i / n(), from = Peer(i % n());
      if (!Goes(from, token, rank())) continue;
      for (int32_t first = warp.rank; first < num_units_; first += kRouteAndDispatchLoads * warp.size) {
        const int32_t left = (num_units_ - first + warp.size - 1) / warp.size;
        const int count = left < kRouteAndDispatchLoads ? left : kRouteAndDispatchLoads;
        uint64_t payloads[kRouteAndDispatchLoads] = {};
        if (from == rank()) {
          JAXCOMM_UNROLL
          for (int k = 0; k < kRouteAndDispatchLoads; ++k) {
            const int32_t unit = first + k * warp.size;
            if (k < count) payloads[k] = LoadUnit<Item>(Piece(token) + int64_t{unit} * kUnitBytes, BytesBehind(unit));
          }
        } else {
          const auto units = [&](int k) { return device::LlUnit{from, RowUnit(token, first + k * warp.size)}; };
          if (!device::ReceiveUnits<kRouteAndDispatchLoads>(comm_, exchange_, count, units, payloads, kLlExchange)) {
            return false;
          }
        }
        for (int32_t choice = token; choice < num_choices_; choice += args_.tokens) {
          const int32_t expert = Id(from, choice);
          if (!IsLocal(expert, rank())) continue;
          char* const to =
              Slot(int64_t{first_[from * num_local_ + expert - rank() * num_local_]} + Index(from, choice));
          JAXCOMM_UNROLL
          for (int k = 0; k < kRouteAndDispatchLoads; ++k) {
            const int32_t unit = first + k * warp.size;
            if (k < count) StoreUnit<Item>(to + int64_t{unit} * kUnitBytes, payloads[k], BytesBehind(unit));
          }
        }
      }
    }
    return true;
  }

  const RouteAndDispatchArgs& args_;
  const device::Comm& comm_;
  const int32_t channel_;
  const int32_t num_local_;    // experts of a rank
  const int32_t num_choices_;  // of a rank
  const int32_t padded_;       // the same, to a multiple of kIdsPerUnit
  const int64_t piece_at_;     // the channel's piece of a row, in bytes
  int64_t piece_bytes_ = 0;
  int32_t num_units_ = 0;   // of the piece
  int32_t item_bytes_ = 1;  // of loads and stores
  // Shared memory: see RouteAndDispatchSharedBytes.
  int16_t* const ids_;
  uint16_t* const index_;
  int32_t* const counts_;
  int32_t* const totals_;
  int32_t* const starts_;
  int32_t* const first_;
  device::LlExchange exchange_;  // of channel 0: the slots of a sender are those of all channels
};

}  // namespace jaxcomm::cuda
#endif
