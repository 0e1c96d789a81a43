// JAXCOMM_SIMD_CLONES: several versions of a function, one for each instruction set.
#pragma once

// One binary for all x86-64 machines: the loader selects the clone. Sanitizers do not support this mechanism (ifunc).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define JAXCOMM_SIMD_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define JAXCOMM_SIMD_CLONES
#endif
