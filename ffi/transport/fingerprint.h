// The hashes of a call that all its processes must have.
#pragma once

#include <cstdint>

namespace jaxcomm {

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

}  // namespace jaxcomm
