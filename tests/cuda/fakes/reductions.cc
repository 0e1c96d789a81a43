// Compiled with JAXCOMM_EMULATION, once for all programs that include reductions.h.
#define JAXCOMM_REDUCTIONS_EXTERN
#include "reductions.h"
