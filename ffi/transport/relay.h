// A relay between a client in this process and a TCP server, over a socket that other users cannot reach.
//
// JAX's client of the coordination service ends its process when its connection breaks. The relay keeps the connection
// open: after the loss of the server, the client's calls time out.
#pragma once

#include <string>

#include "common/status.h"

namespace jaxcomm {

// Listens on an abstract Unix socket for this user, on threads of its own, until the process ends. Returns the name of
// the socket. Until the server has been reached once, connections to an unreachable server are closed, so that the
// client tries again. Can be called once.
StatusOr<std::string> StartRelay(const std::string& host, const std::string& port);

// Whether the connection to the server was lost after it had been established, or closed by CloseRelayToServer().
bool RelayHasLostServer();

// Closes the connections to the server, which sees the end of the client's pending calls. The client does not.
void CloseRelayToServer();

}  // namespace jaxcomm
