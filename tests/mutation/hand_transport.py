"""Mistakes in ffi/transport, of the kind that a careful author makes."""

from mutation.hand import Mutant

NODE, SEGMENT, QUEUE, UCX, WORKER = (
    f"ffi/transport/{name}.cc" for name in ("node", "control_segment", "receive_queue", "ucx_network", "ucx_worker")
)
LIBRARY = "ffi/transport/ucx_library.cc"

MUTANTS = [
    # Nodes and control segments.
    Mutant("a short read is a success", NODE, " !=\n        bytes) {", " < 0) {", "test_node"),
    Mutant("the second call reads the first pieces", NODE, "    reads += count;\n", "", "test_node"),
    Mutant(
        "a process that cannot be polled counts as ended",
        NODE,
        "if (poll(&ended, 1, 0) > 0)",
        "if (poll(&ended, 1, 0) >= 0)",
        "test_node test_inter_process_failures",
    ),
    Mutant(
        "a stranger with half the token is let in",
        NODE,
        "control_segment->token[0] != address.token[0] ||\n        control_segment->token[1] != address.token[1]) {",
        "control_segment->token[0] != address.token[0]) {",
        "test_node",
    ),
    Mutant(
        "the rest of a memory is lost",
        NODE,
        "      while (rest_.bytes >= read) {",
        "      while (false) {",
        "test_node",
    ),
    Mutant(
        "blocks of a memory begin at its start",
        NODE,
        "  rest_.offset += size;\n  rest_.data += size;\n  rest_.bytes -= size;\n  return block;",
        "  rest_.data += size;\n  rest_.bytes -= size;\n  return block;",
        "test_node test_inter_process_endings test_inter_process_call",
    ),
    Mutant("a doorbell without effect", SEGMENT, "  doorbell.fetch_add(1);\n", "", "test_node"),
    Mutant(
        "microseconds for nanoseconds",
        SEGMENT,
        "max_ns / 1'000'000'000, max_ns %",
        "max_ns / 1'000'000, max_ns %",
        "test_node",
    ),
    Mutant("a failure is found before it is written", SEGMENT, "version == 0 || failure", "failure", "test_node"),
    Mutant(
        "the last bytes of a reason are lost",
        SEGMENT,
        "    if (word * 8 < text.size())",
        "    if (word * 8 + 8 <= text.size())",
        "test_node",
    ),
    Mutant(
        "early messages are not announced",
        QUEUE,
        "    ++peer.next;\n    Announce(peer, held.envelope",
        "    Announce(peer, held.envelope",
        "test_receive_queue",
    ),
    Mutant(
        "an early message points into the network's buffer",
        QUEUE,
        "    held.data = Copy(data, bytes);\n    held.remote = std::move(remote);\n    return {};",
        "    held.remote = std::move(remote);\n    return {};",
        "test_receive_queue",
    ),
    Mutant(
        "a message that comes twice is delivered twice",
        QUEUE,
        "  if (sequence < peer.next || peer.held.count(sequence)) {",
        "  if (peer.held.count(sequence)) {",
        "test_receive_queue",
    ),
    Mutant(
        "a message without payload overtakes a waiting one",
        QUEUE,
        "  if (ready && !peer.channels.count(envelope.channel)) return",
        "  if (ready) return",
        "test_receive_queue",
    ),
    Mutant(
        "a payload is given two places",
        QUEUE,
        "it == peer.held.end() || id >= peer.next || it->second.placed) return;",
        "it == peer.held.end() || id >= peer.next) return;",
        "test_receive_queue",
    ),
    Mutant(
        "an unwanted message is delivered",
        QUEUE,
        "    if (!first->second.dropped) Deliver",
        "    Deliver",
        "test_receive_queue",
    ),
    Mutant(
        "a peer is reported lost while it still writes",
        QUEUE,
        "  if (peer.num_fetches > 0 || peer.reported) return;",
        "  if (peer.reported) return;",
        "test_receive_queue",
    ),
    Mutant(
        "a fetch that failed is a success",
        QUEUE,
        '  if (!ok) return Lose(it->second.envelope.process, "fetching a payload from it failed");\n',
        "",
        "test_receive_queue",
    ),
    Mutant(
        "messages before a disconnect are dropped",
        QUEUE,
        "    if (all_here) return;\n",
        "",
        "test_receive_queue",
    ),
    Mutant(
        "a muted inbox forgets early numbers",
        QUEUE,
        "      it = it->first < peer.next ? peer.held.erase(it) : std::next(it);",
        "      it = peer.held.erase(it);",
        "test_receive_queue",
    ),
    Mutant(
        "a message in the name of this process is accepted",
        QUEUE,
        " || envelope.process == process_) {",
        ") {",
        "test_receive_queue",
    ),
    # UCX.
    Mutant(
        "small data is reported as sent before it is copied",
        UCX,
        "    message->data = message->copy.get();\n",
        "",
        "test_ucx_network",
    ),
    Mutant(
        "a dropped peer gets no message",
        UCX,
        "    PostControl(process, Envelope::kDisconnect);\n    peer.why = why;",
        "    peer.why = why;",
        "test_ucx_network",
    ),
    Mutant(
        "every fetch counts as a success",
        UCX,
        "fetch->done(status == ucp::kOk);",
        "fetch->done(true);",
        "test_ucx_network",
    ),
    Mutant(
        "another version of UCX is accepted",
        WORKER,
        "if (head.version[0] != ucx_->major || head.version[1] != ucx_->minor) {",
        "if (head.version[0] != ucx_->major) {",
        "test_ucx_network",
    ),
    Mutant(
        "the address of another process is used",
        WORKER,
        " || head.process != process ||",
        " ||",
        "test_ucx_network",
    ),
    Mutant(
        "disconnects are not acknowledged once all messages have been delivered",
        UCX,
        "(!is_ack && receive_queue_.lost(owned->process))",
        "receive_queue_.lost(owned->process)",
        "test_ucx_network_progress",
    ),
    Mutant(
        "a payload of the eager limit waits for a destination",
        UCX,
        "message->bytes <= eager_bytes_",
        "message->bytes < eager_bytes_",
        "test_ucx_network_progress",
    ),
    Mutant(
        "a message that is queued before the sleep waits for its end",
        UCX,
        "if (!queued_ && !stop_ && unwanted_.empty())",
        "if (!stop_ && unwanted_.empty())",
        "test_ucx_network_progress",
    ),
    Mutant(
        "the file of a shared memory stays open",
        "ffi/transport/shared_memory.cc",
        "  munmap(data_, size_);\n  if (fd_ >= 0) close(fd_);",
        "  munmap(data_, size_);",
        "test_node",
    ),
    # The library of UCX.
    Mutant(
        "the fallback is opened beside a system library that stays loaded",
        LIBRARY,
        "if (stays && candidate == kSystemLibrary && !fallback.empty()) {",
        "if (false) {",
        "test_ucx_library",
    ),
    Mutant(
        "the signal handlers of a program that uses UCX itself are removed",
        LIBRARY,
        "restore && !loaded) {",
        "restore) {",
        "test_ucx_library",
    ),
    Mutant(
        "a system library that was refused counts as not loaded", LIBRARY, "  *stays = true;\n", "", "test_ucx_library"
    ),
    Mutant(
        "a library is opened anew for each network",
        LIBRARY,
        "    if (found != opened->end()) return found->second;\n",
        "",
        "test_ucx_library",
    ),
    Mutant(
        "the symbols of UCX become global",
        LIBRARY,
        "RTLD_NOW | RTLD_LOCAL",
        "RTLD_NOW | RTLD_GLOBAL",
        "test_ucx_library",
    ),
]
