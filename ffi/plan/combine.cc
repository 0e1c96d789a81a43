// Plans of combine: rank r adds the rows that list r of every rank holds. The plans are those of reduce_scatter over
// lists. The executor reads at run time which rows they are, and adds them in the order of the choices.
#include "plan/partition.h"

namespace jaxcomm {

template <>
const std::vector<Algorithm>& Table<Collective::kCombine>() {
  static const std::vector<Algorithm> table = {*FindAlgorithm(Collective::kReduceScatter, "direct")};
  return table;
}

}  // namespace jaxcomm
