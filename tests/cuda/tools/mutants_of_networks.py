"""Mutants of inter-node transfers and of programs. Tests detect them in less time without ThreadSanitizer."""

from kernel_mutant import COMM, EXECUTOR, GIN, GIN_NETWORK, NODE_RING, NODES, PACKING, PROGRAM, Mutant

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
    Mutant("a plan begins with puts of users", GIN_NETWORK, "kSharesQueues = true", "kSharesQueues = false", "gin"),
    Mutant("signals with and without flush are merged", PROGRAM, " && !steps[end].flush &&", " &&"),
    Mutant(
        "no exit barrier between nodes",
        PROGRAM,
        """    for (const int32_t peer : inter_node.open_from_own) {
      AddBarrierSteps(steps, kExitBarrier, StepKind::kSignal, {peer});
      steps.back().flush = queues.IsFull(peer, 0);
      if (steps.back().flush) queues.Flush();
    }
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, inter_node.open_to_own);
""",
        "    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);\n",
    ),
    Mutant("signals don't wait for puts", GIN, "ncclGin_StrongSignalInc{", "ncclGin_WeakSignalInc{"),
    Mutant("puts are not counted", GIN_NETWORK, "    if (threadIdx.x == 0) ++args().puts[channel];\n", ""),
    Mutant(
        "every thread counts puts",
        GIN_NETWORK,
        "if (threadIdx.x == 0) ++args().puts[channel];",
        "++args().puts[channel];",
    ),
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
    Mutant(
        "queues have room for all puts",
        PROGRAM,
        "queue.num_puts + num_puts > kMostPutsUnderWay",
        "queue.num_puts < 0",
        "gin_queues",
    ),
    Mutant(
        "channels without elements signal",
        PROGRAM,
        "range.count > 0 || block_count == 0",
        "range.count >= 0",
        "gin_queues",
    ),
    Mutant("signals take no entry", PROGRAM, "      ++queue.num_signals;\n", "", "gin_queues"),
    Mutant(
        "a flush shows that all signals have left",
        PROGRAM,
        "queue.num_puts = queue.covered = 0;",
        "queue.num_puts = queue.covered = queue.num_signals = 0;",
        "gin_queues",
    ),
    Mutant(
        "signals find room in every queue",
        PROGRAM,
        "(queued && queues.IsFull(",
        "(inter_node_put && queues.IsFull(",
        "gin_queues",
    ),
    Mutant(
        "signals of the exit barrier find room in every queue",
        PROGRAM,
        "steps.back().flush = queues.IsFull(peer, 0);",
        "steps.back().flush = false;",
        "gin_queues",
    ),
    Mutant(
        "signals of the entry barrier take no entry",
        PROGRAM,
        "    for (const int32_t peer : inter_node.to_own) queues.Add(peer, 0);\n",
        "",
        "gin_queues",
    ),
    Mutant(
        "only the first part of a put is cut",
        PACKING,
        "while (part.count > 1 &&",
        "while (done == 0 && part.count > 1 &&",
        "gin_queues",
    ),
    Mutant(
        "kernels of users have as many puts as plans",
        GIN,
        "kMostPuts = kMostPutsUnderWay - 1",
        "kMostPuts = kMostPutsUnderWay",
        "gin_kernels",
    ),
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
    Mutant("puts are not waited for", GIN, "kFlushStep, puts - most,", "kFlushStep, 0 * (puts - most),"),
    Mutant(
        "GIN's signals are the receiver's",
        GIN,
        "SignalFrom(channel, handle_.comm.world.rank)",
        "SignalFrom(channel, peer)",
    ),
    Mutant("channels share GIN's signals", GIN, "Row(handle_.comm, channel) + sender", "0 * channel + sender"),
    Mutant("channels share GIN's counters", GIN, "static_cast<ncclGinCounter_t>(channel)", "channel * 0"),
    Mutant(
        "signals take another context than puts",
        GIN,
        "    ContextOf(channel).signal(",
        "    ContextOf(channel + 1).signal(",
    ),
    Mutant("GIN's signals are not counted", GIN, "    received = expected;\n", ""),
    Mutant("puts arrive at the window's begin", GIN_NETWORK, "to.offset + to_offset", "to_offset"),
    Mutant("puts come from the window's begin", GIN_NETWORK, "from.offset + from_offset", "from_offset"),
    Mutant(
        "unread puts are not reported",
        GIN,
        "channel, handle_.comm.world.rank, kFlushStep",
        "channel, handle_.comm.world.rank, -2",
        "gin",
    ),
    Mutant(
        "moves pass a wait for the network",
        PROGRAM,
        "!steps[end].sync && !steps[end].flush; ++end)",
        "!steps[end].sync; ++end)",
        "program",
    ),
    # Kernels of users.
    Mutant("the rail begins at the node's first rank", COMM, "comm.local.rank, size};", "0, size};", "gin_kernels"),
    Mutant("the rail is the node", COMM, "comm.local.rank, size};", "comm.local.rank, 1};", "gin_kernels"),
    Mutant(
        "an aborted channel puts",
        GIN,
        "if (IsChannelAborted(handle_.comm, channel)) return false;\n    if (bytes",
        "if (bytes",
        "gin_kernels",
    ),
    Mutant(
        "an aborted channel signals",
        GIN,
        "    if (IsChannelAborted(handle_.comm, channel)) return;\n",
        "",
        "gin_kernels",
    ),
    Mutant(
        "an aborted channel waits",
        GIN,
        "    if (IsChannelAborted(handle_.comm, channel)) return false;\n    uint64_t& received",
        "    uint64_t& received",
        "gin_kernels",
    ),
    Mutant("an aborted channel flushes", GIN, "!IsChannelAborted(handle_.comm, channel) && ", "", "gin_kernels"),
    Mutant("empty puts are sent", GIN, "if (bytes == 0) return true;", "", "gin_kernels"),
    Mutant(
        "puts do not wait for each other",
        GIN,
        "WaitForPuts(channel, kMostPuts - 1)",
        "WaitForPuts(channel, 99)",
        "gin_kernels",
    ),
    Mutant("a user's puts are not counted", GIN, "    ++handle_.puts[channel];\n", "", "gin_kernels"),
    Mutant("every thread of a group waits", GIN, "threads.rank == 0 && !Wait(", "!Wait(", "gin_kernels"),
    Mutant(
        "a group does not flush", GIN, "threads.rank == 0 && !Flush(", "threads.rank == -1 && !Flush(", "gin_kernels"
    ),
    Mutant("the all-gather has one half", NODES, "(2 * channel + round % 2)", "(2 * channel)", "gin_kernels"),
    Mutant(
        "the layout of the all-gather depends on the grid",
        NODES,
        "half = HeadBytes(comm) +",
        "half = (int64_t{8} * gridDim.x + 15) / 16 * 16 +",
        "gin_kernels",
    ),
    Mutant("each call begins with the first half", NODES, "*rounds = round;", "*rounds = 0;", "gin_kernels"),
    Mutant(
        "chunks of other nodes are not waited for",
        NODES,
        "if (!gin.Wait(channel, peer, device::OfBlock(), step)) return;",
        "",
        "gin_kernels",
    ),
    Mutant("no barrier in the node", NODES, "if (!device::Barrier(comm, channel, step)) return;", "", "gin_kernels"),
    Mutant(
        "a ring sends tiles on before they have come",
        NODE_RING,
        "if (!ring.Wait(ring.prev, kTile, step)) return;",
        "",
        "node_ring",
    ),
    Mutant(
        "a ring writes to slots in use",
        NODE_RING,
        "if (sends && number >= args.num_slots && !ring.Wait(ring.next, kSlot, step)) return;",
        "",
        "node_ring",
    ),
    Mutant(
        "a ring gives slots back that the network reads",
        NODE_RING,
        "if (sends && !ring.Flush()) return;",
        "",
        "node_ring",
    ),
    Mutant(
        "own tiles of a ring lie in slots of others",
        NODE_RING,
        "received(number) + args.half_bytes()",
        "received(number)",
        "node_ring",
    ),
    Mutant(
        "a ring ends with tiles that the next rank has",
        NODE_RING,
        "number < args.num_slots ? 0 : number - args.num_slots; i < number; ++i",
        "number; i < number; ++i",
        "node_ring",
    ),
    Mutant(
        "tiles and slots of a ring have one channel",
        NODE_RING,
        "kNumKinds * channel_ + kind",
        "kNumKinds * channel_",
        "node_ring",
    ),
    Mutant(
        "a ring puts tiles that are not complete",
        NODE_RING,
        "    __syncthreads();  // other threads may have written the source\n",
        "",
        "node_ring",
    ),
    Mutant(
        "a ring over nodes begins after an abort", NODE_RING, "if (device::IsAborted(comm)) return;", "", "node_ring"
    ),
    Mutant("ranks of other nodes are members", COMM, "distance < size * stride &&", "", "node_ring"),
]
