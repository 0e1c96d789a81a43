#include "transport/node.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>

namespace jaxcomm {
namespace {

constexpr uint64_t kSmallestBlock = 4096;
constexpr uint64_t kMemoryBytes = 16 << 20;  // blocks of up to half that size share one memory
constexpr int kMaxReads = 512;

uint64_t RoundUp(uint64_t bytes) {
  uint64_t size = kSmallestBlock;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

Peer::Peer(int32_t process, const NodeAddress& address, int pidfd, std::unique_ptr<SharedMemory> control_segment)
    : process_(process),
      address_(address),
      pidfd_(pidfd),
      control_segment_memory_(std::move(control_segment)),
      control_segment_(*reinterpret_cast<ControlSegment*>(control_segment_memory_->data())) {}

Peer::Peer(int32_t process, Node& node)
    : process_(process), address_(node.address()), pidfd_(-1), control_segment_(node.control_segment()), node_(&node) {}

Peer::~Peer() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool Peer::CheckAlive() {
  if (!alive()) return false;
  pollfd ended{pidfd_, POLLIN, 0};
  if (poll(&ended, 1, 0) > 0) alive_.store(false);
  return alive();
}

StatusOr<char*> Peer::BlockOf(const Slot& slot) {
  if (node_ != nullptr) return node_->MemoryOf(slot.memory) + slot.offset;
  std::lock_guard<std::mutex> lock(mutex_);
  const uint32_t count = std::min<uint32_t>(control_segment().num_memories.load(), ControlSegment::kMaxMemories);
  if (slot.memory >= count) {
    return UnavailableError("process " + std::to_string(process_) + " has published a call in memory " +
                            std::to_string(slot.memory) + ", but has only " + std::to_string(count) + " memories");
  }
  if (memories_.size() <= slot.memory) memories_.resize(slot.memory + 1);
  std::unique_ptr<SharedMemory>& memory = memories_[slot.memory];
  const ControlSegment::Memory& announced = control_segment().memories[slot.memory];
  if (!memory) {
    StatusOr<std::unique_ptr<SharedMemory>> mapped = SharedMemory::Map(address_.pid, announced.fd, announced.bytes);
    if (!mapped.ok()) return mapped.status();
    memory = *std::move(mapped);
  }
  return memory->data() + slot.offset;
}

Status Node::Open() {
  if (is_open()) return OkStatus();
  StatusOr<std::unique_ptr<SharedMemory>> made = SharedMemory::Create(sizeof(ControlSegment));
  if (!made.ok()) return made.status();
  std::unique_ptr<SharedMemory> memory = *std::move(made);
  if (getrandom(address_.token.data(), sizeof(address_.token), 0) != sizeof(address_.token)) {
    return ErrnoToStatus("getrandom failed");
  }
  address_.pid = getpid();
  address_.control_segment_fd = memory->fd();
  address_.token_address = reinterpret_cast<uint64_t>(address_.token.data());
  auto* control_segment = new (memory->data()) ControlSegment;
  control_segment->token[0] = address_.token[0];
  control_segment->token[1] = address_.token[1];
  control_segment_memory_ = std::move(memory);
  return OkStatus();
}

Status Node::Connect(int32_t process, const NodeAddress& address) {
  std::lock_guard<std::mutex> lock(peers_mutex_);
  if (peers_.count(process) > 0) return OkStatus();
  // The handle is opened before the control segment is checked. So it cannot belong to a later process with the same
  // pid.
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, address.pid, 0));
  if (pidfd < 0) {
    return ErrnoToStatus("process " + std::to_string(address.pid) + " cannot be found");
  }
  StatusOr<std::unique_ptr<SharedMemory>> memory =
      SharedMemory::Map(address.pid, address.control_segment_fd, sizeof(ControlSegment));
  Status status = memory.status();
  if (memory.ok()) {
    const auto* control_segment = reinterpret_cast<const ControlSegment*>((*memory)->data());
    if (control_segment->magic != ControlSegment::kMagic || control_segment->token[0] != address.token[0] ||
        control_segment->token[1] != address.token[1]) {
      status = UnavailableError("process " + std::to_string(address.pid) +
                                " is not the process that published this address: its token differs");
    }
  }
  if (!status.ok()) {
    close(pidfd);
    return status;
  }
  peers_.emplace(process, std::make_unique<Peer>(process, address, pidfd, *std::move(memory)));
  return OkStatus();
}

void Node::ConnectTo(int32_t process, Node& other) {
  std::lock_guard<std::mutex> lock(peers_mutex_);
  peers_.emplace(process, std::make_unique<Peer>(process, other));
}

Peer* Node::Find(int32_t process) {
  std::lock_guard<std::mutex> lock(peers_mutex_);
  const auto found = peers_.find(process);
  return found == peers_.end() ? nullptr : found->second.get();
}

void Node::CheckAlive() {
  std::lock_guard<std::mutex> lock(peers_mutex_);
  for (const auto& entry : peers_) entry.second->CheckAlive();
}

StatusOr<Block> Node::AddMemory(uint64_t bytes) {
  if (memories_.size() == ControlSegment::kMaxMemories) {
    return UnavailableError("calls in flight need more than " + std::to_string(ControlSegment::kMaxMemories) +
                            " shared memories");
  }
  StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Create(bytes);
  if (!memory.ok()) return memory.status();
  const auto number = static_cast<uint32_t>(memories_.size());
  control_segment().memories[number] = {(*memory)->fd(), bytes};
  control_segment().num_memories.store(number + 1);
  memories_.push_back(*std::move(memory));
  return Block{number, 0, bytes, memories_.back()->data()};
}

StatusOr<Block> Node::Allocate(uint64_t bytes) {
  const uint64_t size = RoundUp(bytes);
  std::lock_guard<std::mutex> lock(blocks_mutex_);
  std::vector<Block>& free = free_[size];
  if (!free.empty()) {
    const Block block = free.back();
    free.pop_back();
    return block;
  }
  if (size > kMemoryBytes / 2) return AddMemory(size);
  if (rest_.bytes < size) {
    for (uint64_t read = kMemoryBytes; read >= kSmallestBlock; read /= 2) {
      // Adds the rest to the free lists, in blocks of powers of two.
      while (rest_.bytes >= read) {
        free_[read].push_back({rest_.memory, rest_.offset, read, rest_.data});
        rest_.offset += read;
        rest_.data += read;
        rest_.bytes -= read;
      }
    }
    const StatusOr<Block> added = AddMemory(kMemoryBytes);
    if (!added.ok()) return added.status();
    rest_ = *added;
  }
  const Block block = {rest_.memory, rest_.offset, size, rest_.data};
  rest_.offset += size;
  rest_.data += size;
  rest_.bytes -= size;
  return block;
}

void Node::Release(const Block& block) {
  std::lock_guard<std::mutex> lock(blocks_mutex_);
  free_[block.bytes].push_back(block);
}

char* Node::MemoryOf(uint32_t number) {
  std::lock_guard<std::mutex> lock(blocks_mutex_);
  return memories_[number]->data();
}

bool Node::AllowSingleCopy(const char* scope_file) {
  int scope = 0;  // no Yama, no restriction
  std::ifstream(scope_file) >> scope;
  if (scope == 1) prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  if (scope > 1) return false;
  // Containers may forbid the call itself.
  uint64_t from = 42, to = 0;
  const RemoteRead read{reinterpret_cast<char*>(&to), reinterpret_cast<const char*>(&from), sizeof(from)};
  return ReadFromProcess(getpid(), &read, 1) && to == from;
}

bool ReadFromProcess(pid_t pid, const RemoteRead* reads, int num_reads) {
  iovec local[kMaxReads], remote[kMaxReads];
  // Adjacent ranges are joined, because the kernel looks up the pages of each range separately.
  const auto append = [](iovec* ranges, unsigned long* count, char* data, size_t bytes) {
    if (*count > 0 && static_cast<char*>(ranges[*count - 1].iov_base) + ranges[*count - 1].iov_len == data) {
      ranges[*count - 1].iov_len += bytes;
    } else {
      ranges[(*count)++] = {data, bytes};
    }
  };
  for (int i = 0; i < num_reads;) {
    unsigned long num_local = 0, num_remote = 0;
    ssize_t bytes = 0;
    for (; i < num_reads && num_local < kMaxReads && num_remote < kMaxReads; ++i) {
      append(local, &num_local, reads[i].to, static_cast<size_t>(reads[i].bytes));
      append(remote, &num_remote, const_cast<char*>(reads[i].from), static_cast<size_t>(reads[i].bytes));
      bytes += reads[i].bytes;
    }
    // A short read means that memory is not mapped. The kernel's limit of 2 GiB per call is beyond the callers' reads.
    if (process_vm_readv(pid, local, num_local, remote, num_remote, 0) != bytes) return false;
  }
  return true;
}

}  // namespace jaxcomm
