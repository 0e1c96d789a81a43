// Bulk copies (ffi/cuda/kernels/bulk_copy.cuh) in the emulation, as late as the instructions allow: a load writes its
// stage at once or when its thread waits for it, a store reads its stage when its thread waits for the reads, and
// writes when its thread waits for the end. Without a wait, the bytes are wrong.
//
// Also checked: addresses and sizes, and the fences between the proxies. A fence must lie between a thread's last
// barrier and its bulk copies, and between their end and the next barrier, as behind a barrier the generic proxy of
// another thread may access the same memory.
#pragma once

namespace emulation {

// An mbarrier: bytes that are missing (low half), whether ExpectBytes() was called, number of the phase.
constexpr uint64_t kArrived = uint64_t{1} << 32, kPhase = uint64_t{1} << 33;

inline void CheckBulk(const void* a, const void* b, int32_t bytes) {
  const auto ends = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | static_cast<uintptr_t>(bytes);
  if (ends % 16 != 0 || bytes <= 0) Abort("a bulk copy of bytes that are no whole units of 16");
}

inline void AddBytes(uint64_t* barrier, int32_t bytes) {
  *barrier = (*barrier & ~uint64_t{0xffffffff}) | static_cast<uint32_t>(static_cast<int32_t>(*barrier) + bytes);
}

[[maybe_unused]] EMULATION_UNCHECKED static void FenceAsyncGlobal() {
  BulkCopies& bulk = Current().bulk;
  bulk.fenced = true;
  bulk.unfenced = !bulk.loads.empty() || !bulk.stores.empty();
}

[[maybe_unused]] EMULATION_UNCHECKED static void FenceAsyncShared() { Current().bulk.new_barriers = false; }

inline void InitBulkBarrier(uint64_t* barrier) {
  *barrier = 0;
  Current().bulk.new_barriers = true;
}

inline void ExpectBytes(uint64_t* barrier, int32_t bytes) {
  if ((*barrier & kArrived) != 0) Abort("a phase of an mbarrier that expects bytes twice");
  AddBytes(barrier, bytes);
  *barrier |= kArrived;
}

inline void RunLoad(const BulkCopies::Load& load) {
  std::memcpy(load.stage, load.from, static_cast<size_t>(load.bytes));
  AddBytes(load.barrier, -load.bytes);
  uint64_t& phase = *load.barrier;
  if ((phase & kArrived) != 0 && static_cast<int32_t>(phase) == 0) phase = (phase ^ kPhase) & ~kArrived;
}

inline void LoadBulk(void* stage, const void* from, int32_t bytes, uint64_t* barrier) {
  BulkCopies& bulk = Current().bulk;
  CheckBulk(stage, from, bytes);
  if (!bulk.fenced) Abort("no fence separates a barrier from a bulk copy");
  if (bulk.new_barriers) Abort("no fence separates the initialization of an mbarrier from a bulk copy");
  bulk.unfenced = true;
  const BulkCopies::Load load = {stage, from, bytes, barrier};
  if (TheMachine().loses_loads) return;
  if (FlipCoin()) return RunLoad(load);
  std::memset(stage, 0xee, static_cast<size_t>(bytes));
  bulk.loads.push_back(load);
}

inline bool IsPhaseComplete(uint64_t* barrier, uint32_t parity) {
  std::vector<BulkCopies::Load>& loads = Current().bulk.loads;
  const auto late = std::find_if(loads.begin(), loads.end(), [&](const auto& load) { return load.barrier == barrier; });
  if (late != loads.end()) {
    if (FlipCoin()) return false;
    RunLoad(*late);
    loads.erase(late);
  }
  return ((*barrier & kPhase) != 0 ? 1 : 0) != parity;
}

inline void StoreBulk(void* to, const void* stage, int32_t bytes) {
  BulkCopies& bulk = Current().bulk;
  CheckBulk(to, stage, bytes);
  if (!bulk.fenced) Abort("no fence separates a barrier from a bulk copy");
  bulk.unfenced = true;
  bulk.stores.push_back({to, stage, bytes, {}});
}

inline void ReadStages(size_t most) {
  std::vector<BulkCopies::Store>& stores = Current().bulk.stores;
  for (size_t i = 0; i + most < stores.size(); ++i) {
    const char* const stage = static_cast<const char*>(stores[i].stage);
    if (stores[i].read.empty()) stores[i].read.assign(stage, stage + stores[i].bytes);
  }
}

template <int kMost>
void WaitForReads() {
  ReadStages(kMost);
}

inline void WaitForStores() {
  ReadStages(0);
  for (const BulkCopies::Store& store : Current().bulk.stores) {
    std::memcpy(store.to, store.read.data(), store.read.size());
  }
  Current().bulk.stores.clear();
}

}  // namespace emulation
