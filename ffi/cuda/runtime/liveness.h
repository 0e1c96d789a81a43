// Which processes of the program live, and which have failed.
//
// Process 0 has a server, and every other process keeps a TCP connection to it. The operating system closes the
// connection when a process ends, in whichever way, so that a busy or stopped process is not mistaken for a dead one.
// The server tells all others, and they call Communicator::NoteFailure. A process with a failure of its own says so.
// One that ends as planned says so too; its end then only ends waits for it (SetLeft). If a host vanishes without
// closing its connections, TCP finds out within half a minute.
//
// Each message is a line of text.
#pragma once

#include <cstdint>
#include <string>

#include "common/status.h"

namespace jaxcomm::cuda {

// Starts the server, in process 0. Returns its port. Connections that do not begin with `token` are closed.
StatusOr<int> ServeLiveness(const std::string& token);

// Connects to the server, on a thread of its own, and prints a warning if it can't.
void JoinLiveness(const std::string& host, int port, const std::string& token, int32_t process);

// From now on, the end of this process is no failure.
void LeaveLiveness();

}  // namespace jaxcomm::cuda
