"""Mutants of thread groups and of further counters of the device API."""

from kernel_mutant import COMM, COPY, COUNTERS, SYNC, THREADS, Mutant

OWN_WORD = "LoadAcquire(comm.signals.pad.At<uint64_t>(comm.local.rank) + row + peer)"

GROUPS = [
    Mutant(
        "a group's signal overtakes other threads",
        SYNC,
        "  Sync(threads);\n  if (threads.rank == 0) Signal",
        "  if (threads.rank == 0) Signal",
        "litmus_groups",
    ),
    Mutant(
        "every thread of a group signals",
        SYNC,
        "  if (threads.rank == 0) Signal(comm, channel, peer, add);",
        "  Signal(comm, channel, peer, add);",
        "device_groups",
    ),
    Mutant(
        "a group's wait holds up one thread only",
        SYNC,
        "return !AnyOf(threads, threads.rank == 0 && !Wait(comm, channel, peer, step, count));",
        "return threads.rank != 0 || Wait(comm, channel, peer, step, count);",
        "litmus_groups",
    ),
    Mutant(
        "other threads of a group do not learn of a failure",
        SYNC,
        "return !AnyOf(threads, threads.rank == 0 && !Wait(comm, channel, peer, step, count));",
        "const bool failed = threads.rank == 0 && !Wait(comm, channel, peer, step, count);\n  Sync(threads);\n"
        "  return !failed;",
        "device_groups",
    ),
    Mutant(
        "a group's barrier begins alone", SYNC, "  Sync(threads);\n  bool reached", "  bool reached", "litmus_groups"
    ),
    Mutant("a group's barrier ends alone", SYNC, "= !AnyOf(threads, !reached);", "= reached;", "litmus_groups"),
    Mutant(
        "puts are of the block",
        COPY,
        "Copy(window.At(peer, byte_offset), src, bytes, threads);",
        "Copy(window.At(peer, byte_offset), src, bytes);",
        "device_groups",
    ),
    Mutant("warps share a barrier", THREADS, "-1 - OfBlock().rank / kWarpThreads", "-1", "device_groups"),
    Mutant(
        "groups of warps begin at the first warp",
        THREADS,
        "OfBlock().rank - first_warp * kWarpThreads",
        "OfBlock().rank",
        "device_groups",
    ),
    Mutant(
        "values of warps are lost", THREADS, "threads.size, value) != 0;", "threads.size, false) != 0;", "device_groups"
    ),
    Mutant("tags share counters", SYNC, " + channel.tag) * comm.local.size", ") * comm.local.size", "device_counters"),
    Mutant(
        "tags share counters in the model",
        SYNC,
        " + channel.tag) * comm.local.size",
        ") * comm.local.size",
        "litmus_groups",
    ),
    Mutant(
        "tags of a channel overlap the next channel's",
        SYNC,
        "* comm.signals.num_tags + channel.tag",
        "+ channel.tag",
        "device_counters",
    ),
    Mutant(
        "signals add one",
        SYNC,
        "comm.signals.sent[row + peer] + add;",
        "comm.signals.sent[row + peer] + 1;",
        "device_counters",
    ),
    Mutant(
        "waits are for one signal",
        SYNC,
        "received[row + peer] + count;",
        "received[row + peer] + 1;",
        "device_counters",
    ),
    Mutant(
        "waits for several in the model are for one",
        SYNC,
        "received[row + peer] + count;",
        "received[row + peer] + 1;",
        "litmus_groups",
    ),
    Mutant(
        "a poll acquires nothing",
        COUNTERS,
        f"if ({OWN_WORD} < expected)",
        f"if ({OWN_WORD.replace('Acquire', 'Relaxed')} < expected)",
        "litmus_groups",
    ),
    Mutant(
        "polls are not counted", COUNTERS, "  comm.signals.received[row + peer] = expected;\n", "", "device_counters"
    ),
    Mutant(
        "polls are for one signal",
        COUNTERS,
        "received[row + peer] + count;",
        "received[row + peer] + 1;",
        "device_counters",
    ),
    Mutant(
        "polls of an aborted channel succeed",
        COUNTERS,
        "  if (IsChannelAborted(comm, channel.index)) return false;\n  const int64_t row",
        "  const int64_t row",
        "device_counters",
    ),
    Mutant(
        "loops of polls go on after an abort",
        COUNTERS,
        "  if (IsChannelAborted(comm, channel.index)) return true;\n",
        "",
        "device_counters",
    ),
    Mutant(
        "loops of polls never end",
        COUNTERS,
        "  return EndWait(comm, channel.index, polls->begin_ns, peer",
        "  return false && EndWait(comm, channel.index, polls->begin_ns, peer",
        "device_counters",
    ),
    Mutant(
        "a wait for any takes no turns",
        COUNTERS,
        "first + k < num ? first + k : first + k - num",
        "first + k",
        "device_counters",
    ),
    Mutant(
        "a wait for any ignores tags",
        COUNTERS,
        "TryWait(comm, {channel, from.tag}, from.peer)",
        "TryWait(comm, {channel, 0}, from.peer)",
        "device_counters",
    ),
    Mutant(
        "values are set relaxed",
        COUNTERS,
        "  StoreRelease(comm.signals.pad",
        "  StoreRelaxed(comm.signals.pad",
        "litmus_groups",
    ),
    Mutant(
        "values are read relaxed", COUNTERS, "*value = LoadAcquire(word)", "*value = LoadRelaxed(word)", "litmus_groups"
    ),
    Mutant(
        "values have tag 0",
        COUNTERS,
        "Row(comm, channel) + comm.local.rank, value",
        "Row(comm, channel.index) + comm.local.rank, value",
        "device_counters",
    ),
    Mutant(
        "values of an aborted channel are set",
        COUNTERS,
        "  if (IsChannelAborted(comm, channel.index)) return;\n",
        "",
        "device_counters",
    ),
    Mutant(
        "values of an aborted channel are read",
        COUNTERS,
        "  if (IsChannelAborted(comm, channel.index)) return false;\n  const uint64_t* word",
        "  const uint64_t* word",
        "device_counters",
    ),
    Mutant(
        "counters in an arena overlap",
        COMM,
        "comm.signals.received = comm.signals.sent + count;",
        "comm.signals.received = comm.signals.sent;",
        "device_counters",
    ),
    Mutant(
        "counters in an arena begin at its begin",
        COMM,
        "comm.arena.base + byte_offset, comm.arena.stride",
        "comm.arena.base, comm.arena.stride",
        "device_counters",
    ),
    Mutant(
        "counters in an arena are counted short",
        COMM,
        "int64_t{3} * num_channels",
        "int64_t{2} * num_channels",
        "device_counters",
    ),
]
