// Copies by bulk asynchronous copies (TMA, cp.async.bulk), from global memory through a ring of stages in shared memory
// to global memory, of this GPU or of peers. One thread of a block issues them, so the bytes in flight take shared
// memory and no registers. Compute capability 9.0 or later.
//
// Bulk copies access memory in the async proxy. Signals, barriers and all other accesses are in the generic proxy.
// docs/internals/cuda-bandwidth.md says which sentence of the PTX ISA each fence and wait here rests on:
// - Begin(): the copy may read and write only after a wait or barrier. A fence follows that wait or barrier.
// - A store follows the wait for the load of its piece. A load follows the wait until the stage's last piece was read.
// - Finish(): waits until all writes are complete, not only the reads of the stages. A fence follows, before the next
//   barrier and signal.
#pragma once

#include "cuda/program/bulk_ring.h"
#include "cuda/program/program.h"
#include "include/jaxcomm/device.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

#if !defined(__CUDACC__)
using emulation::ExpectBytes;
using emulation::FenceAsyncGlobal;
using emulation::FenceAsyncShared;
using emulation::InitBulkBarrier;
using emulation::IsPhaseComplete;
using emulation::LoadBulk;
using emulation::StoreBulk;
using emulation::WaitForReads;
using emulation::WaitForStores;
#else
#if __CUDA_ARCH__ >= 900
#define JAXCOMM_BULK_ASM(...) asm volatile(__VA_ARGS__)
#else  // the host gives no stages to kernels on GPUs without bulk copies
#define JAXCOMM_BULK_ASM(...) __trap()
#endif

JAXCOMM_DEVICE uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Order accesses to global memory, also that of peers, or to shared memory: those in the generic proxy with those in
// the async proxy, in both directions. Not fence.proxy.async, which is for both memories: ptxas of CUDA 13.0 makes it a
// fence for shared memory (FENCE.VIEW.ASYNC.S) behind a slow barrier (MEMBAR.ALL.GPU).
JAXCOMM_DEVICE void FenceAsyncGlobal() { JAXCOMM_BULK_ASM("fence.proxy.async.global;" :: : "memory"); }
JAXCOMM_DEVICE void FenceAsyncShared() { JAXCOMM_BULK_ASM("fence.proxy.async.shared::cta;" :: : "memory"); }

// Makes an mbarrier. One ExpectBytes() and as many bytes complete a phase of it.
JAXCOMM_DEVICE void InitBulkBarrier(uint64_t* barrier) {
  JAXCOMM_BULK_ASM("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(barrier)) : "memory");
}

JAXCOMM_DEVICE void ExpectBytes(uint64_t* barrier, int32_t bytes) {
  JAXCOMM_BULK_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
                   "r"(bytes) : "memory");
}

// Whether the phase of this parity is complete. Acquire, block scope. May wait for a short time.
JAXCOMM_DEVICE bool IsPhaseComplete(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 1;
  JAXCOMM_BULK_ASM(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(complete)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// Begins a copy to shared memory. Its end adds its bytes to the phase of the mbarrier. Both addresses and `bytes` are
// multiples of 16, here and in StoreBulk.
JAXCOMM_DEVICE void LoadBulk(void* stage, const void* from, int32_t bytes, uint64_t* barrier) {
  JAXCOMM_BULK_ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       SharedAddress(stage)),
                   "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(SharedAddress(barrier)) : "memory");
}

// Begins a copy from shared memory, as a bulk group of its own.
JAXCOMM_DEVICE void StoreBulk(void* to, const void* stage, int32_t bytes) {
  JAXCOMM_BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                   "r"(SharedAddress(stage)), "r"(bytes) : "memory");
  JAXCOMM_BULK_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

// Waits until at most `kMost` stores of this thread have not read their stages.
template <int kMost>
JAXCOMM_DEVICE void WaitForReads() {
  JAXCOMM_BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(kMost) : "memory");
}

// Waits until all stores of this thread are complete: their writes are visible to the thread.
JAXCOMM_DEVICE void WaitForStores() { JAXCOMM_BULK_ASM("cp.async.bulk.wait_group 0;" :: : "memory"); }
#undef JAXCOMM_BULK_ASM
#endif

// Issues the store of the oldest piece after its load. The load needs no peer, but this wait has a limit, as all waits
// have.
JAXCOMM_DEVICE void StoreOldest(BulkRing* ring, char* stages) {
  const uint32_t piece = ring->num_stored, num = static_cast<uint32_t>(ring->stages.num);
  const uint32_t stage = piece & (num - 1);
  const uint32_t parity = (piece & num) != 0 ? 1 : 0;  // of the stage's pieces
  BulkRing::Piece& oldest = ring->pieces[stage];
  ++ring->num_stored;
  uint64_t begin = 0;
  while (!ring->failed && !IsPhaseComplete(&oldest.loaded, parity)) {
    device::Pause();
    const device::Comm& comm = *ring->comm;
    const uint64_t now = device::NowNs();
    if (begin == 0) begin = now;
    if (now - begin < comm.timeout_ns) continue;
    ring->failed = true;
    device::Fail(comm, ring->channel, comm.local.rank, kBulkCopy, static_cast<uint64_t>(oldest.bytes), 0);
    device::AbortChannel(comm, ring->channel);
  }
  if (!ring->failed) StoreBulk(oldest.to, stages + int64_t{stage} * ring->stages.bytes, oldest.bytes);
}

JAXCOMM_DEVICE char* StagesOf(BulkRing* ring) {
  return reinterpret_cast<char*>(ring) - int64_t{ring->stages.num} * ring->stages.bytes;
}

// Issues a copy whose addresses and size are multiples of 16.
JAXCOMM_DEVICE_CALLED void PushBulk(BulkRing* ring, char* dst, const char* src, int64_t bytes) {
  char* const stages = StagesOf(ring);
  const BulkStages shape = ring->stages;
  const auto num = static_cast<uint32_t>(shape.num);
  while (bytes > 0) {
    if (ring->num_loaded - ring->num_stored == num - 1) StoreOldest(ring, stages);
    if (ring->failed) return;
    WaitForReads<1>();  // the next stage is that of the last store but one
    const uint32_t stage = ring->num_loaded & (num - 1);
    BulkRing::Piece& piece = ring->pieces[stage];
    piece.to = dst;
    piece.bytes = static_cast<int32_t>(bytes < shape.bytes ? bytes : shape.bytes);
    ExpectBytes(&piece.loaded, piece.bytes);
    LoadBulk(stages + int64_t{stage} * shape.bytes, src, piece.bytes, &piece.loaded);
    ++ring->num_loaded;
    dst += piece.bytes;
    src += piece.bytes;
    bytes -= piece.bytes;
  }
}

JAXCOMM_DEVICE_CALLED void FinishBulk(BulkRing* ring) {
  while (ring->num_stored != ring->num_loaded) StoreOldest(ring, StagesOf(ring));
  WaitForStores();
  FenceAsyncGlobal();
}

// The copies of a thread block, which replace those of copy.h. Like those, they neither wait for peers nor order
// accesses of different threads. Small enough to be passed by value.
class BulkCopies {
 public:
  // `shared`: BulkSharedBytes(stages). The object must be the only user of it, until the kernel ends. Called by all
  // threads of the block, as are all functions but the last three.
  JAXCOMM_DEVICE BulkCopies(const device::Comm& comm, int32_t channel, const BulkStages& stages, void* shared)
      : ring_(reinterpret_cast<BulkRing*>(static_cast<char*>(shared) + int64_t{stages.num} * stages.bytes)),
        stages_(stages) {
    if (stages.num == 0 || !Issues()) return;
    for (int32_t i = 0; i < stages.num; ++i) InitBulkBarrier(&ring_->pieces[i].loaded);
    FenceAsyncShared();  // bulk copies change these barriers
    ring_->stages = stages;
    ring_->num_loaded = ring_->num_stored = 0;
    ring_->failed = false;
    ring_->comm = &comm;
    ring_->channel = channel;
  }

  // Whether bulk copies of `num` ranges pay: a load and a store come one after the other, and the end waits for the
  // stores. Threads hold fewer bytes at once than this (kUnroll).
  JAXCOMM_DEVICE bool Pays(int32_t num, int64_t most_bytes) const {
    return stages_.num > 0 && num * most_bytes >= HalfRing();
  }
  // Whether a range can be copied in bulk, and is not too short for it.
  JAXCOMM_DEVICE bool Takes(const device::CopyRange& range) const {
    const uintptr_t difference = reinterpret_cast<uintptr_t>(range.dst) ^ reinterpret_cast<uintptr_t>(range.src);
    return stages_.num > 0 && range.bytes >= stages_.bytes / 4 && (difference & 15) == 0;
  }

  // As device::Copy, by all threads of the block.
  JAXCOMM_DEVICE void Copy(char* dst, const char* src, int64_t bytes) const {
    if (!Pays(1, bytes) || !Takes({dst, src, bytes})) return device::Copy(dst, src, bytes);
    CopyRanges(1, bytes, [&](int32_t) { return device::CopyRange{dst, src, bytes}; });
  }

  // As device::CopyRanges.
  template <typename Range>
  JAXCOMM_DEVICE void CopyRanges(int32_t num, int64_t most_bytes, Range range) const {
    const bool pays = Pays(num, most_bytes);
    bool any = false, all = pays;
    for (int32_t i = 0; pays && i < num; ++i) {
      const bool takes = Takes(range(i));
      any = any || takes;
      all = all && takes;
    }
    if (!all) {
      device::CopyRanges(num, most_bytes, [&](int32_t i) {
        const device::CopyRange of = range(i);
        return pays && Takes(of) ? device::CopyRange{} : of;
      });
    }
    if (!any) return;
    CopyInBulk(*this, num, most_bytes, range);
  }

  // For loops that find their own pieces. Called by the thread for which Issues() is true.
  JAXCOMM_DEVICE static bool Issues() { return threadIdx.x == 0; }
  JAXCOMM_DEVICE void Begin() const { FenceAsyncGlobal(); }
  // Addresses and size are multiples of 16.
  JAXCOMM_DEVICE void Push(const device::CopyRange& range) const { PushBulk(ring_, range.dst, range.src, range.bytes); }
  JAXCOMM_DEVICE void Finish() const { FinishBulk(ring_); }

 private:
  // The ranges that Takes() accepts. A function of its own, so that the loops of others keep their registers.
  template <typename Range>
  JAXCOMM_DEVICE_CALLED static void CopyInBulk(BulkCopies copies, int32_t num, int64_t most_bytes, Range range) {
    copies.CopyEnds(num, range);
    if (!Issues()) return;
    const int64_t turn = copies.HalfRing();  // several pieces, because it takes time to find a range
    copies.Begin();
    for (int64_t at = 0; at < most_bytes; at += turn) {
      for (int32_t i = 0; i < num; ++i) {
        const device::CopyRange of = range(i);
        if (!copies.Takes(of)) continue;
        const device::CopyRange body = Body(of);
        const int64_t left = body.bytes - at;
        copies.Push({body.dst + at, body.src + at, left < turn ? left : turn});
      }
    }
    copies.Finish();
  }

  JAXCOMM_DEVICE int64_t HalfRing() const { return int64_t{stages_.num} / 2 * stages_.bytes; }

  // The whole units of 16 bytes.
  JAXCOMM_DEVICE static device::CopyRange Body(const device::CopyRange& range) {
    const int64_t head = HeadBytes(range);
    return {range.dst + head, range.src + head, (range.bytes - head) & ~int64_t{15}};
  }
  JAXCOMM_DEVICE static int64_t HeadBytes(const device::CopyRange& range) {
    const auto to_boundary = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(range.dst) & 15);
    return to_boundary < range.bytes ? to_boundary : range.bytes;
  }

  // Copies the bytes before and behind the bodies.
  template <typename Range>
  JAXCOMM_DEVICE void CopyEnds(int32_t num, Range range) const {
    constexpr int32_t kMost = 32;  // of a range
    for (int32_t k = static_cast<int32_t>(threadIdx.x); k < num * kMost; k += static_cast<int32_t>(blockDim.x)) {
      const device::CopyRange of = range(k / kMost);
      if (!Takes(of)) continue;
      const int64_t head = HeadBytes(of), body = Body(of).bytes;
      const int64_t byte = k % kMost < head ? k % kMost : k % kMost + body;
      if (byte < of.bytes) of.dst[byte] = of.src[byte];
    }
  }

  BulkRing* ring_;  // shared memory
  BulkStages stages_;
};

}  // namespace jaxcomm::cuda
#endif
