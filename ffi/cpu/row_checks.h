// Checks of the rows that a call names at run time. They run once all local ranks have arrived, before a row moves.
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/status.h"
#include "cpu/rendezvous.h"
#include "plan/slices.h"

namespace jaxcomm {

// The hash of the table of a participant, or 0 without a table. All ranks of a call must have the same table: each
// computes from it where the rows of the others lie. A routing is plain data, which a program may change.
uint64_t HashOfTable(const Participant& participant);
constexpr char kDifferentTables[] = ", with different tables of slices: the routing of one of them was changed";

// The checked slices of an all_to_all_v, a dispatch or a combine; none for other collectives.
StatusOr<Slices> CheckedSlices(const CallSpec& spec, const Participant& participant, int64_t group);

// Checks the rows that a rank names itself. A routing is plain data, which a program may change. participant: any rank
// of the call. position: of the rank with these buffers.
Status CheckRows(const CallSpec& spec, const Participant& participant, const RankBuffers& buffers, const Slices& slices,
                 int32_t position);

}  // namespace jaxcomm
