"""Mutants of memory orders, scopes and fences. The programs for the memory model detect them, whatever the schedule."""

import re

from kernel_mutant import EXECUTOR, GIN, LL, LL_CALL, MULTIMEM, OFFSETS, PORTABLE, PROGRAM, SYNC, Mutant

SIGNAL = "StoreRelease(comm.signals.pad.At<uint64_t>(peer)"
ABORT_FLAG = "LoadAcquire(comm.abort_flag) != 0"
STATE = "LoadAcquire(&comm.report->state) != Report::kNone"


def scope(line: str, narrow: str) -> tuple[str, str]:
    """A line of portable.h, and the same in a narrower scope."""
    return line, re.sub(r"thread_scope_\w+", f"thread_scope_{narrow}", line)


MODEL = [
    Mutant(
        "no store releases",
        PORTABLE,
        "(value, atomics::memory_order_release)",
        "(value, atomics::memory_order_relaxed)",
        "litmus",
    ),
    Mutant(
        "no load acquires",
        PORTABLE,
        "load(atomics::memory_order_acquire)",
        "load(atomics::memory_order_relaxed)",
        "litmus",
    ),
    Mutant(
        "releases are for the GPU",
        PORTABLE,
        *scope("AtomicWord<atomics::thread_scope_system>(*word).store(", "device"),
        "litmus",
    ),
    Mutant(
        "acquires are of the GPU",
        PORTABLE,
        *scope("AtomicWord<atomics::thread_scope_system>(*const_cast<uint64_t*>(word)).load", "device"),
        "litmus",
    ),
    Mutant(
        "claims are of one block",
        PORTABLE,
        *scope("return AtomicWord<atomics::thread_scope_device>(*word).compare", "block"),
        "litmus",
    ),
    Mutant(
        "relaxed loads are of one thread",
        PORTABLE,
        *scope("return AtomicWord<atomics::thread_scope_block>(*const_cast", "thread"),
        "litmus",
    ),
    Mutant(
        "relaxed stores are of one thread",
        PORTABLE,
        *scope("  AtomicWord<atomics::thread_scope_block>(*word).store", "thread"),
        "litmus",
    ),
    Mutant("signals are relaxed", SYNC, SIGNAL, SIGNAL.replace("StoreRelease", "StoreRelaxed"), "litmus"),
    Mutant("waits are relaxed", SYNC, "return LoadAcquire(word);", "return LoadRelaxed(word);", "litmus"),
    Mutant(
        "the abort flag is stored relaxed",
        SYNC,
        "StoreRelease(comm.abort_flag, 1)",
        "StoreRelaxed(comm.abort_flag, 1)",
        "litmus",
    ),
    Mutant("the abort flag is loaded relaxed", SYNC, ABORT_FLAG, ABORT_FLAG.replace("Acquire", "Relaxed"), "litmus"),
    Mutant(
        "the host's abort is loaded relaxed",
        SYNC,
        "LoadAcquire(&comm.report->abort)",
        "LoadRelaxed(&comm.report->abort)",
        "litmus",
    ),
    Mutant("reports are loaded relaxed", SYNC, STATE, STATE.replace("Acquire", "Relaxed"), "litmus"),
    Mutant("reports are stored relaxed", SYNC, "StoreRelease(&report.state", "StoreRelaxed(&report.state", "litmus"),
    Mutant(
        "reports are complete before they are written",
        SYNC,
        "  report.call_id = comm.call_id;\n",
        "  StoreRelease(&report.state, Report::kComplete);\n  report.call_id = comm.call_id;\n",
        "litmus",
    ),
    Mutant(
        "every thread reports",
        SYNC,
        "if (!Claim(&report.claim, 0, 1)) return;",
        "",
        "litmus",
    ),
    Mutant(
        "a put's signal overtakes other threads",
        SYNC,
        "  Sync(threads);\n  if (threads.rank == 0) Signal",
        "  if (threads.rank == 0) Signal",
        "litmus",
    ),
    Mutant(
        "a barrier's signals overtake other threads",
        SYNC,
        "  Sync(threads);\n  bool reached",
        "  bool reached",
        "litmus",
    ),
    Mutant(
        "a barrier's waits hold up one thread only",
        SYNC,
        "const bool all_reached = !AnyOf(threads, !reached);",
        "const bool all_reached = reached;",
        "litmus",
    ),
    Mutant(
        "waits are satisfied one signal early",
        SYNC,
        "comm.signals.received[row + peer] + count;",
        "comm.signals.received[row + peer] + count - 1;",
        "litmus",
    ),
    Mutant("signals are not counted", SYNC, "comm.signals.sent[row + peer] = count;", "", "litmus"),
    Mutant(
        "channels share counters",
        SYNC,
        "static_cast<int64_t>(channel.index) * comm.signals.num_tags",
        "0",
        "litmus",
    ),
    Mutant("slots are not doubled", LL, "static_cast<int64_t>(exchange.epoch % 2)", "0", "litmus"),
    Mutant("senders share slots", LL, "half * comm.local.size + unit.peer", "half * comm.local.size", "litmus"),
    Mutant("only the first half's flag is checked", LL, " && (second[k] >> 32) == exchange.flag()", "", "litmus"),
    Mutant("only the second half's flag is checked", LL, "(first[k] >> 32) == exchange.flag() && ", "", "litmus"),
    Mutant(
        "a sweep takes what is sent with it",
        LL,
        "  __syncthreads();  // before the units of this exchange are sent\n",
        "",
        "litmus",
    ),
    Mutant(
        "exchanges end before all threads have received",
        LL,
        "if (__syncthreads_or(!received) != 0) return false;",
        "if (!received) return false;",
        "litmus",
    ),
    Mutant(
        "offsets of two calls in one place",
        OFFSETS,
        "static_cast<int64_t>(count % 2)",
        "static_cast<int64_t>(count % 1)",
        "litmus",
    ),
    Mutant(
        "a rank waits for no offsets of its peers",
        OFFSETS,
        "reached = device::Wait(comm, channel, peer, kOffsetExchange);",
        "++comm.signals.received[row + peer];",
        "litmus",
    ),
    Mutant(
        "signals don't wait for other threads",
        EXECUTOR,
        "__syncthreads();  // all earlier writes",
        "// all earlier writes",
        "litmus_kernels",
    ),
    Mutant("waits hold up one thread only", EXECUTOR, "if (__syncthreads_or(!ok) != 0)", "if (!ok)", "litmus_kernels"),
    Mutant("steps are not ordered", EXECUTOR, "if (step.sync) __syncthreads();", "", "litmus_kernels"),
    Mutant(
        "steps begin before other threads have copied the operand",
        EXECUTOR,
        "args_.item_bytes, copies_);\n      __syncthreads();",
        "args_.item_bytes, copies_);",
        "litmus_kernels",
    ),
    Mutant(
        "no entry barrier",
        PROGRAM,
        "AddBarrierSteps(steps, kEntryBarrier, StepKind::kWait, intra_node);",
        "",
        "litmus_kernels",
    ),
    Mutant(
        "no exit barrier",
        PROGRAM,
        "AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);",
        "",
        "litmus_kernels",
    ),
    Mutant(
        "sums are sent in the exchange of the operands",
        LL_CALL,
        "|| !received || !device::BeginLlExchange(comm_, channel_, &exchange_)",
        "|| !received",
        "litmus_kernels",
    ),
    Mutant(
        "sources are not flushed at the end",
        EXECUTOR,
        "    if (__syncthreads_or(!network_.Flush(channel_)) != 0) return;\n    if (args_.copy_out",
        "    if (args_.copy_out",
        "litmus_kernels",
    ),
    Mutant("signals don't wait for puts", GIN, "ncclGin_StrongSignalInc{", "ncclGin_WeakSignalInc{", "litmus_kernels"),
    Mutant("alias fences without effect", PORTABLE, "  emulation::FenceAliases();\n", "", "litmus_kernels"),
    Mutant(
        "no entry barrier of the switch",
        MULTIMEM,
        "if (!device::Barrier(comm_, channel_, kEntryBarrier)) return;",
        "__syncthreads();",
        "litmus_kernels",
    ),
    Mutant(
        "no exit barrier of the switch",
        MULTIMEM,
        "if (!device::Barrier(comm_, channel_, kExitBarrier)) return;",
        "__syncthreads();",
        "litmus_kernels",
    ),
]
