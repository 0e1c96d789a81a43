// Plans of all_to_all_v: list j of rank r goes to list r of rank j. The plans are those of all_to_all over lists. The
// executor reads the offsets and sizes of their slices at run time.
#include "plan/partition.h"

namespace jaxcomm {

template <>
const std::vector<Algorithm>& Table<Collective::kAllToAllV>() {
  static const std::vector<Algorithm> table = [] {
    std::vector<Algorithm> rows;
    for (const char* name : {"direct", "pairwise"}) rows.push_back(*FindAlgorithm(Collective::kAllToAll, name));
    return rows;
  }();
  return table;
}

}  // namespace jaxcomm
