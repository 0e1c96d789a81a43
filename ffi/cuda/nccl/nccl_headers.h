// NCCL's headers of the host functions. NCCL 2.31 moved some of them from core.h to host.h.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>
#if __has_include(<nccl_device/host.h>)
#include <nccl_device/host.h>
#endif
