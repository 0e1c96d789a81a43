// Carries the bytes of a client in this process to a TCP server and back, over a socket that nobody else can use.
//
// JAX's client of the coordination service ends its process as soon as its connection breaks. A relay never breaks it:
// when the server has gone, the client's calls get no answer until they time out.
#pragma once

#include <string>

#include "../common/status.h"

namespace jaxcomm {

// Listens on an abstract Unix socket for this user, from threads of its own, for as long as the process lives. Returns
// the name of the socket. While the server can't be reached for the first time, connections are closed, so that the
// client tries again. Can be called once.
StatusOr<std::string> StartRelay(const std::string& host, const std::string& port);

// Whether the server had been reached and has gone.
bool RelayHasLostServer();

}  // namespace jaxcomm
