// Replaces emulation.h in programs for memory_model.h: the functions that kernels and headers of the device API use.
// Accesses to atomic words go to the model, and so do plain accesses, which the compiler reports
// (memory_model_explore.cc). memcpy is not reported; kernels use it for local variables only.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "memory_model.h"

namespace emulation {

struct Index {
  unsigned x = 0, y = 0;
};
struct Coordinates {
  Index thread, block, block_dim, grid_dim;
};

// blockIdx.y is the GPU.
inline Coordinates Current() {
  const memory_model::Program::Thread& self = memory_model::Self();
  const auto gpu = static_cast<unsigned>(self.place.gpu);
  return {{self.place.thread, 0}, {self.place.block, gpu}, {self.num_threads, 1}, {memory_model::NumBlocks(), 1}};
}

// A test of warps defines more.
#if !defined(LITMUS_WARP_THREADS)
#define LITMUS_WARP_THREADS 1
#endif
constexpr int kWarpThreads = LITMUS_WARP_THREADS;
constexpr int64_t kMostUnits = 1024;

using memory_model::Arrive;
using memory_model::ArriveGroup;
using memory_model::NowNs;
using memory_model::Pause;
inline void Trap() {}  // threads run on, as they may until CUDA has stopped them
inline void FenceAliases() { memory_model::AliasFence(); }
inline void AccessMulticast() {}
inline void* DynamicShared() { std::abort(); }

// Bulk copies. An mbarrier is the number of its phase. The emulation checks how many bytes it expects.
inline void FenceAsyncGlobal() { memory_model::AsyncFence(); }
inline void FenceAsyncShared() {}
inline void InitBulkBarrier(uint64_t* barrier) { *barrier = 0; }
inline void ExpectBytes(uint64_t*, int32_t) {}
inline bool IsPhaseComplete(const uint64_t* barrier, uint32_t parity) {
  return memory_model::Load(barrier, memory_model::kBlock, memory_model::kAcquire) % 2 != parity;
}
using memory_model::LoadBulk;
using memory_model::StoreBulk;
template <int kMost>
void WaitForReads() {
  memory_model::WaitForBulkReads(kMost);
}
using memory_model::WaitForStores;

using thread_scope = memory_model::Scope;
constexpr auto thread_scope_thread = memory_model::kThread, thread_scope_block = memory_model::kBlock,
               thread_scope_device = memory_model::kDevice, thread_scope_system = memory_model::kSystem;
using memory_order = memory_model::Order;
constexpr auto memory_order_relaxed = memory_model::kRelaxed, memory_order_acquire = memory_model::kAcquire,
               memory_order_release = memory_model::kRelease;

template <typename T, thread_scope kScope>
class atomic_ref {
 public:
  explicit atomic_ref(T& word) : word_(&word) {}
  T load(memory_order order) const { return memory_model::Load(word_, kScope, order); }
  void store(T value, memory_order order) const { memory_model::Store(word_, value, kScope, order); }
  bool compare_exchange_strong(T& expected, T desired, memory_order order) const {
    if (order != memory_order_relaxed) std::abort();
    return memory_model::CompareExchange(word_, &expected, desired, kScope);
  }
  T fetch_add(T value, memory_order order) const {
    if (order != memory_order_relaxed) std::abort();
    return memory_model::FetchAdd(word_, value, kScope);
  }

 private:
  T* const word_;
};

// st.relaxed.sys and ld.relaxed.sys of two words: PTX treats each word as an access of its own.
inline void StorePair(uint64_t* pair, uint64_t first, uint64_t second) {
  memory_model::Store(pair, first, memory_model::kSystem, memory_model::kRelaxed);
  memory_model::Store(pair + 1, second, memory_model::kSystem, memory_model::kRelaxed);
}
inline void LoadPair(const uint64_t* pair, uint64_t* first, uint64_t* second) {
  *first = memory_model::Load(pair, memory_model::kSystem, memory_model::kRelaxed);
  *second = memory_model::Load(pair + 1, memory_model::kSystem, memory_model::kRelaxed);
}

// The multicast object of the current program. Its addresses are those that the program has chosen.
struct Multicast {
  const memory_model::Program* program = nullptr;
  char* base = nullptr;
  int64_t bytes = 0;
  char* replicas[8] = {};
  int num_replicas = 0;
};
inline Multicast& TheMulticast() {
  static Multicast multicast;
  return multicast;
}
inline int NumReplicas(const void*) { return TheMulticast().num_replicas; }
inline void* Replica(void* address, int rank) {
  const Multicast& multicast = TheMulticast();
  return multicast.program->Alias(multicast.replicas[rank] + (static_cast<char*>(address) - multicast.base));
}

}  // namespace emulation

#include "cuda_names.h"
