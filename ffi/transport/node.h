// The peers of this process on its host: their control segments, their memory and their liveness.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/status.h"
#include "transport/control_segment.h"
#include "transport/shared_memory.h"

namespace jaxcomm {

// The address of a process for its peers on the host, published in jax.distributed's key-value store.
struct NodeAddress {
  int32_t pid = 0;
  int32_t control_segment_fd = -1;
  std::array<uint64_t, 2> token = {};  // random; identifies the control segment
  uint64_t token_address = 0;          // of a copy in the owner's private memory, for a trial of remote reads
};

// A range of shared memory, as its owner sees it.
struct Block {
  uint32_t memory = 0;  // index in ControlSegment::memories
  uint64_t offset = 0;
  uint64_t bytes = 0;
  char* data = nullptr;
};

class Node;

class Peer {
 public:
  Peer(int32_t process, const NodeAddress& address, int pidfd, std::unique_ptr<SharedMemory> control_segment);
  Peer(int32_t process, Node& node);
  ~Peer();

  int32_t process() const { return process_; }
  pid_t pid() const { return address_.pid; }
  ControlSegment& control_segment() const { return control_segment_; }
  // The address of a slot's block in this process.
  StatusOr<char*> BlockOf(const Slot& slot);
  // Queries the kernel. False once the process has ended.
  bool CheckAlive();
  bool alive() const { return alive_.load(); }

 private:
  const int32_t process_;
  const NodeAddress address_;
  const int pidfd_;
  const std::unique_ptr<SharedMemory> control_segment_memory_;
  ControlSegment& control_segment_;
  Node* const node_ = nullptr;  // the node of a ConnectTo() peer in this process; null: another process
  std::atomic<bool> alive_{true};
  std::mutex mutex_;
  std::vector<std::unique_ptr<SharedMemory>> memories_;
};

class Node {
 public:
  // Creates the own control segment.
  Status Open();
  bool is_open() const { return control_segment_memory_ != nullptr; }
  const NodeAddress& address() const { return address_; }
  ControlSegment& control_segment() const {
    return *reinterpret_cast<ControlSegment*>(control_segment_memory_->data());
  }
  std::mutex& control_segment_mutex() {
    return control_segment_mutex_;
  }  // for operations of the owner that need one thread at a time

  // Maps the control segment of another process. A second call for the same process does nothing.
  Status Connect(int32_t process, const NodeAddress& address);
  // For tests with several nodes in one process: uses the memory of `other` directly. With a second mapping, sanitizers
  // would not see the order of accesses.
  void ConnectTo(int32_t process, Node& other);
  Peer* Find(int32_t process);  // null: not connected. Peers live as long as the node.
  void CheckAlive();            // all peers

  // At least `bytes` bytes of shared memory, aligned to a cache line.
  StatusOr<Block> Allocate(uint64_t bytes);
  void Release(const Block& block);
  char* MemoryOf(uint32_t number);  // address of ControlSegment::memories[number] of this process

  // Whether processes of one user may read each other's memory (process_vm_readv). Permits others to read this process
  // where the kernel requires it (Yama, whose setting is in `scope_file`).
  static bool AllowSingleCopy(const char* scope_file = "/proc/sys/kernel/yama/ptrace_scope");

 private:
  StatusOr<Block> AddMemory(uint64_t bytes);

  NodeAddress address_;
  std::unique_ptr<SharedMemory> control_segment_memory_;
  std::mutex control_segment_mutex_;
  std::mutex peers_mutex_;
  std::map<int32_t, std::unique_ptr<Peer>> peers_;
  std::mutex blocks_mutex_;
  std::vector<std::unique_ptr<SharedMemory>> memories_;
  Block rest_;                                   // unused end of the memory that blocks are allocated from
  std::map<uint64_t, std::vector<Block>> free_;  // by size, a power of two
};

// Reads from another process. False if the process has ended or the memory is not mapped there any more.
struct RemoteRead {
  char* to;
  const char* from;  // in the other process
  int64_t bytes;
};
bool ReadFromProcess(pid_t pid, const RemoteRead* reads, int num_reads);

}  // namespace jaxcomm
