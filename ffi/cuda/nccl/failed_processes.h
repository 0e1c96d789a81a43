// The processes of the program that have ended or failed, as far as this one knows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace jaxcomm::cuda {

// `incarnation`: that of the process (first_contact.h). Only the first reason of a process is kept. Whether it is the
// first.
bool SetFailed(uint64_t incarnation, const std::string& why);

// A process has ended as planned. What its peers wait for after `grace_s` will never come.
void SetLeft(uint64_t incarnation, const std::string& why, double grace_s = 1);

// An error if one of `processes` has failed or left; if there are none, an error if any process has failed.
Status FailureOf(const std::vector<uint64_t>& processes);

}  // namespace jaxcomm::cuda
