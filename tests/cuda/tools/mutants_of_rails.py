"""Mutants of dispatch and combine between nodes: messages, marks of rows, lists, sums, signals and routings."""

from kernel_mutant import GIN, RAIL_CALL, RAIL_COMBINE, RAIL_ROW_ARGS, RAIL_ROWS, ROWS, SYNC, Mutant

_PUT = (
    "if (Thread() == 0 && gin_.Put(channel_, peer, Received(rail_.rank), Sent(d), bytes)) gin_.Signal(channel_, peer);"
)

RAILED = [
    # Order, in all executions of the memory model.
    Mutant(
        "a message overwrites one that is still read",
        RAIL_ROWS,
        "      if (!gin_.Wait(channel_, peer, device::OfBlock(), kEntryBarrier)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "a message is read before it is there",
        RAIL_ROWS,
        "      if (d > 0 && !gin_.Wait(channel_, rail_.World(source), device::OfBlock(), step)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "the signal comes before the message",
        RAIL_ROWS,
        _PUT,
        "if (Thread() == 0) {\n        gin_.Signal(channel_, peer);\n"
        "        gin_.Put(channel_, peer, Received(rail_.rank), Sent(d), bytes);\n      }",
        "litmus_rail_rows",
    ),
    Mutant(
        "the next call overwrites a message that the network reads",
        RAIL_ROWS,
        "gin_.Flush(channel_, device::OfBlock()) && device::Barrier(",
        "device::Barrier(",
        "litmus_rail_rows",
    ),
    Mutant(
        "a peer of the node reads a message before it is there",
        RAIL_ROWS,
        "      if (!device::Barrier(node_, channel_, step)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "the next call overwrites a message that a peer of the node reads",
        RAIL_ROWS,
        " && device::Barrier(node_, channel_, kExitBarrier);",
        ";",
        "litmus_rail_rows",
    ),
    # Data.
    Mutant(
        "a row goes to a node once per choice",
        RAIL_ROWS,
        "    MarkRows(choices);\n",
        "    MarkRows({0, args_.num_choices});\n",
        "rail_rows",
    ),
    Mutant("marks of the last node stay", RAIL_ROWS, "device::StoreRelaxed(marks_ + i, 0);", ";", "rail_rows"),
    Mutant(
        "a mark that another thread changes at the same time is lost",
        RAIL_ROWS,
        "if ((seen & mark) != 0 || device::Claim(word, seen, seen | mark)) break;",
        "emulation::Pause();\n        device::StoreRelaxed(word, seen | mark);\n        break;",
        "rail_rows",
    ),
    Mutant(
        "positions count from the word on", RAIL_ROWS, "return BeginOf(marked_, row / 64) + ", "return ", "rail_rows"
    ),
    Mutant(
        "the row itself counts", RAIL_ROWS, "<< row % 64) - 1;\n    return", "<< row % 64);\n    return", "rail_rows"
    ),
    Mutant(
        "a bit is looked for one place too early", RAIL_ROWS, "if (before < below)", "if (before <= below)", "rail_rows"
    ),
    Mutant(
        "all nodes have the choices of the first",
        RAIL_ROWS,
        "ChoicesFor(home, rail_.rank)",
        "ChoicesFor(home, 0)",
        "rail_rows",
    ),
    Mutant(
        "nodes are unpacked in another order than their sums",
        RAIL_CALL,
        "const int32_t home = node_of(i / slices) * locals",
        "const int32_t home = i / slices * locals",
        "rail_rows",
    ),
    Mutant(
        "messages of two channels share memory",
        RAIL_ROWS,
        "(int64_t{source} * args_.num_channels + channel_) * RailMessageBytes",
        "(int64_t{source} * args_.num_channels) * RailMessageBytes",
        "rail_rows",
    ),
    Mutant(
        "the whole memory of a message crosses",
        RAIL_ROWS,
        "return RailListBytes(choices.size) + num_rows * piece_bytes_;",
        "return RailMessageBytes(args_);",
        "rail_rows",
    ),
    Mutant(
        "messages to two nodes share memory",
        RAIL_ROWS,
        "return Received(num_nodes() + d - 1);",
        "return Received(num_nodes());",
        "rail_rows",
    ),
    Mutant(
        "sums of marks share the marks' memory", RAIL_ROW_ARGS, "sizeof(uint64_t) + sizeof(int32_t)", "1", "rail_rows"
    ),
    # Checks.
    Mutant(
        "a wrong table moves rows between nodes all the same",
        ROWS,
        "|| !CheckTable()) return;",
        "|| (CheckTable(), false)) return;",
        "rail_rows",
    ),
    Mutant(
        "a position may name any row",
        RAIL_ROWS,
        "Exists(at) ? message + RailListBytes(choices.size) + at * piece_bytes_ : nullptr",
        "message + RailListBytes(choices.size) + at * piece_bytes_",
        "rail_rows",
    ),
    Mutant("a wrong row between nodes is not reported", RAIL_ROWS, "        RememberRow(row);\n", "", "rail_rows"),
    # Over the network and then inside a node.
    Mutant(
        "a wait for the network orders nothing",
        GIN,
        "[&] { return gin.readSignal(signal); }",
        "[&] { return gin.readSignal(signal, 64, ::cuda::memory_order_relaxed); }",
        "litmus_nodes",
    ),
    Mutant(
        "a signal over the network does not wait for the put",
        GIN,
        "ncclGin_StrongSignalInc{",
        "ncclGin_WeakSignalInc{",
        "litmus_nodes",
    ),
    Mutant(
        "a rank of the node does not wait for what its peer got over the network",
        SYNC,
        "if (i != comm.local.rank) reached = Wait(comm, channel, i, step);",
        "",
        "litmus_nodes",
    ),
    Mutant(
        "the barrier of a node does not release what came over the network",
        SYNC,
        "StoreRelease(comm.signals.pad.At<uint64_t>(peer) + row + comm.local.rank, count);",
        "StoreRelaxed(comm.signals.pad.At<uint64_t>(peer) + row + comm.local.rank, count);",
        "litmus_nodes",
    ),
    Mutant(
        "the barrier of a node does not acquire what came over the network",
        SYNC,
        "[&] { return LoadAcquire(word); }",
        "[&] { return LoadRelaxed(word); }",
        "litmus_nodes",
    ),
    # combine: order, in all executions of the memory model.
    Mutant(
        "a list overwrites one that is still read",
        RAIL_COMBINE,
        "      if (!gin_.Wait(channel_, peer, device::OfBlock(), kEntryBarrier)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "a list is read before it is there",
        RAIL_COMBINE,
        "    if (!own && !gin_.Wait(channel_, peer, device::OfBlock(), step)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "sums are added before they are there",
        RAIL_COMBINE,
        "      if (!gin_.Wait(channel_, rail_.World(Back(d)), device::OfBlock(), num_nodes() + d)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "one thread puts sums that others have not written yet",
        RAIL_COMBINE,
        "    __syncthreads();  // before one thread puts the sums\n",
        "",
        "rail_combine",
    ),
    Mutant(
        "the next combine overwrites what the network reads",
        RAIL_COMBINE,
        "return gin_.Flush(channel_, device::OfBlock());\n",
        "return true;\n",
        "rail_combine",
    ),
    Mutant(
        "rows are put to a peer that still adds those of the last call",
        RAIL_COMBINE,
        "    if (!device::Barrier(node_, channel_, kEntryBarrier)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    Mutant(
        "rows of peers are added before they are there",
        RAIL_COMBINE,
        "    if (!device::Barrier(node_, channel_, step)) return false;\n",
        "",
        "litmus_rail_rows",
    ),
    # combine: data.
    Mutant(
        "rows of the next node overwrite those that are still added",
        RAIL_COMBINE,
        "(turn % 2 * args_.num_choices + row)",
        "row",
        "rail_combine",
    ),
    Mutant(
        "rows of the next node but one overwrite those that the network reads",
        RAIL_COMBINE,
        "    if (at_home_ && !gin_.Flush(channel_, device::OfBlock())) return false;\n",
        "",
        "rail_combine",
    ),
    Mutant(
        "sums of two nodes share memory", RAIL_COMBINE, "+ turn * args_.num_rows * piece_bytes_", "", "rail_combine"
    ),
    Mutant(
        "lists for two nodes share memory",
        RAIL_COMBINE,
        "return ReceivedList(num_nodes() + d - 1);",
        "return ReceivedList(num_nodes());",
        "rail_combine",
    ),
    Mutant(
        "channels of a combine share memory",
        RAIL_COMBINE,
        "return channel_ * arena_.channel_bytes + offset;",
        "return offset;",
        "rail_combine",
    ),
    Mutant(
        "sums of all nodes arrive at the place of the first",
        RAIL_COMBINE,
        "      to = rail_.rank * args_.num_rows;\n",
        "      to = 0;\n",
        "rail_combine",
    ),
    Mutant(
        "sums at home are sums by node",
        "ffi/cuda/program/rail_row_args.cc",
        "spec.home != 0 || ",
        "",
        "rail_combine",
    ),
    Mutant(
        "weights stay at home",
        RAIL_COMBINE,
        "        CopyWeight(weights, entry++, c);\n",
        "        ++entry;\n",
        "rail_combine",
    ),
    Mutant(
        "a token ends where it begins",
        RAIL_COMBINE,
        "ends[at] = entry < choices.size ? entry : static_cast<int32_t>(choices.size);",
        "ends[at] = entries + before.before;",
        "rail_combine",
    ),
    Mutant(
        "tokens are numbered anew for each round of threads",
        RAIL_COMBINE,
        "      tokens += tokens_before.all;\n",
        "      tokens = tokens_before.all;\n",
        "rail_combine",
    ),
    Mutant(
        "choices of a node count from the first of all",
        RAIL_COMBINE,
        "positions[entry] = packed - static_cast<int32_t>(choices.begin);",
        "positions[entry] = packed;",
        "rail_combine",
    ),
    Mutant(
        "the list has a place for each choice of the rank",
        RAIL_COMBINE,
        "return choices.size > 0 ? RailEndsAt(choices.size, weight_bytes_)",
        "return choices.size > 0 ? RailEndsAt(args_.num_choices, weight_bytes_)",
        "rail_combine",
    ),
    Mutant(
        "lists are read behind the end of a node's choices",
        RAIL_COMBINE,
        "if (entries == 0) return 0;",
        "if (entries < 0) return 0;",
        "rail_combine",
    ),
    Mutant(
        "a row that the routing names twice is written behind the list",
        RAIL_COMBINE,
        "if (entry >= choices.size) {",
        "if (false) {",
        "rail_combine",
    ),
    Mutant(
        "a choice without an expert is not reported",
        RAIL_COMBINE,
        "(exists ? expert / (num_local_ * node_.local.size) : rail_.rank) == node",
        "exists && expert / (num_local_ * node_.local.size) == node",
        "rail_combine",
    ),
]
