// Tests of what lasts as long as a process, such as the failure of a call.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "../../check.h"

namespace jaxcomm {

// Runs `test` in a process of its own. No other thread may be running.
template <typename Test>
void Alone(Test test) {
  std::fflush(stdout);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    test();
    std::fflush(stdout);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

}  // namespace jaxcomm

// A TEST_CASE in a process of its own.
#define ALONE_TEST_CASE(name) JAXCOMM_ALONE_TEST_CASE(name, JAXCOMM_CONCAT(AloneCase, __LINE__))
#define JAXCOMM_ALONE_TEST_CASE(name, function)                                                                \
  static void function();                                                                                      \
  static ::jaxcomm::test::Case JAXCOMM_CONCAT(function, _case)(name, [] { ::jaxcomm::Alone(function); });      \
  static void function()
