// Memory that processes of one host share: an anonymous file without a name, freed with its last user.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/status.h"

namespace jaxcomm {

class SharedMemory {
 public:
  // Zeroed, with all pages reserved: later use cannot run out of memory.
  static StatusOr<std::unique_ptr<SharedMemory>> Create(size_t bytes);
  // Maps the file that process `pid` of this host has open as `fd`. The process must belong to the same user.
  static StatusOr<std::unique_ptr<SharedMemory>> Map(int pid, int fd, size_t bytes);
  // Maps the file behind an open descriptor of this process, which is closed.
  static StatusOr<std::unique_ptr<SharedMemory>> Map(int fd, size_t bytes, const std::string& name);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  char* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_; }  // -1 after Map

 private:
  SharedMemory(char* data, size_t size, int fd) : data_(data), size_(size), fd_(fd) {}

  char* data_;
  size_t size_;
  int fd_;
};

}  // namespace jaxcomm
