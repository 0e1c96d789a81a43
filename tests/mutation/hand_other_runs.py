"""Mistakes in the comparison of runs: processes that execute different programs."""

from mutation.hand import Mutant

CHECKS, MESSAGES = "ffi/cpu/inter_process_checks.cc", "ffi/cpu/active_messages.cc"

MUTANTS = [
    Mutant(
        "processes of a node that are in other runs are not found",
        CHECKS,
        "    if (found && !skip && !is_over(found->run_id)) return found;\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process that is in another run is an error too early",
        CHECKS,
        "  if (now - other_run_since_ < kOtherRun) return;\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process of the node in two runs is an error",
        CHECKS,
        " || run_id != their_run_id.value_or(run_id);",
        ";",
        "test_other_runs",
    ),
    Mutant(
        "a process of the node in another call of the run is an error",
        CHECKS,
        "skip |= run_id == spec_.run.run_id || ",
        "skip |= ",
        "test_other_runs",
    ),
    Mutant(
        "a call of another group is an error",
        CHECKS,
        "slot.group.load() != spec_.run.group || ",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process that has not noticed the end of its call is an error",
        CHECKS,
        " || slot.exited.load() != 0) return;",
        ") return;",
        "test_other_runs",
    ),
    Mutant(
        "a process in two runs compares itself",
        CHECKS,
        "  if (in_several_runs) return std::nullopt;\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process that has not noticed a failure is an error",
        CHECKS,
        "return own.FindFailure(run_id).has_value();",
        'return own.FindFailure(run_id) == "";',
        "test_other_runs",
    ),
    Mutant(
        "processes of the node in the other run get no error",
        CHECKS,
        "    node_.control_segment().AddFailure(found->run_id, error.message());\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "processes of other nodes in the other run get no error",
        CHECKS,
        "    active_messages_->SendAborted(found->process, found->key, error.message());\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process of another node that has entered the call is compared",
        CHECKS,
        "    if (has_entered_[i].load()) continue;\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process whose payload still arrives is compared after it has left",
        CHECKS,
        "  if (phase_.load() == Phase::kExitBarrier && has_received_.load()) return std::nullopt;\n",
        "",
        "test_other_runs",
    ),
    Mutant(
        "a process of another node in the same run is an error",
        MESSAGES,
        "if (run.run_id == own.run_id || ",
        "if (",
        "test_active_messages test_other_runs",
    ),
    Mutant(
        "a process of another node in two runs is an error",
        MESSAGES,
        " || run.run_id != run_id.value_or(run.run_id)) return",
        ") return",
        "test_active_messages test_other_runs",
    ),
    Mutant(
        "a call of another group on another node is an error",
        MESSAGES,
        "if (run.group == own.group && ",
        "if (",
        "test_active_messages test_other_runs",
    ),
    Mutant(
        "the run of a call that waits is not sent",
        MESSAGES,
        "  header.run = run;\n",
        "",
        "test_active_messages test_other_runs",
    ),
]
