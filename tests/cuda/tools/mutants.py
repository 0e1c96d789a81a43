"""Breaks the GPU's executor, device API or example in one place at a time, and demands that the emulated tests notice.

    mutants.py --library build/thread/libjaxcomm_native.a --sanitize thread

One that survives shows code that nothing needs, or a test that is too weak.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIMIT_S = 300  # of one compilation or run; a broken one may hang

PORTABLE = "ffi/include/jaxcomm/portable.h"
SYNC = "ffi/include/jaxcomm/sync.h"
COPY = "ffi/include/jaxcomm/copy.h"
BLOCK = "ffi/include/jaxcomm/block.h"
FLAGGED = "ffi/include/jaxcomm/flagged.h"
FLAGGED_CALL = "ffi/cuda/flagged.cuh"
MULTIMEM = "ffi/cuda/multimem.cuh"
EXAMPLE = "examples/fused_rmsnorm/fused_rmsnorm.cuh"
EXECUTOR = "ffi/cuda/executor.cuh"
LOCATE = "ffi/cuda/locate.cuh"
PROGRAM = "ffi/cuda/program.cc"
CALL_PROGRAM = "ffi/cuda/call_program.cc"
GIN = "ffi/cuda/gin_network.cuh"
PACKING = "ffi/cuda/packing.cc"
ROUNDS = "ffi/cuda/rounds.cc"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    test: str = "executor"


# Noticed as a data race, or by what any flavour sees.
THREAD = [
    Mutant(
        "a signal releases nothing",
        PORTABLE,
        "__atomic_store_n(word, value, __ATOMIC_RELEASE)",
        "__atomic_store_n(word, value, __ATOMIC_RELAXED)",
    ),
    Mutant(
        "a wait acquires nothing",
        PORTABLE,
        "__atomic_load_n(word, __ATOMIC_ACQUIRE)",
        "__atomic_load_n(word, __ATOMIC_RELAXED)",
    ),
    Mutant("signals don't wait for other threads", EXECUTOR, "__syncthreads();  // everything before", "// before"),
    Mutant("waits hold up one thread only", EXECUTOR, "if (__syncthreads_or(!ok) != 0)", "if (!ok)"),
    Mutant("steps are not ordered", EXECUTOR, "if (step.sync) __syncthreads();", ""),
    Mutant("reads conflict with nothing", PROGRAM, "(a.write || b.write)", "a.write && b.write"),
    Mutant(
        "nobody enters",
        PROGRAM,
        """    AddPhase(steps, kEnter, StepKind::kSignal, near);
    AddPhase(steps, kEnter, StepKind::kSignal, far.to_own);
    AddPhase(steps, kEnter, StepKind::kWait, near);
    AddPhase(steps, kEnter, StepKind::kWait, far.from_own);
""",
        "",
    ),
    Mutant(
        "nobody enters between nodes",
        PROGRAM,
        """    AddPhase(steps, kEnter, StepKind::kSignal, far.to_own);
    AddPhase(steps, kEnter, StepKind::kWait, near);
    AddPhase(steps, kEnter, StepKind::kWait, far.from_own);
""",
        "    AddPhase(steps, kEnter, StepKind::kWait, near);\n",
    ),
    Mutant(
        "nobody leaves",
        PROGRAM,
        """    AddPhase(steps, kLeave, StepKind::kSignal, near);
    AddPhase(steps, kLeave, StepKind::kSignal, far.open_from_own);
    AddPhase(steps, kLeave, StepKind::kWait, near);
    AddPhase(steps, kLeave, StepKind::kWait, far.open_to_own);
""",
        "",
    ),
    Mutant(
        "waits are satisfied one signal early",
        SYNC,
        "comm.signals.received[row + peer] + 1;",
        "comm.signals.received[row + peer];",
    ),
    Mutant("waits are not counted", SYNC, "comm.signals.received[row + peer] = expected;", ""),
    Mutant("signals are not counted", SYNC, "comm.signals.sent[row + peer] = count;", ""),
    Mutant(
        "channels share counters",
        SYNC,
        "return static_cast<int64_t>(channel) * comm.local.size;",
        "return channel * 0;",
    ),
    Mutant(
        "one peer twice at once",
        PROGRAM,
        "peers.insert(steps[end].step.peer).second)",
        "(peers.insert(steps[end].step.peer), true))",
    ),
    Mutant("channels begin at element 0", EXECUTOR, "part.begin + number % part.count", "number % part.count"),
    Mutant(
        "channels begin at element 0 of flat steps",
        EXECUTOR,
        "if (step.flat) elements.first += elements.part.begin;",
        "",
    ),
    Mutant("channels share scratch", EXECUTOR, "elements.first += program.scratch_begin;", ""),
    Mutant(
        "operands come in another order",
        EXECUTOR,
        "operands.At(s, i)",
        "operands.At(operands.step.step.num_sources - 1 - s, i)",
    ),
    Mutant(
        "a put's signal overtakes other threads",
        COPY,
        "  __syncthreads();\n  if (threadIdx.x == 0) Signal",
        "  if (threadIdx.x == 0) Signal",
        "device_api",
    ),
    Mutant(
        "a barrier's signals overtake other threads",
        SYNC,
        "  __syncthreads();\n  bool reached",
        "  bool reached",
        "device_api",
    ),
    Mutant(
        "a barrier's waits hold up one thread only",
        SYNC,
        "return __syncthreads_or(!reached) == 0;",
        "return reached;",
        "device_api",
    ),
    Mutant("who has given up goes on signalling", SYNC, "  if (HasGivenUp(comm, channel)) return;\n", "", "device_api"),
    Mutant(
        "reports name the peer by its place in the node",
        SYNC,
        "report.peer = comm.local.World(peer);",
        "report.peer = peer;",
        "device_api",
    ),
    Mutant(
        "every block reports",
        SYNC,
        "if (!Claim(&report.state, Report::kNone, Report::kClaimed)) return;",
        "",
        "failures",
    ),
    Mutant("nobody hears the host give up", SYNC, "LoadAcquire(&comm.report->abort) != 0 || ", "", "failures"),
    Mutant(
        "nobody hears other blocks give up",
        SYNC,
        " || LoadAcquire(&comm.report->state) != Report::kNone;",
        ";",
        "device_api",
    ),
    Mutant(
        "kernels begin after others have given up",
        EXECUTOR,
        "if (!device::MayBegin(args_.comm)) return;",
        "",
        "failures",
    ),
    Mutant(
        "kernels begin in channels that have not given up",
        EXECUTOR,
        "if (!device::MayBegin(args_.comm)) return;",
        "if (__syncthreads_or(device::HasGivenUp(args_.comm, channel_)) != 0) return;",
        "failures",
    ),
    Mutant("a kernel that gives up stops nothing else", SYNC, "  Stop(comm);\n", "", "failures"),
    Mutant(
        "steps begin before other threads have copied the operand",
        EXECUTOR,
        "args_.item_bytes);\n      __syncthreads();",
        "args_.item_bytes);",
        "call",
    ),
    Mutant("channels copy one block", EXECUTOR, "(whole ? 1 : part.num_blocks)", "1", "call"),
    Mutant("channels copy no whole rows", EXECUTOR, "(whole ? count * part.num_blocks : count)", "count", "call"),
    Mutant(
        "a sum over a block begins before its values are there",
        BLOCK,
        "  shared[thread] = value;\n  __syncthreads();",
        "  shared[thread] = value;",
        "device_api",
    ),
    Mutant(
        "a sum over a block ends before its parts are there",
        BLOCK,
        "  __syncthreads();\n  float sum",
        "  float sum",
        "device_api",
    ),
    Mutant("slots are not doubled", FLAGGED, "static_cast<int64_t>(exchange.epoch % 2)", "0", "flagged"),
    Mutant("channels share slots", FLAGGED, "2 * int64_t{exchange.channel}", "0", "flagged"),
    Mutant("senders share slots", FLAGGED, "half * comm.local.size + unit.peer", "half * comm.local.size", "flagged"),
    Mutant(
        "exchanges are not counted",
        FLAGGED,
        "if (threadIdx.x == 0) StoreRelaxed(comm.slots.epochs + exchange.channel, exchange.epoch);",
        "",
        "flagged",
    ),
    Mutant(
        "exchanges are counted before all threads have begun them",
        FLAGGED,
        "if (__syncthreads_or(!received) != 0) return false;",
        "if (!received) return false;",
        "flagged",
    ),
    Mutant(
        "only the first half's flag is looked at",
        FLAGGED,
        " && (second[k] >> 32) == exchange.flag()",
        "",
        "flagged",
    ),
    Mutant(
        "only the second half's flag is looked at",
        FLAGGED,
        "(first[k] >> 32) == exchange.flag() && ",
        "",
        "flagged",
    ),
    Mutant(
        "only the first unit of a batch must have come",
        FLAGGED,
        "if (!here) missing = k;",
        "if (!here && k == 0) missing = k;",
        "flagged",
    ),
    Mutant(
        "who has given up goes on exchanging",
        FLAGGED,
        "if (!MayBegin(comm)) return false;",
        "__syncthreads();",
        "flagged",
    ),
    Mutant(
        "waits for units have no end",
        FLAGGED,
        "if (looks % kLooksBetweenClocks != 0) continue;",
        "if (looks > 0) continue;",
        "flagged",
    ),
    Mutant(
        "reports name a peer that has come",
        FLAGGED,
        "units(missing < count ? missing : 0).peer",
        "units(0).peer",
        "flagged",
    ),
    Mutant(
        "flags stay until they come again",
        FLAGGED,
        "if (!IsSwept(exchange->epoch)) return true;",
        "if (exchange->epoch > 0) return true;",
        "flagged",
    ),
    Mutant(
        "a sweep takes what is sent with it", FLAGGED, "  __syncthreads();  // before what is sent\n", "", "flagged"
    ),
    Mutant("all pieces are the same", FLAGGED_CALL, "owner * args_.num_channels", "0", "flagged"),
    Mutant(
        "sums are sent in the exchange of what is added up",
        FLAGGED_CALL,
        "|| !received || !device::BeginExchange(comm_, channel_, &exchange_)",
        "|| !received",
        "flagged",
    ),
    Mutant(
        "operands with flags come in another order",
        FLAGGED_CALL,
        "own : payloads[k];",
        "own : payloads[count - 1 - k];",
        "flagged",
    ),
    Mutant("a last unit is stored whole", FLAGGED_CALL, "last >= block_count || ", "", "flagged"),
    Mutant(
        "a unit of several runs is taken whole",
        FLAGGED_CALL,
        "first / blocks.run != last / blocks.run",
        "false",
        "flagged",
    ),
    Mutant(
        "nobody enters before the switch is asked",
        MULTIMEM,
        "if (!device::Barrier(comm_, channel_, kEnter)) return;",
        "__syncthreads();",
        "multimem",
    ),
    Mutant(
        "nobody waits for what the switch hands out",
        MULTIMEM,
        "if (!device::Barrier(comm_, channel_, kLeave)) return;",
        "__syncthreads();",
        "multimem",
    ),
    Mutant(
        "who could not leave takes a result away",
        MULTIMEM,
        "if (!device::Barrier(comm_, channel_, kLeave)) return;",
        "device::Barrier(comm_, channel_, kLeave);",
        "multimem",
    ),
    Mutant(
        "who has given up brings operands",
        MULTIMEM,
        "if (!device::MayBegin(comm_)) return;",
        "__syncthreads();",
        "multimem",
    ),
    Mutant(
        "all ranks add up the same piece in the switch",
        MULTIMEM,
        "Share(units_, comm_.local.size, comm_.local.rank)",
        "Share(units_, comm_.local.size, 0)",
        "multimem",
    ),
    Mutant(
        "channels share units of the arena",
        MULTIMEM,
        "Share({0, MultimemUnits(args)}, args.num_channels, channel)",
        "Share({0, MultimemUnits(args)}, 1, 0)",
        "multimem",
    ),
    Mutant(
        "a last unit that is not full is left out",
        MULTIMEM,
        "args.item_bytes + kMultimemUnitBytes - 1) /",
        "args.item_bytes) /",
        "multimem",
    ),
    Mutant(
        "what is for all stays with one rank",
        MULTIMEM,
        "device::MulticastStore(all + unit, value);",
        "own[unit] = value;",
        "multimem",
    ),
    Mutant("the example's rounds share one half of the window", EXAMPLE, "round % 2", "round % 1", "example"),
    Mutant(
        "every call of the example begins with the same half",
        EXAMPLE,
        "if (threadIdx.x == 0 && round != rounds_before) args.rounds[channel] = round;",
        "",
        "example",
    ),
    Mutant(
        "the example reads before its peers have written",
        EXAMPLE,
        "if (!device::Barrier(args.comm, channel, static_cast<int32_t>(first))) return;",
        "__syncthreads();",
        "example",
    ),
    Mutant(
        "the example's rows begin where others have not ended",
        EXAMPLE,
        "    __syncthreads();\n    for (int64_t token",
        "    for (int64_t token",
        "example",
    ),
    Mutant(
        "the example begins after others have given up",
        EXAMPLE,
        "  if (!device::MayBegin(args.comm)) return;\n",
        "",
        "example",
    ),
    Mutant("every thread puts", GIN, "if (threadIdx.x == number % num_warps * warpSize) {", "{"),
    Mutant(
        "letters of two calls in one place",
        LOCATE,
        "static_cast<int64_t>(count % 2) * num_ranks + sender",
        "static_cast<int64_t>(count % 1) * num_ranks + sender",
        "locate",
    ),
    Mutant(
        "who has given up goes on sending letters",
        LOCATE,
        "  if (!device::MayBegin(comm)) return;\n",
        "",
        "locate",
    ),
]

# Show between nodes, in less time than under ThreadSanitizer.
PLAIN = [
    Mutant(
        "reductions of short runs leave out an operand",
        EXECUTOR,
        "for (int s = 1; s < num_sources; ++s) sum.template",
        "for (int s = 2; s < num_sources; ++s) sum.template",
    ),
    Mutant(
        "units are longer than runs", EXECUTOR, "flat ? first : first | part.count | part.begin | part.run", "first"
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
    Mutant("what needs a flush joins what doesn't", PROGRAM, " && !steps[end].flush &&", " &&"),
    Mutant(
        "nobody leaves between nodes",
        PROGRAM,
        """    AddPhase(steps, kLeave, StepKind::kSignal, far.open_from_own);
    AddPhase(steps, kLeave, StepKind::kWait, near);
    AddPhase(steps, kLeave, StepKind::kWait, far.open_to_own);
""",
        "    AddPhase(steps, kLeave, StepKind::kWait, near);\n",
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
    Mutant("queues have room for everything", PROGRAM, "num_pieces > kMostPutsUnderWay", "num_pieces < 0"),
    Mutant("puts of many runs are not cut", PACKING, "pieces_.MostPuts(part) > kMostPutsUnderWay", "false"),
    Mutant("parcels have one place", PACKING, "      end_[step.peer] += Aligned(step.count);\n", ""),
    Mutant(
        "parcels lie where their receiver sends from",
        PACKING,
        "sends_.back().begin + Aligned(sends_.back().count)",
        "sends_.back().begin",
    ),
    Mutant(
        "what is packed lies in the plan's scratch",
        PACKING,
        "sends_.push_back({Aligned(plan.scratch_count), ",
        "sends_.push_back({0, ",
    ),
    Mutant("all that is packed has one place", PACKING, "        packed += Aligned(step.count);\n", "", "packing"),
    Mutant("sends wait for each other", PROGRAM, " && Overwrites(behind, put)", "", "packing"),
    Mutant(
        "parcels are unpacked one signal early",
        PACKING,
        "num_received[step.peer]++, origin",
        "++num_received[step.peer], origin",
    ),
    Mutant(
        "parcels are unpacked before they have come",
        PACKING,
        "      Add(plan.rank, Synchronize(StepKind::kWait, peer), kLeave);\n",
        "",
    ),
    Mutant(
        "nobody waits for puts to be read", GIN, "args_.puts[channel],", "args_.puts[channel] - args_.puts[channel],"
    ),
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
        "nobody reports puts that are not read",
        GIN,
        "device::WaitUntil(args_.comm, channel, args_.comm.local.rank, kFlush",
        "device::WaitUntil(args_.comm, channel, args_.comm.local.rank, kLeave",
        "gin",
    ),
    Mutant("what other nodes send is not waited for", ROUNDS, "if (far) rank.awaited =", "if (false) rank.awaited ="),
    Mutant(
        "packs don't wait until their slot has been sent",
        ROUNDS,
        "rank.awaited = std::max(rank.awaited, rank.round - num_slots_ + 1);",
        "",
    ),
    Mutant(
        "rounds don't wait for what they send",
        ROUNDS,
        "return channel.EndOf(round);",
        "return round * 0 + channel.next;",
    ),
    Mutant(
        "signals of the own node carry no level", ROUNDS, "rank.round + 1 : rank.level", "rank.round + 1 : 0", "rounds"
    ),
    Mutant("leaving has no level", ROUNDS, "std::max(leave.level, ranks_[r].level)", "leave.level + r * 0", "rounds"),
    Mutant("channels keep to no common order", ROUNDS, ", channel.AtLevel(level)", ", channel.next", "rounds"),
    Mutant(
        "a segment takes what waits for a round",
        ROUNDS,
        "std::min(ends[c], channel.AtLevel(blocked))",
        "std::max(begin, ends[c])",
    ),
    Mutant("segments run on with what is run together", ROUNDS, "    steps[i].together = end - i;\n", ""),
    Mutant("all chunks are in one round", ROUNDS, "rank.filled >= round_count_ ? 1 : 0", "0", "rounds"),
    Mutant("channels share a place in a message", ROUNDS, "parts[c + 1] += parts[c];", "parts[c + 1] += 0;"),
    Mutant("signals without data are empty", ROUNDS, "std::max(parts.back(), grain)", "parts.back()", "rounds"),
    Mutant(
        "the end waits for no round",
        ROUNDS,
        "    if (!rounds_.empty()) Await(rounds_.back() + 1);\n",
        "",
        "rounds",
    ),
]


class Build:
    """Compiles tests from copies of the sources; objects that a mutant does not touch are shared."""

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self.args = args
        self.folder = folder
        self.flags = ["-std=c++17", "-O1", "-pthread", "-DJAXCOMM_TEST_ONE_TYPE"]
        if args.sanitize:
            self.flags += [f"-fsanitize={args.sanitize}", "-g1"]
        self.objects: dict[str, pathlib.Path] = {}

    def copy(self, name: str) -> pathlib.Path:
        tree = self.folder / name
        for part in ("ffi", "examples", "tests/cuda", "tests/check.h"):
            shutil.copytree(ROOT / part, tree / part)
        # The tests use two types; the others would take most of the time to compile.
        reductions = tree / "ffi" / "cuda" / "reductions.h"
        text = re.sub(r"    JAXCOMM_CASE\((?!kF32,|kS32,).*\n", "", reductions.read_text())
        reductions.write_text(text)
        return tree

    def compile(self, tree: pathlib.Path, source: str) -> pathlib.Path:
        output = tree / (pathlib.Path(source).stem + ".o")
        define = f'-DJAXCOMM_EMULATION="{tree}/tests/cuda/emulation.h"'
        include = f"-I{tree}/ffi/include"
        command = [self.args.compiler, *self.flags, define, include, "-c", tree / source, "-o", output]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return output

    def link(self, output: pathlib.Path, objects: list[pathlib.Path]) -> pathlib.Path:
        command = [self.args.compiler, *self.flags, *objects, self.args.library, "-ldl", "-o", output]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        return output


def run(program: pathlib.Path, test: str) -> str:
    """What went wrong, in a few words; empty if nothing did."""
    command = [program, "reduced"] if test in ("executor", "flagged", "multimem") else [program]
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "stuck"
    if done.returncode == 0:
        return ""
    telling = [line for line in done.stderr.splitlines() if line.strip("= ")]
    return telling[0].strip()[:100] if telling else f"status {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True, help="libjaxcomm_native.a, built with the same sanitizer")
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--sanitize", default="", choices=["", "thread"])
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    args = parser.parse_args()
    mutants = [mutant for mutant in (THREAD if args.sanitize else PLAIN) if args.only in mutant.name]
    tests = sorted({mutant.test for mutant in mutants})

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        build = Build(args, pathlib.Path(folder))
        tree = build.copy("sound")
        sources = {test: f"tests/cuda/test_{test}.cc" for test in tests}
        parts = {"packer": PACKING, "program": PROGRAM, "call_program": CALL_PROGRAM, "cut": ROUNDS}  # not in a header
        sources |= parts
        sound = dict(zip(sources, pool.map(lambda source: build.compile(tree, source), sources.values()), strict=True))

        def check_sound(test: str) -> bool:
            program = build.link(tree / f"test_{test}", [sound[name] for name in (test, *parts)])
            fault = run(program, test)
            print(f"{'FAILS: ' + fault if fault else 'passes'}: test_{test} of the sources as they are", flush=True)
            return not fault

        def check(mutant: Mutant) -> bool:
            began = time.monotonic()
            copy = build.copy(mutant.name.replace(" ", "_"))
            text = (copy / mutant.file).read_text()
            if text.count(mutant.old) != 1:
                print(f"NOT APPLICABLE: {mutant.name}: {mutant.file} has the text {text.count(mutant.old)} times")
                return False
            (copy / mutant.file).write_text(text.replace(mutant.old, mutant.new))
            broken = next((name for name, file in parts.items() if file == mutant.file), mutant.test)
            used = {name: sound[name] for name in (mutant.test, *parts)}
            used[broken] = build.compile(copy, sources[broken])
            fault = run(build.link(copy / "test", list(used.values())), mutant.test)
            shutil.rmtree(copy)
            print(
                f"{'noticed' if fault else 'SURVIVES'}: {mutant.name} ({time.monotonic() - began:.0f} s): {fault}",
                flush=True,
            )
            return bool(fault)

        passing = pool.map(check_sound, tests)
        noticed = pool.map(check, mutants)
        ok = all([*passing, *noticed])
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
