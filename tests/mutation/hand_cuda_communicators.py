"""Mistakes in communicators of jaxcomm's own, limits of waits, first runs, fused products, and exits."""

from mutation.hand import Mutant

BOOTSTRAP = "ffi/cuda/nccl/bootstrap.cc"
CALL = "ffi/cuda/xla/call.cc"
SITE = "ffi/cuda/xla/call_site.cc"
FUSED, PRODUCT, FUSED_CALL = (
    "ffi/cuda/runtime/fused_matmul.cc",
    "ffi/cuda/cublas/product.cc",
    "ffi/cuda/xla/fused_call.cc",
)
CALLS_OF_NCCL = "ffi/cuda/nccl/nccl_calls.cc"
CONTACT = "ffi/cuda/nccl/first_contact.cc"
DEVICE_CALL = "ffi/cuda/runtime/device_call.cc"
OWN = "ffi/cuda/runtime/own_communicators.cc"
PROXY = "ffi/cuda/runtime/send_recv_proxy.cc"
THREADS = "ffi/cuda/nccl/threads.cc"

MUTANTS = [
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
        CALL,
        "  if (state.Find(device) != nullptr) return OkStatus();\n",
        "",
        "test_cuda_own_communicators",
    ),
    Mutant(
        "the window's place is not added",
        DEVICE_CALL,
        "  *window_at = *found;\n",
        "  *window_at = 0;\n",
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
        "a chunk is multiplied before it has arrived",
        FUSED,
        'JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, EventOf(shift, c), 0)));',
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "transfers begin before x is complete",
        FUSED,
        "  JAXCOMM_RETURN_IF_ERROR(Order(fork_, stream, side_));\n",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "a part leaves before it is complete",
        FUSED,
        "note(Order(EventOf(shift, c), stream, side_));",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the second stream is not joined",
        FUSED,
        "= Order(join_, side_, stream);",
        "= OkStatus();",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the second stream is not joined after an error",
        FUSED,
        "= Order(join_, side_, stream);",
        "= enqueued.ok() ? Order(join_, side_, stream) : OkStatus();",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "a failed product ends the transfers of a scatter",
        FUSED,
        "if (first.ok()) note(Multiply(buffers, rows(row), row, buffers.products, stream));",
        "JAXCOMM_RETURN_IF_ERROR(Multiply(buffers, rows(row), row, buffers.products, stream));",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "parts of failed products are not NaN",
        FUSED,
        "if (!first.ok()) cudaMemsetAsync(part, kNaNByte, static_cast<size_t>(chunk_rows() * y_bytes), stream);",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "fused gathers keep no own rows",
        FUSED,
        "shape_.keeps && shape_.rows",
        "false && shape_.rows",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "cuBLASLt is promised 16 bytes",
        FUSED,
        "while (distance % alignment != 0) alignment /= 2;",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "f64 products are added in f32",
        PRODUCT,
        "wide ? cublaslt::kCompute64F :",
        "false ? cublaslt::kCompute64F :",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "weights of other ranks' fused calls may differ",
        FUSED_CALL,
        "hash = Mix(Mix(hash, static_cast<uint64_t>(weight.columns)), static_cast<uint64_t>(weight.result));",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "kernels of cuBLASLt load beside transfers",
        FUSED,
        "  if (ready.ok()) ready = made->RunProducts();\n",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "results have the alignment of operands",
        FUSED,
        "shape_.contracted * ItemBytes(shape_.operands),\n"
        "                                         chunk_rows() * weight.columns * ItemBytes(weight.result)",
        "shape_.contracted * ItemBytes(shape_.operands)",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the workspace is not aligned",
        PRODUCT,
        "static_cast<char*>(workspace) + (AlignUp(begin, kWorkspaceAlignmentBytes) - begin)",
        "workspace",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "partial sums may be in the result type",
        PRODUCT,
        "  JAXCOMM_RETURN_IF_ERROR(set(cublaslt::kReductionSchemes, &reduction, sizeof reduction));\n",
        "",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "NOT_SUPPORTED is a plain status",
        PRODUCT,
        "  if (result != cublaslt::kNotSupported) JAXCOMM",
        "  JAXCOMM",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "fused gathers and scatters are the same call",
        FUSED_CALL,
        "{int64_t{shape.scatters}, int64_t{shape.keeps},",
        "{int64_t{shape.keeps},",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the kept rows of other ranks' fused calls may differ",
        FUSED_CALL,
        "{int64_t{shape.scatters}, int64_t{shape.keeps},",
        "{int64_t{shape.scatters},",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the rounding of other ranks' fused calls may differ",
        FUSED_CALL,
        "int64_t{shape.tf32}, shape.chunks",
        "shape.chunks",
        "test_cuda_fused_matmul",
    ),
    Mutant(
        "the result types of other ranks' fused calls may differ",
        FUSED_CALL,
        "hash = Mix(Mix(hash, static_cast<uint64_t>(weight.columns)), static_cast<uint64_t>(weight.result));",
        "hash = Mix(hash, static_cast<uint64_t>(weight.columns));",
        "test_cuda_fused_matmul",
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
]
