// Numbers that identify a call for other processes.
#pragma once

#include <cstdint>

namespace jaxcomm {

// The hashes that all processes of a call must have.
struct Fingerprint {
  // Not explicit: calls without a table have only the hash of the program.
  // NOLINTNEXTLINE(google-explicit-constructor)
  constexpr Fingerprint(uint64_t of_program = 0, uint64_t of_table = 0) : program(of_program), table(of_table) {}
  friend constexpr bool operator==(const Fingerprint& a, const Fingerprint& b) {
    return a.program == b.program && a.table == b.table;
  }
  friend constexpr bool operator!=(const Fingerprint& a, const Fingerprint& b) { return !(a == b); }

  uint64_t program;  // plans, sizes and attributes
  uint64_t table;    // the table of slices, known at run time only
};

// The execution and the group of a call. Processes that run different programs have different run ids.
struct RunAndGroup {
  int64_t run_id = 0;  // XLA's run id
  uint64_t group = 0;  // a hash of the groups and their devices; 0: the call is not compared with calls of other runs
};

}  // namespace jaxcomm
