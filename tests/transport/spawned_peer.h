// A peer in a process of its own, which runs the program of the test in another role.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "../../ffi/transport/network.h"
#include "../check.h"

namespace jaxcomm {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::time_point since) { return std::chrono::duration<double>(Clock::now() - since).count(); }

// Addresses go through files, in place of jax.distributed's key-value store.
inline std::string ReadWhenThere(const std::string& path) {
  for (const auto start = Clock::now(); Seconds(start) < 60;) {
    std::ifstream file(path, std::ios::binary);
    if (file) return std::string(std::istreambuf_iterator<char>(file), {});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::fprintf(stderr, "%s did not appear\n", path.c_str());
  std::exit(1);
}

inline void Meet(const std::string& folder, Network& self, int process, int peer) {
  const std::string path = folder + "/address" + std::to_string(process);
  std::ofstream(path + ".new", std::ios::binary) << self.address();
  CHECK(std::rename((path + ".new").c_str(), path.c_str()) == 0);
  const Status status = self.Connect(peer, ReadWhenThere(folder + "/address" + std::to_string(peer)));
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }
}

struct Folder {
  Folder() { CHECK(mkdtemp(path)); }
  ~Folder() { [[maybe_unused]] const int rc = std::system((std::string("rm -rf ") + path).c_str()); }
  char path[32] = "/tmp/jaxcomm_test.XXXXXX";
};

inline pid_t Spawn(const char* role, const char* folder) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    execl("/proc/self/exe", "test", role, folder, "1", nullptr);
    _exit(127);
  }
  CHECK(pid > 0);
  return pid;
}

}  // namespace jaxcomm
