"""Mutants of inter-node transfers and of programs. Tests detect them in less time without ThreadSanitizer."""

from kernel_mutant import EXECUTOR, GIN, PACKING, PROGRAM, SCHEDULE, Mutant

# Inter-node mutants, detected in less time than under ThreadSanitizer.
PLAIN = [
    Mutant(
        "reductions of short fragments leave out an operand",
        EXECUTOR,
        "for (int s = 1; s < num_sources; ++s) sum.template",
        "for (int s = 2; s < num_sources; ++s) sum.template",
    ),
    Mutant(
        "units are longer than fragments",
        EXECUTOR,
        "flat ? first : first | slice.count | slice.begin | slice.contiguous_count",
        "first",
    ),
    Mutant("units lie anywhere", EXECUTOR, " && reinterpret_cast<uintptr_t>(base) % (unit * item_bytes) == 0", ""),
    Mutant("nothing is flushed before a step", EXECUTOR, "if (step.flush &&", "if (false &&"),
    Mutant(
        "nothing is flushed before signals to others",
        PROGRAM,
        "put.peer != step.peer",
        "false && put.peer == step.peer",
    ),
    Mutant(
        "nothing is flushed before own steps",
        PROGRAM,
        "return Overwrites(accesses, put);",
        "return put.peer * 0 != 0;",
    ),
    Mutant(
        "nothing is flushed at the end",
        EXECUTOR,
        "    if (__syncthreads_or(!network_.Flush(channel_)) != 0) return;\n    if (args_.copy_out",
        "    if (args_.copy_out",
    ),
    Mutant("signals with and without flush are merged", PROGRAM, " && !steps[end].flush &&", " &&"),
    Mutant(
        "no exit barrier between nodes",
        PROGRAM,
        """    AddBarrierSteps(steps, kExitBarrier, StepKind::kSignal, inter_node.open_from_own);
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, inter_node.open_to_own);
""",
        "    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);\n",
    ),
    Mutant("signals don't wait for puts", GIN, "ncclGin_StrongSignalInc{", "ncclGin_WeakSignalInc{"),
    Mutant("puts are not counted", GIN, "    if (threadIdx.x == 0) ++args_.puts[channel];\n", ""),
    Mutant("every thread counts puts", GIN, "if (threadIdx.x == 0) ++args_.puts[channel];", "++args_.puts[channel];"),
    Mutant(
        "puts are released for the GPU only",
        GIN,
        "ncclGin_WeakCounterInc{CounterOf(channel)}, ncclCoopThread{}, ncclGin_None{},\n"
        "                           ::cuda::thread_scope_thread, ::cuda::thread_scope_system",
        "ncclGin_WeakCounterInc{CounterOf(channel)}, ncclCoopThread{}, ncclGin_None{},\n"
        "                           ::cuda::thread_scope_thread, ::cuda::thread_scope_device",
    ),
    Mutant(
        "signals are released for the GPU only",
        GIN,
        "                              ncclGin_None{}, ::cuda::thread_scope_thread, ::cuda::thread_scope_system",
        "                              ncclGin_None{}, ::cuda::thread_scope_thread, ::cuda::thread_scope_device",
    ),
    Mutant(
        "others overwrite nothing", PROGRAM, "} else if (plan.rank != own && step.dst", "} else if (false && step.dst"
    ),
    Mutant(
        "signals carry nothing on",
        PROGRAM,
        "plan.rank == own ? index : behind[plan.rank]",
        "plan.rank == own ? index : -1",
    ),
    Mutant("queues have room for everything", PROGRAM, "num_fragments > kMostPutsUnderWay", "num_fragments < 0"),
    Mutant("puts of many fragments are not cut", PACKING, "fragments_.MostPuts(part) > kMostPutsUnderWay", "false"),
    Mutant("segments have one place", PACKING, "      end_[step.peer] += Aligned(step.count);\n", ""),
    Mutant(
        "segments lie where their receiver sends from",
        PACKING,
        "sends_.back().begin + Aligned(sends_.back().count)",
        "sends_.back().begin",
    ),
    Mutant(
        "packed data is in the plan's scratch",
        PACKING,
        "sends_.push_back({Aligned(plan.scratch_count), ",
        "sends_.push_back({0, ",
    ),
    Mutant("all that is packed has one place", PACKING, "        packed += Aligned(step.count);\n", "", "packing"),
    Mutant("sends wait for each other", PROGRAM, " && Overwrites(behind, put)", "", "packing"),
    Mutant(
        "segments are unpacked one signal early",
        PACKING,
        "num_received[step.peer]++, origin",
        "++num_received[step.peer], origin",
    ),
    Mutant(
        "segments are unpacked before they have come",
        PACKING,
        "      Add(plan.rank, Synchronize(StepKind::kWait, peer), kExitBarrier);\n",
        "",
    ),
    Mutant("puts are not waited for", GIN, "args_.puts[channel],", "args_.puts[channel] - args_.puts[channel],"),
    Mutant(
        "GIN's signals are the receiver's",
        GIN,
        "SignalFrom(channel, args_.comm.local.rank)",
        "SignalFrom(channel, peer)",
    ),
    Mutant("channels share GIN's signals", GIN, "device::Row(args_.comm, channel) + sender", "0 * channel + sender"),
    Mutant("channels share GIN's counters", GIN, "static_cast<ncclGinCounter_t>(channel)", "channel * 0"),
    Mutant(
        "signals take another context than puts",
        GIN,
        "    ContextOf(channel).signal(",
        "    ContextOf(channel + 1).signal(",
    ),
    Mutant("GIN's signals are not counted", GIN, "    received = expected;\n", ""),
    Mutant("puts arrive at the window's begin", GIN, "to.offset + to_offset", "to_offset"),
    Mutant("puts come from the window's begin", GIN, "from.offset + from_offset", "from_offset"),
    Mutant(
        "unread puts are not reported",
        GIN,
        "device::WaitUntil(args_.comm, channel, args_.comm.local.rank, kFlush",
        "device::WaitUntil(args_.comm, channel, args_.comm.local.rank, kExitBarrier",
        "gin",
    ),
    Mutant(
        "data of other nodes is not waited for",
        SCHEDULE,
        "if (inter_node) rank.awaited =",
        "if (false) rank.awaited =",
    ),
    Mutant(
        "packs don't wait until their slot has been sent",
        SCHEDULE,
        "rank.awaited = std::max(rank.awaited, rank.round - num_slots_ + 1);",
        "",
    ),
    Mutant(
        "rounds do not wait for their data",
        SCHEDULE,
        "return channel.EndOf(round);",
        "return round * 0 + channel.next;",
    ),
    Mutant(
        "signals of the own node carry no level",
        SCHEDULE,
        "rank.round + 1 : rank.level",
        "rank.round + 1 : 0",
        "send_recv_schedule",
    ),
    Mutant(
        "the exit barrier has no level",
        SCHEDULE,
        "std::max(exit.level, ranks_[r].level)",
        "exit.level + r * 0",
        "send_recv_schedule",
    ),
    Mutant(
        "channels keep to no common order", SCHEDULE, ", channel.AtLevel(level)", ", channel.next", "send_recv_schedule"
    ),
    Mutant(
        "a segment includes steps that wait for a round",
        SCHEDULE,
        "std::min(ends[c], channel.AtLevel(blocked))",
        "std::max(begin, ends[c])",
    ),
    Mutant("segments continue past a group of steps", SCHEDULE, "    steps[i].together = end - i;\n", ""),
    Mutant("all chunks are in one round", SCHEDULE, "rank.filled >= round_count_ ? 1 : 0", "0", "send_recv_schedule"),
    Mutant("channels share a place in a message", SCHEDULE, "parts[c + 1] += parts[c];", "parts[c + 1] += 0;"),
    Mutant(
        "signals without data are empty",
        SCHEDULE,
        "std::max(parts.back(), grain)",
        "parts.back()",
        "send_recv_schedule",
    ),
    Mutant(
        "the end waits for no round",
        SCHEDULE,
        "    if (!rounds_.empty()) Await(rounds_.back() + 1);\n",
        "",
        "send_recv_schedule",
    ),
]
