// The version of jaxcomm. This is its only home: the build reads it from here.
#pragma once

#define JAXCOMM_VERSION_MAJOR 0
#define JAXCOMM_VERSION_MINOR 1
#define JAXCOMM_VERSION_PATCH 0

// Grows with the version, so that `#if JAXCOMM_VERSION >= 200` asks for 0.2.0.
#define JAXCOMM_VERSION (JAXCOMM_VERSION_MAJOR * 10000 + JAXCOMM_VERSION_MINOR * 100 + JAXCOMM_VERSION_PATCH)
