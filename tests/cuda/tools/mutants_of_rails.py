"""Mutants of dispatch between nodes: messages, marks of rows, signals over GIN and the checks of a routing."""

from kernel_mutant import RAIL_ROW_ARGS, RAIL_ROWS, Mutant

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
        RAIL_ROWS,
        "const int32_t home = Back(i / slices) * locals",
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
        RAIL_ROWS,
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
]
