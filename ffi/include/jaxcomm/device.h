// The device API: communication inside a node for jaxcomm's kernels and for kernels of users.
#pragma once

#include "block.h"
#include "comm.h"
#include "copy.h"
#include "counters.h"
#include "ll.h"
#include "multimem.h"
#include "reduce.h"
#include "sync.h"
#include "threads.h"
