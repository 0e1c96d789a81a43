#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace jaxcomm {
namespace {

// No process may shrink the file while it is mapped: a read past its end would kill the reader.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

char* MapFile(int fd, size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

}  // namespace

StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(size_t bytes) {
  const int fd = memfd_create("jaxcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return ErrnoToStatus("cannot create anonymous shared memory (memfd_create)");
  char* data = nullptr;
  Status status;
  const int no_space = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (no_space != 0) {
    status = UnavailableError("cannot allocate " + std::to_string(bytes) +
                              " bytes of shared memory: " + std::strerror(no_space));
  } else if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    status = ErrnoToStatus("shared memory cannot be sealed");
  } else if ((data = MapFile(fd, bytes)) == nullptr) {
    status = ErrnoToStatus("shared memory cannot be mapped");
  }
  if (!status.ok()) {
    close(fd);
    return status;
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(data, bytes, fd));
}

StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int pid, int fd, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) return ErrnoToStatus(path + " cannot be opened");
  return Map(own, bytes, path);
}

StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd, size_t bytes, const std::string& name) {
  struct stat file{};
  char* data = nullptr;
  Status status;
  if (fstat(fd, &file) != 0 || static_cast<size_t>(file.st_size) != bytes || fcntl(fd, F_GET_SEALS) != kSeals) {
    status = UnavailableError(name + " is not a shared memory of jaxcomm with " + std::to_string(bytes) + " bytes");
  } else if ((data = MapFile(fd, bytes)) == nullptr) {
    status = ErrnoToStatus(name + " cannot be mapped");
  }
  close(fd);
  if (!status.ok()) return status;
  return std::unique_ptr<SharedMemory>(new SharedMemory(data, bytes, -1));
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

}  // namespace jaxcomm
