// The collectives, and the row of traits of each. Code asks the row and does not compare names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxcomm {

enum class Collective : uint8_t {
#define JAXCOMM_COLLECTIVE(enumerator, ...) enumerator,
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
};

// What an element of a plan is.
enum class ElementKind : uint8_t {
  kArray,   // an element of the array
  kSlices,  // a list of slices of rows (plan/slices.h), known at run time only; a block has one element
  kTokens,  // a list of rows of tokens (plan/routing.h), known at run time only; a block has one element
  kBoxes,   // an element of the array; the buffers are boxes of a global array (plan/boxes.h), and differ by rank
};

// The number of blocks in a buffer of one rank.
enum class BufferBlocks : uint8_t { kNone, kOne, kPerRank };

// Block `block` of the output of rank `rank`.
struct Part {
  int32_t rank = 0;
  int32_t block = 0;
  int32_t root = 0;     // of the request
  int32_t source = -1;  // source_of[rank] of the request; -1: none
};

// The contents of a Part: block `block` of the input of rank `rank`, zeros, or block `block` of the sum of all inputs.
struct Expected {
  int32_t rank = 0;  // or kZeros or kSum
  int32_t block = 0;

  static constexpr int32_t kZeros = -1;
  static constexpr int32_t kSum = -2;
};

struct CollectiveTraits {
  Collective collective;
  const char* name;       // native name
  const char* functions;  // public functions, separated by spaces; X_start is the asynchronous X
  ElementKind elements;
  BufferBlocks input;
  BufferBlocks output;
  Expected (*expected)(const Part& part);  // null if the output has no blocks
  // The blocks that a group of g of n ranks must at least receive from outside, on average over all groups of that
  // size. Null: unknown from n and g.
  double (*blocks_into)(double n, double g);
  const char* attributes;  // attributes of a call besides those that all collectives have, separated by spaces
  bool composed;           // jaxcomm/_xla_hierarchical.py composes it of XLA's collectives

  bool Takes(const std::string& attribute) const;  // whether `attributes` lists it
  bool TakesRoot() const { return Takes("root"); }
  bool TakesPermutation() const { return Takes("source_of"); }
  bool OfLists() const { return elements == ElementKind::kSlices || elements == ElementKind::kTokens; }
  bool OfBoxes() const { return elements == ElementKind::kBoxes; }
  // Adds the rows that come back for a token; the other collective of tokens sends copies of them.
  bool SumsTokens() const { return elements == ElementKind::kTokens && output == BufferBlocks::kOne; }
  bool Reduces() const { return !OfLists() && expected != nullptr && expected({}).rank == Expected::kSum; }
};

// The rows in the order of the enumerators.
const std::vector<CollectiveTraits>& Collectives();
const CollectiveTraits& TraitsOf(Collective collective);

inline const char* Name(Collective collective) { return TraitsOf(collective).name; }
// Plans of these collectives are over lists of rows, which are known at run time only.
inline bool OfLists(Collective collective) { return TraitsOf(collective).OfLists(); }
inline bool Reduces(Collective collective) { return TraitsOf(collective).Reduces(); }

}  // namespace jaxcomm
