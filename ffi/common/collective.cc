#include "common/collective.h"

namespace jaxcomm {
namespace {

// Names of the columns of collectives.def.
constexpr ElementKind kArray = ElementKind::kArray, kSlices = ElementKind::kSlices, kTokens = ElementKind::kTokens,
                      kBoxes = ElementKind::kBoxes;
constexpr BufferBlocks kNone = BufferBlocks::kNone, kOne = BufferBlocks::kOne, kPerRank = BufferBlocks::kPerRank;
constexpr Expected From(int32_t rank, int32_t block) { return {rank, block}; }
constexpr Expected Sum(int32_t block) { return {Expected::kSum, block}; }

}  // namespace

bool CollectiveTraits::Takes(const std::string& attribute) const {
  return (" " + std::string(attributes) + " ").find(" " + attribute + " ") != std::string::npos;
}

const std::vector<CollectiveTraits>& Collectives() {
  static const std::vector<CollectiveTraits> rows = {
#define JAXCOMM_COLLECTIVE(enumerator, name, handler, ...) {Collective::enumerator, #name, __VA_ARGS__},
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
  };
  return rows;
}

const CollectiveTraits& TraitsOf(Collective collective) { return Collectives()[static_cast<size_t>(collective)]; }

}  // namespace jaxcomm
