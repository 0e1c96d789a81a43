"""Mistakes in communicators of jaxcomm's own, limits of waits, first runs, and exits."""

from mutation.hand import Mutant

BOOTSTRAP = "ffi/cuda/nccl/bootstrap.cc"
STAGES = "ffi/cuda/xla/call_stages.h"
SITE = "ffi/cuda/xla/call_site.cc"
CALLS_OF_NCCL = "ffi/cuda/nccl/nccl_calls.cc"
CONTACT = "ffi/cuda/nccl/first_contact.cc"
DEVICE_CALL = "ffi/cuda/runtime/device_call.cc"
WINDOWS = "ffi/cuda/xla/user_windows.cc"
OWN = "ffi/cuda/runtime/own_communicators.cc"
PROXY = "ffi/cuda/runtime/send_recv_proxy.cc"
STREAMS = "ffi/cuda/runtime/make_stream.cc"
THREADS = "ffi/cuda/nccl/threads.cc"
COMMUNICATOR = "ffi/cuda/runtime/communicator.cc"

MUTANTS = [
    Mutant(
        "bulk copies on every GPU",
        COMMUNICATOR,
        "bulk_copies_ = major >= 9 && shared_bytes",
        "bulk_copies_ = shared_bytes",
        "test_cuda_device_call",
    ),
    Mutant(
        "bulk copies need no shared memory",
        COMMUNICATOR,
        "major >= 9 && shared_bytes >= needed_bytes",
        "major >= 9",
        "test_cuda_device_call",
    ),
    Mutant(
        "bulk copies in code for older GPUs",
        COMMUNICATOR,
        "needed_bytes && ptx_version >= 90;",
        "needed_bytes;",
        "test_cuda_device_call",
    ),
    Mutant(
        "bulk copies that nobody wants",
        COMMUNICATOR,
        "  if (!settings_.bulk_copy) return OkStatus();\n",
        "",
        "test_cuda_device_call",
    ),
    Mutant(
        "plans are loaded without memory for bulk copies",
        COMMUNICATOR,
        "LoadKernel(bulk_copies_ ? kPlanStages : BulkStages{})",
        "LoadKernel(BulkStages{})",
        "test_cuda_device_call",
    ),
    Mutant(
        "plans over GIN are loaded without memory for bulk copies",
        COMMUNICATOR,
        "LoadGinKernel(bulk_copies_ ? kPlanStages : BulkStages{})",
        "LoadGinKernel(BulkStages{})",
        "test_cuda_device_call",
    ),
    Mutant(
        "plans make no bulk copies",
        DEVICE_CALL,
        "  if (communicator_.bulk_copies()) args_.bulk = kPlanStages;\n",
        "",
        "test_cuda_device_call",
    ),
    Mutant(
        "the order of a group's GPUs does not matter",
        OWN,
        "  return FindOrMake(\n      **nccl, {true, *members, contact.rank()},",
        "  std::vector<Member> sorted = *members;\n  std::sort(sorted.begin(), sorted.end());\n"
        "  return FindOrMake(\n      **nccl, {true, sorted, device % 100},",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "a process that has restarted is the same process",
        CONTACT,
        "members.push_back({(*words)[2 * r],",
        "members.push_back({Incarnation(),",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "a communicator per rank is one for all local ranks",
        OWN,
        "return std::tie(of_xla, members, rank) < std::tie(other.of_xla, other.members, other.rank);",
        "return std::tie(of_xla, members) < std::tie(other.of_xla, other.members);",
        "test_cuda_communicator",
    ),
    Mutant(
        "a call is made anew in every run",
        STAGES,
        "  if (state.Find(device) != nullptr) return OkStatus();\n",
        "",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "the window's place is not added",
        DEVICE_CALL,
        "  *place = {window.offset, *found};\n",
        "  *place = {window.offset, 0};\n",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "each rank decides alone whether buffers are in place",
        DEVICE_CALL,
        "shared->in_place = *all_have;",
        "shared->in_place = found.ok();",
        "test_cuda_device_call",
    ),
    Mutant(
        "NCCL is called in the thread that waits",
        CALLS_OF_NCCL,
        "bool done = RunBounded([result, call = std::move(call)] { *result = call(); }, deadline);",
        "bool done = true;\n  *result = call();",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "NCCL's kernel goes on waiting after an exchange has timed out",
        BOOTSTRAP,
        "  RevokeNcclComm(nccl_, nccl_comm_);\n",
        "",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "the rank that fails to make the communicator keeps it to itself",
        CONTACT,
        "return Bootstrap::FailureOf(*answers, at);",
        "return OkStatus();",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "earlier work that never ends is passed over",
        SITE,
        "  JAXCOMM_RETURN_IF_ERROR(earlier);\n",
        "",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "GPUs of a process allocate without waiting for each other",
        SITE,
        "CountLocal(spec.processes, settings.process);",
        "0;",
        "test_cuda_stages",
    ),
    Mutant(
        "the end of the process does not wait for threads",
        THREADS,
        "    std::atexit([] { Threads::End(); });\n",
        "",
        "test_cuda_exit",
    ),
    Mutant(
        "the watchdog does not end",
        PROXY,
        "    if (!Threads::Sleep(kLook)) return;\n",
        "    Threads::Sleep(kLook);\n",
        "test_cuda_exit",
    ),
    Mutant(
        "messages of both lanes have one priority",
        STREAMS,
        "? highest + 1 : highest;",
        "? highest : highest;",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "GPUs wait for more GPUs than their process has",
        "ffi/cuda/xla/local_rendezvous.h",
        "return count <= num_gpus ? count : 0;",
        "return count;",
        "test_cuda_user_calls",
    ),
    Mutant(
        "processes of user calls are not of the groups' devices",
        "ffi/cuda/xla/user_call.cc",
        "if (state->processes.size() != state->groups.size()) {",
        "if (false) {",
        "test_cuda_user_calls",
    ),
    Mutant(
        "processes of own calls are not of the groups' devices",
        "ffi/cuda/xla/call_site.cc",
        "if (!spec.processes.empty() && spec.processes.size() != spec.groups.size()) {",
        "if (false) {",
        "test_cuda_stages",
    ),
    Mutant(
        "users' calls are compared without their attributes",
        "ffi/cuda/xla/user_call.cc",
        "Mix(state.arguments[*device], cuda::HashOf(frame->attrs));",
        "Mix(state.arguments[*device], 0);",
        "test_cuda_user_calls",
    ),
    Mutant(
        "each rank decides alone whether a user's call has windows",
        WINDOWS,
        "if (!*all_have) {",
        "if (!own.ok()) {",
        "test_cuda_user_windows",
    ),
    Mutant(
        "users' buffers are looked for only in the first run",
        WINDOWS,
        "if (!first && call.places == nullptr) return OkStatus();",
        "if (!first) return OkStatus();",
        "test_cuda_user_windows",
    ),
    Mutant(
        "the window of a user's operand is that of the first buffer",
        WINDOWS,
        "call.places->At(static_cast<int32_t>(found - call.buffers.data()))",
        "call.places->At(0)",
        "test_cuda_user_windows",
    ),
    Mutant(
        "the window of a user's operand is that of an empty buffer at its address",
        WINDOWS,
        "(found == nullptr || listed.bytes > found->bytes)",
        "found == nullptr",
        "test_cuda_user_windows",
    ),
    Mutant(
        "users' kernels start without an exchange of places",
        "ffi/cuda/xla/user_call.cc",
        "  if (call->places == nullptr) return OkStatus();\n",
        "  return OkStatus();\n",
        "test_cuda_user_windows",
    ),
    Mutant(
        "users' calls over several nodes have windows",
        WINDOWS,
        "if (!call.HasOneNode()) {",
        "if (false) {",
        "test_cuda_node_calls",
    ),
    Mutant(
        "XLA's refusal of a user's window is forgotten",
        WINDOWS,
        "if (!requested.ok()) state.requested = requested;",
        "",
        "test_cuda_user_windows",
    ),
    Mutant(
        "windows are requested on empty buffers",
        WINDOWS,
        "if (buffer.bytes > 0) wanted",
        "wanted",
        "test_cuda_user_windows",
    ),
    Mutant(
        "a buffer that is listed twice is requested twice",
        "ffi/cuda/xla/xla_collectives.cc",
        "return region.buffer == buffer.address && region.bytes == bytes;",
        "return region.buffer == nullptr;",
        "test_cuda_stages",
    ),
    Mutant(
        "a call has any number of windows",
        WINDOWS,
        "if (num_windows > static_cast<size_t>(kMostBuffers)) {",
        "if (false) {",
        "test_cuda_user_windows",
    ),
]
