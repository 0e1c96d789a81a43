// Tests of state that lasts as long as the process, such as the failure of a call.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <string>

#include "../../check.h"

namespace jaxcomm {

// Runs `test` in a process of its own and returns its output on standard error. No other thread may be running.
template <typename Test>
std::string Alone(Test test) {
  std::fflush(stdout);
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    test();
    std::fflush(stdout);
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char part[4096];
  for (ssize_t bytes; (bytes = read(ends[0], part, sizeof part)) > 0;) said.append(part, static_cast<size_t>(bytes));
  close(ends[0]);
  std::fwrite(said.data(), 1, said.size(), stderr);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) std::fprintf(stderr, "ended by signal %d\n", WTERMSIG(status));
  CHECK(status == 0);
  return said;
}

inline int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace jaxcomm

// A TEST_CASE that runs in a process of its own.
#define ALONE_TEST_CASE(name) JAXCOMM_ALONE_TEST_CASE(name, JAXCOMM_CONCAT(AloneCase, __LINE__))
#define JAXCOMM_ALONE_TEST_CASE(name, function)                                                           \
  static void function();                                                                                 \
  static ::jaxcomm::test::Case JAXCOMM_CONCAT(function, _case)(name, [] { ::jaxcomm::Alone(function); }); \
  static void function()
