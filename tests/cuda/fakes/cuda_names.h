// CUDA's names of a thread's position and of the block's barrier, over the namespace `emulation` of emulation.h or
// litmus.h.
#pragma once

// The number of threads per warp. It is small, so that small blocks have several warps.
constexpr int warpSize = 2;

#define threadIdx (::emulation::Current().thread)
#define blockIdx (::emulation::Current().block)
#define blockDim (::emulation::Current().block_dim)
#define gridDim (::emulation::Current().grid_dim)

inline void __syncthreads() { ::emulation::Arrive(0); }
inline int __syncthreads_or(int value) { return ::emulation::Arrive(value != 0); }
