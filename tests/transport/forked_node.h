// A process of the same host with a node, which does nothing else. Forked, so it must come before cases that start
// threads.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <iterator>

#include "../../ffi/transport/node.h"
#include "../check.h"

namespace jaxcomm {

// Open descriptors of this process.
inline int NumFiles() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<int>(std::distance(begin(files), end(files)));
}

struct ForkedNode {
  pid_t pid = -1;
  NodeAddress address;

  // The child calls prepare(node) before its address is known.
  explicit ForkedNode(const std::function<void(Node&)>& prepare = [](Node&) {}) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // also if a check ends the test
      Node node;
      CHECK(node.Open().ok());
      prepare(node);
      CHECK(write(ends[1], &node.address(), sizeof(address)) == sizeof(address));
      for (;;) pause();
    }
    close(ends[1]);
    CHECK(read(ends[0], &address, sizeof(address)) == sizeof(address));
    close(ends[0]);
  }
  void Kill() const { CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid); }
};

}  // namespace jaxcomm
