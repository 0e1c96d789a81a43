// The version of jaxcomm. The build reads it from this file only.
#pragma once

#define JAXCOMM_VERSION_MAJOR 0
#define JAXCOMM_VERSION_MINOR 1
#define JAXCOMM_VERSION_PATCH 0

// Grows with the version: `#if JAXCOMM_VERSION >= 200` tests for 0.2.0 or later.
#define JAXCOMM_VERSION (JAXCOMM_VERSION_MAJOR * 10000 + JAXCOMM_VERSION_MINOR * 100 + JAXCOMM_VERSION_PATCH)

// "0.1.0"
#define JAXCOMM_VERSION_TEXT JAXCOMM_JOIN_VERSION(JAXCOMM_VERSION_MAJOR, JAXCOMM_VERSION_MINOR, JAXCOMM_VERSION_PATCH)
#define JAXCOMM_JOIN_VERSION(major, minor, patch) JAXCOMM_QUOTE(major) "." JAXCOMM_QUOTE(minor) "." JAXCOMM_QUOTE(patch)
#define JAXCOMM_QUOTE(number) #number
