"""Mistakes in ffi/cpu, ffi/handlers and ffi/common, of the kind that a careful author makes."""

from mutation.hand import Mutant

RENDEZVOUS, FAILED_RUNS = "ffi/cpu/rendezvous.cc", "ffi/cpu/failed_runs.h"
EXECUTOR, COPY = "ffi/cpu/executor.cc", "ffi/cpu/copy.cc"

MUTANTS = [
    # Rendezvous.
    Mutant(
        "the numbering of call sites is never cleared",
        RENDEZVOUS,
        "  if (numbering.program != num_programs.load()) numbering = {num_programs.load(), {}};\n",
        "",
        "test_call_sites",
    ),
    Mutant(
        "equal call sites of a program are not told apart",
        RENDEZVOUS,
        "numbering.count[hash]++",
        "numbering.count[hash]",
        "test_call_sites",
    ),
    Mutant(
        "iterations of a call site are not told apart between processes",
        RENDEZVOUS,
        "  spec.key = Mix(Mix(Mix(identity_, static_cast<uint64_t>(run_id)), static_cast<uint64_t>(iteration)),",
        "  spec.key = Mix(Mix(Mix(identity_, static_cast<uint64_t>(run_id)), static_cast<uint64_t>(0 * iteration)),",
        "test_call_sites",
    ),
    Mutant(
        "groups of a call site are not told apart between processes",
        RENDEZVOUS,
        "                 static_cast<uint64_t>(group)) |",
        "                 static_cast<uint64_t>(0 * group)) |",
        "test_call_sites",
    ),
    Mutant(
        "runs are not told apart between processes",
        RENDEZVOUS,
        "Mix(identity_, static_cast<uint64_t>(run_id))",
        "Mix(identity_, static_cast<uint64_t>(0 * run_id))",
        "test_call_sites",
    ),
    Mutant(
        "programs of groups are not told apart",
        RENDEZVOUS,
        "    const auto found = inter_process_.find(group);",
        "    const auto found = inter_process_.begin();",
        "test_call_sites",
    ),
    Mutant(
        "late devices of a failed run wait again",
        RENDEZVOUS,
        "  JAXCOMM_RETURN_IF_ERROR(TheRegistry().failed_runs.Find(participant.run_id));\n  const Key",
        "  const Key",
        "test_rendezvous",
    ),
    Mutant(
        "the last error of a run is its cause",
        FAILED_RUNS,
        "      if (entry.first == run_id) return;  // the first error is the cause\n    }\n"
        "    runs_.emplace_back(run_id, error);",
        "      (void)entry;\n    }\n    runs_.emplace_front(run_id, error);",
        "test_rendezvous",
    ),
    Mutant(
        "a device's iterations are counted over all runs",
        RENDEZVOUS,
        "    if (count.run_id == run_id && count.next > 0) return count.next++;",
        "    if (count.next > 0) return count.next++;",
        "test_rendezvous",
    ),
    Mutant(
        "the latest run's count makes room for the next",
        RENDEZVOUS,
        "  oldest_ = (oldest_ + 1) % counts_.size();\n",
        "",
        "test_rendezvous",
    ),
    Mutant(
        "a failed run fails all runs",
        RENDEZVOUS,
        "      if (std::get<0>(it->first) != run_id) {",
        "      if (false) {",
        "test_rendezvous",
    ),
    Mutant(
        "ranks of a round share the scratch of the first",
        RENDEZVOUS,
        "      next += program->scratch_bytes(i);\n",
        "",
        "test_planner",
    ),
    Mutant(
        "elements of other types are not a disagreement",
        RENDEZVOUS,
        "  if (first.dtype != participant.dtype || first",
        "  if (first",
        "test_rendezvous",
    ),
    Mutant(
        "scratch is given back while the round still runs",
        RENDEZVOUS,
        "  group_call->execution = std::make_unique<Execution>(program, group_call->buffers, group_call->slices);\n",
        "  group_call->execution = std::make_unique<Execution>(program, group_call->buffers, group_call->slices);\n"
        "  if (group_call->scratch) {\n    std::lock_guard<std::mutex> lock(mutex_);\n"
        "    scratch_.push_back(std::move(group_call->scratch));\n  }\n",
        "test_rendezvous",
    ),
    # Execution.
    Mutant(
        "a reduction continues after a failed read",
        EXECUTOR,
        "size, item_bytes, false),\n                src.pid)) {\n        return false;\n",
        "size, item_bytes, false), src.pid)) {\n        return true;\n",
        "test_executor",
    ),
    Mutant(
        "the arithmetic mode of the thread is used",
        EXECUTOR,
        "  const IeeeArithmetic arithmetic;\n",
        "",
        "test_executor",
    ),
    Mutant(
        "the mode of the thread is not restored",
        EXECUTOR,
        "  ~IeeeArithmetic() { _mm_setcsr(saved_); }\n",
        "",
        "test_executor",
    ),
    Mutant(
        "a signal is counted at the sender",
        EXECUTOR,
        "      signals_[step.peer][plan.rank].fetch_add(1);",
        "      signals_[plan.rank][step.peer].fetch_add(1);",
        "test_executor",
    ),
    Mutant(
        "a wait is satisfied by a signal that an earlier one took",
        EXECUTOR,
        "      ++count;\n",
        "",
        "test_executor",
    ),
    Mutant(
        "an error names a pair of ranks whose signal has arrived",
        EXECUTOR,
        "      if (late) return {rank, peer};",
        "      if (late || waits) return {rank, peer};",
        "test_executor",
    ),
    Mutant(
        "a put to another node reads memory that later steps write",
        EXECUTOR,
        "CopyElements({data.get(), BlockLayout{}}, 0, from, src.offset, count, program_->item_bytes, false);",
        "CopyElements({data.get(), BlockLayout{}}, 0, from, 0, count, program_->item_bytes, false);",
        "test_inter_process_call",
    ),
    Mutant(
        "the last tile of a reduction is skipped",
        EXECUTOR,
        "  for (int64_t done = 0; done < step.count; done += tile) {",
        "  for (int64_t done = 0; done + tile <= step.count; done += tile) {",
        "test_executor test_inter_process_call",
    ),
    Mutant(
        "gathered sources share a tile",
        EXECUTOR,
        "      char* own = gathered + s * tile * item_bytes;",
        "      char* own = gathered + s * size * item_bytes / 2;",
        "test_executor test_inter_process_call",
    ),
    # Copies.
    Mutant(
        "the next fragment is one block on",
        COPY,
        "  block_ = block + fragment / fragments_per_block_;",
        "  block_ = block;",
        "test_copy",
    ),
    Mutant(
        "the tail of a streamed copy is forgotten",
        COPY,
        "    std::memcpy(dst + body_end, src + body_end, static_cast<size_t>(bytes - body_end));\n",
        "",
        "test_copy",
    ),
    Mutant(
        "zeros where there are fragments",
        COPY,
        "    const int64_t part_bytes = std::min(bytes, to.left_bytes());\n    std::memset",
        "    const int64_t part_bytes = bytes;\n    std::memset",
        "test_copy",
    ),
    Mutant(
        "the last batch of reads is skipped",
        COPY,
        "    if (bytes > 0 && reads.size() < kBatch && part_bytes < kMaxReadBytes) continue;",
        "    if (reads.size() < kBatch && part_bytes < kMaxReadBytes) continue;",
        "test_copy",
    ),
    # Plans of call sites, processes, threads that complete.
    Mutant(
        "a block of reduce_scatter is the whole input",
        "ffi/plan/request.cc",
        "BufferBlocks::kOne ? output_count : input_count / num_ranks",
        "BufferBlocks::kOne ? input_count : input_count / num_ranks",
        "test_planner",
    ),
    Mutant(
        "ranks of all nodes share a processor",
        "ffi/cpu/cost_params.cc",
        "resources.scope == Scope::kNetwork ? ranks_per_node : num_ranks",
        "resources.scope == Scope::kProcess ? ranks_per_node : num_ranks",
        "test_planner",
    ),
    Mutant(
        "the contiguous count of the input is that of the output",
        "ffi/cpu/planner.cc",
        "Blocks(output_count, request->block_count, spec.output_contiguous_count)",
        "Blocks(output_count, request->block_count, spec.input_contiguous_count)",
        "test_planner",
    ),
    Mutant(
        "one process that may read others' memory is enough",
        "ffi/cpu/process_context.cc",
        "    *single_copy &= info.single_copy;",
        "    *single_copy |= info.single_copy;",
        "test_call_sites",
    ),
    Mutant(
        "nodes are numbered by process",
        "ffi/cpu/process_context.cc",
        "node_of->push_back(static_cast<int32_t>(found - nodes.begin()));",
        "node_of->push_back(static_cast<int32_t>(process));",
        "test_call_sites",
    ),
    Mutant(
        "a blocked queue is not detected",
        "ffi/cpu/completion_pool.cc",
        "    if (!queue_.empty()) work_.notify_all();",
        "    if (!queue_.empty() && num_idle_ == 0) work_.notify_all();",
        "test_rendezvous",
    ),
    Mutant(
        "the watchdog sleeps while there is work",
        "ffi/cpu/completion_pool.cc",
        "      watchdog_idle_ = true;  // set on every pass",
        "      // each time",
        "test_rendezvous",
    ),
    Mutant(
        "calls of a run that are new are not failed",
        "ffi/cpu/progress_thread.cc",
        "    for (const auto* list : {&added_, &calls_}) {",
        "    for (const auto* list : {&calls_}) {",
        "test_inter_process_failures",
    ),
    Mutant(
        "calls that failed are not reclaimed",
        "ffi/cpu/progress_thread.cc",
        "      if (call->failed()) failed.push_back(std::move(call));\n",
        "",
        "test_inter_process_failures",
    ),
    # Handlers.
    Mutant(
        "unsigned bytes are signed",
        "ffi/common/attributes.cc",
        "    JAXCOMM_CASE(U8, kU8)",
        "    JAXCOMM_CASE(U8, kS8)",
        "test_handlers",
    ),
    Mutant(
        "nodes of a call are dropped",
        "ffi/common/call_spec.h",
        '  visit("ranks_per_node", spec.ranks_per_node);\n',
        "",
        "test_handlers",
    ),
    Mutant(
        "the contiguous count of the input is dropped",
        "ffi/common/call_spec.h",
        '  visit_if_taken("input_contiguous_count", spec.input_contiguous_count);\n',
        "",
        "test_handlers",
    ),
    Mutant(
        "the contiguous counts of input and output are swapped",
        "ffi/common/call_spec.h",
        'spec.input_contiguous_count);\n  visit_if_taken("output_contiguous_count", spec.output_contiguous_count);',
        'spec.output_contiguous_count);\n  visit_if_taken("output_contiguous_count", spec.input_contiguous_count);',
        "test_handlers",
    ),
    Mutant(
        "calls that differ in their groups alone meet",
        "ffi/common/call_spec.cc",
        "    for (const T number : numbers) *hash = Mix(*hash, static_cast<uint64_t>(number));\n",
        "",
        "test_handlers",
    ),
    Mutant(
        "deadlines are reported as invalid arguments",
        "ffi/handlers/call.cc",
        "StatusCode::kDeadlineExceeded ?",
        "StatusCode::kInvalidArgument ?",
        "tests/test_errors.py -k late_ranks",
    ),
    # Calls whose row lists are wrong on one process.
    Mutant(
        "other processes get no error of wrong row lists",
        RENDEZVOUS,
        "  if (SpansProcesses(std::get<2>(group_call->key))) "
        "return StartInterProcess(group_call, own_position, checked);\n"
        "  if (!checked.ok()) {\n    FailRun(participant.run_id, checked);\n"
        "    return FailCall(*group_call, checked);\n  }\n",
        "  if (!checked.ok()) {\n    FailRun(participant.run_id, checked);\n"
        "    return FailCall(*group_call, checked);\n  }\n"
        "  if (SpansProcesses(std::get<2>(group_call->key))) "
        "return StartInterProcess(group_call, own_position, checked);\n",
        "tests/hosts/test_host_failures.py --size full -k wrong",
    ),
]
