// The device API: what kernels use to communicate inside a node, ours and those of users.
#pragma once

#include "block.h"
#include "comm.h"
#include "copy.h"
#include "ll.h"
#include "multimem.h"
#include "reduce.h"
#include "sync.h"
