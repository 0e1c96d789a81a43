"""Mistakes in the host's side of ffi/cuda: communicators, exchanges, nodes, calls, windows, messages."""

from mutation.hand import Mutant

COMMUNICATOR = "ffi/cuda/runtime/communicator.cc"
EXCHANGE = "ffi/cuda/nccl/bootstrap.cc"
NODES = "ffi/cuda/nccl/nodes.cc"
MEMORY = "ffi/cuda/nccl/symmetric_memory.cc"
OWN = "ffi/cuda/runtime/own_communicators.cc"
PROXY = "ffi/cuda/runtime/send_recv_proxy.cc"
CALL = "ffi/cuda/xla/call.cc"
DEVICE_CALL = "ffi/cuda/runtime/device_call.cc"
PROGRAM = "ffi/cuda/program/call_program.cc"
ROUNDS = "ffi/cuda/program/send_recv_schedule.h"
LIMITS = "ffi/cuda/program/launch_limits.h"
SELECTION = "ffi/plan/select_for_gpus.cc"
USER = "ffi/cuda/xla/user_call.cc"

GIN = "ffi/cuda/nccl/gin.cc"
LIBRARY = "ffi/cuda/nccl/nccl_library.h"
MUTANTS = [
    Mutant(
        "GIN kernels run with a newer NCCL",
        GIN,
        "nccl.version != NCCL_VERSION_CODE",
        "nccl.version < NCCL_VERSION_CODE",
        "test_cuda_gin_host",
    ),
    Mutant(
        "an older NCCL gets properties of the headers' version",
        LIBRARY,
        "std::min(nccl.version, NCCL_VERSION_CODE)",
        "std::max(nccl.version, NCCL_VERSION_CODE)",
        "test_cuda_nccl_library",
    ),
    Mutant(
        "the largest GPU limits the channels",
        COMMUNICATOR,
        "std::min_element(gathered->begin()",
        "std::max_element(gathered->begin()",
        "test_cuda_communicator",
    ),
    Mutant(
        "no SM stays free",
        LIMITS,
        "num_sms - kSmsOfOthers - 2 * kSmsOfProxies",
        "num_sms",
        "test_cuda_late_gpus test_cuda_lanes",
    ),
    Mutant(
        "the smallest GPU does not limit the channels",
        COMMUNICATOR,
        "MaxChannels(static_cast<int64_t>(smallest), settings_.max_channels)",
        "MaxChannels(num_sms, settings_.max_channels)",
        "test_cuda_communicator",
    ),
    Mutant("rounds of 8 MiB", ROUNDS, "round_bytes = 1 << 20", "round_bytes = 8 << 20", "test_cuda_rounds"),
    Mutant(
        "windows are found for the configured channels only",
        CALL,
        "channels > 0; channels /= 2)",
        "channels > 0; channels = 0)",
        "test_cuda_stages",
    ),
    Mutant(
        "messages between nodes are captured",
        PROXY,
        "if (IsCaptured(stream)) {",
        "if (false) {",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "an arena grows to the requested size, not to twice its size",
        COMMUNICATOR,
        "WholePages(std::max({bytes, 2 * arena_bytes_, kLeastArenaBytes}))",
        "WholePages(std::max({bytes, kLeastArenaBytes}))",
        "test_cuda_communicator",
    ),
    Mutant(
        "an arena that is too small by a byte is used",
        COMMUNICATOR,
        "if (bytes > arena_bytes_ || arena_bytes_ == 0) {",
        "if (bytes > arena_bytes_ + 1 || arena_bytes_ == 0) {",
        "test_cuda_communicator",
    ),
    Mutant(
        "arenas of owners are one",
        COMMUNICATOR,
        "Arena& arena = arenas_[owner];",
        'Arena& arena = arenas_[""];',
        "test_cuda_user_calls",
    ),
    Mutant(
        "the timeout of kernels is in microseconds",
        COMMUNICATOR,
        "static_cast<uint64_t>(settings_.timeout_s * 1e9)",
        "static_cast<uint64_t>(settings_.timeout_s * 1e6)",
        "test_cuda_communicator test_cuda_between_nodes",
    ),
    Mutant(
        "calls on another stream wait for nothing",
        COMMUNICATOR,
        "last_ != nullptr && last_stream_ != stream && !IsCaptured(stream)",
        "last_ != nullptr && last_stream_ == stream && !IsCaptured(stream)",
        "test_cuda_communicator",
    ),
    Mutant(
        "a captured call is recorded as the last call",
        COMMUNICATOR,
        "  if (IsCaptured(stream)) return OkStatus();\n",
        "",
        "test_cuda_communicator",
    ),
    Mutant(
        "the last failure found is reported as the first",
        COMMUNICATOR,
        "(!first.ok() && time_ns >= first_ns)",
        "(!first.ok() && time_ns <= first_ns)",
        "test_cuda_call_failures",
    ),
    Mutant(
        "the first failure is forgotten when another one is found",
        COMMUNICATOR,
        "if (GetShared().first_failure.ok()) GetShared().first_failure = first;",
        "GetShared().first_failure = first;",
        "test_cuda_call_failures",
    ),
    Mutant(
        "settings of windows need not agree",
        COMMUNICATOR,
        '"JAXCOMM_SYMMETRIC_BUFFERS", settings_.symmetric_buffers ? 1 : 0)',
        '"JAXCOMM_SYMMETRIC_BUFFERS", 0)',
        "test_cuda_refusals",
    ),
    Mutant(
        "GIN's counts are not cleared",
        COMMUNICATOR,
        '  if (own.ok()) own = CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counts, 0, bytes, bootstrap_.stream()));\n',
        "",
        "test_cuda_communicator",
    ),
    Mutant(
        "a rank makes GIN where another one can't",
        COMMUNICATOR,
        "all_can = bootstrap_.AllTrue(made.ok());",
        "all_can = made.ok();",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "the mailboxes lie in the signals",
        COMMUNICATOR,
        "offset_table_ = {pad.base + pad_bytes, pad.stride};",
        "offset_table_ = {pad.base, pad.stride};",
        "test_cuda_device_call",
    ),
    Mutant(
        "the stride of XLA's window is not checked",
        COMMUNICATOR,
        "size() > 1 && stride != comm_.signals.pad.stride",
        "size() > 9 && stride != comm_.signals.pad.stride",
        "test_cuda_device_call",
    ),
    Mutant(
        "ranks that have not met continue",
        EXCHANGE,
        "  Fail(all.status());\n",
        "",
        "test_cuda_refusals",
    ),
    Mutant(
        "a rank that failed reports that another one failed",
        EXCHANGE,
        "  JAXCOMM_RETURN_IF_ERROR(own);\n",
        "",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "agreement is with rank 0 alone",
        EXCHANGE,
        "for (size_t r = 0; r < all.size(); ++r) {\n    if (all[r] == own) continue;",
        "for (size_t r = 0; r < 1; ++r) {\n    if (all[r] == own) continue;",
        "test_cuda_refusals",
    ),
    Mutant(
        "uneven nodes are as long as the first",
        NODES,
        "const int32_t ranks_per_node = even ? lengths[0] : 1;",
        "const int32_t ranks_per_node = lengths[0];",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "names make no nodes",
        NODES,
        "return std::pair(names[r], r / team_size);",
        "return std::pair(names[0], r / team_size);",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "a part's ranks are those of the group",
        NODES,
        "MakeNcclComm(nccl, key, count, bootstrap.rank() - first,",
        "MakeNcclComm(nccl, key, count, bootstrap.rank(),",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "nodes that can't address each other keep their communicator",
        NODES,
        "  if (!*connected && ranks_per_node < bootstrap.size()) AbortNcclComm(bootstrap.nccl(), nodes->comm);\n",
        "",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "memory that differs in size is registered",
        MEMORY,
        "    if (all[r] == own) continue;\n",
        "    if (all[r] != 0) continue;\n",
        "test_cuda_refusals",
    ),
    Mutant(
        "the multicast address is not agreed on",
        MEMORY,
        "if (*all_can) multicast->base",
        "if (*all_can || address != nullptr) multicast->base",
        "test_cuda_communicator",
    ),
    Mutant(
        "only a part of new memory is cleared",
        MEMORY,
        "cudaMemsetAsync(own, 0, static_cast<size_t>(bytes), bootstrap_.stream())",
        "cudaMemsetAsync(own, 0, static_cast<size_t>(bytes) / 2, bootstrap_.stream())",
        "test_cuda_user_calls",
    ),
    Mutant(
        "the rank in a group is the place in all groups",
        OWN,
        "group.rank = static_cast<int32_t>(position % group_size);",
        "group.rank = static_cast<int32_t>(position);",
        "test_cuda_communicator",
    ),
    Mutant(
        "one device's problem fails its Initialize",
        CALL,
        "  if (!problem.ok()) state->SetProblem(device, problem);\n  return ffi::Error::Success();",
        "  if (!problem.ok()) state->SetProblem(device, problem);\n  return ToFfi(state->spec, problem);",
        "test_cuda_stages",
    ),
    Mutant(
        "operands in a window are copied from where they were",
        DEVICE_CALL,
        "  shared->address = address;\n",
        "",
        "test_cuda_device_call",
    ),
    Mutant(
        "a new address of the result alone is not sent",
        DEVICE_CALL,
        "if (placed_ && std::memcmp(&own, &own_, sizeof own) == 0) return OkStatus();",
        "if (placed_) return OkStatus();",
        "test_cuda_device_call",
    ),
    Mutant(
        "the operand's window is the result's",
        CALL,
        "if (call.shares_output()) output = WindowOf(state, collectives, buffers.y);",
        "if (call.shares_output()) output = WindowOf(state, collectives, buffers.x);",
        "test_cuda_stages",
    ),
    Mutant(
        "max_sms of a call raises the limit",
        PROGRAM,
        "std::min<int64_t>(max_channels, spec.max_sms)",
        "std::max<int64_t>(max_channels, spec.max_sms)",
        "test_cuda_call",
    ),
    Mutant(
        "scratch lies where the result is",
        PROGRAM,
        "  layout.scratch = take(call.program.scratch_count * call.item_bytes);",
        "  layout.scratch = layout.output;",
        "test_cuda_call",
    ),
    Mutant(
        "a call has one channel more than its bytes are worth",
        SELECTION,
        "block_bytes / kMinChannelBytes, 1, std::max(max_channels, 1)",
        "block_bytes / kMinChannelBytes + 1, 1, std::max(max_channels, 1)",
        "test_cuda_call",
    ),
    Mutant(
        "GPUs of a process do not meet before a user's first run",
        USER,
        "settings.num_processes == 1 ?",
        "settings.num_processes == -1 ?",
        "test_cuda_user_calls",
    ),
    Mutant(
        "GPUs of a user's first run wait for those of other processes",
        USER,
        "settings.num_processes == 1 ?",
        "settings.num_processes != 1 ?",
        "test_cuda_user_calls",
    ),
    Mutant(
        "max_sms of a user's call is ignored",
        USER,
        "std::min<int64_t>(made.max_channels, state.max_sms)",
        "std::max<int64_t>(made.max_channels, state.max_sms)",
        "test_cuda_user_calls",
    ),
    Mutant(
        "a message is unpacked on the stream of the call",
        PROXY,
        "Launch(ArgsOfLaunch(call, args, round.unpack), call.num_channels, stream_)",
        "Launch(ArgsOfLaunch(call, args, round.unpack), call.num_channels, stream)",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "messages are sent before they are packed",
        PROXY,
        'CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, events.packed, 0))',
        "OkStatus()",
        "test_cuda_between_nodes",
    ),
    Mutant(
        "rounds of an idle GPU are too late",
        PROXY,
        "if (seen != count || round == 0) since = now;",
        "if (seen != count) since = now;",
        "test_cuda_between_nodes_failures",
    ),
]
