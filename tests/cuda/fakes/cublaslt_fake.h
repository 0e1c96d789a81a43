// A fake of cuBLASLt that multiplies on the CPU, in the order of its stream. Each product writes to its workspace
// first, and its result last.
#pragma once

#include <cstdint>

namespace jaxcomm {
namespace fake {

// The settings of the last product that this thread has enqueued.
struct LastProduct {
  int compute_type = 0;
  uint32_t alignment_bytes = 0;
  uint64_t workspace_bytes = 0;
};
extern thread_local LastProduct last_product;
extern thread_local int num_products;   // that this thread has enqueued
extern thread_local bool has_cublaslt;  // else the library is missing

}  // namespace fake
}  // namespace jaxcomm
