// TEST_CASE and CHECK for native tests, with the meaning that doctest gives them. doctest and GoogleTest are not on
// PyPI, from which a fresh clone gets all it needs, nor on machines with GPUs that download nothing.
//
//   TEST_CASE("what holds") { CHECK(1 + 1 == 2); }
//   TEST_CASE("what takes minutes [full]") { ... }  // left out unless --full is given
#pragma once

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "../ffi/common/status.h"

// Ends the test program with the condition's text and place if it does not hold. For any thread.
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

namespace jaxcomm {

// The value; ends the test program with the reason if there is none.
template <typename T>
T ValueOf(StatusOr<T> made) {
  if (!made.ok()) std::fprintf(stderr, "%s\n", made.status().message().c_str());
  CHECK(made.ok());
  return *std::move(made);
}

namespace test {

// Adds itself to the list of cases, in the order of the file. Lives as long as the program.
struct Case {
  Case(const char* name, void (*run)());
  const char* name;
  void (*run)();
  Case* next = nullptr;
};

// test_x [--list] [--full] [part of a name ...]: runs the cases, or lists them. Returns the exit status.
int RunCases(int argc, char** argv);

}  // namespace test
}  // namespace jaxcomm

#define JAXCOMM_CONCAT2(a, b) a##b
#define JAXCOMM_CONCAT(a, b) JAXCOMM_CONCAT2(a, b)
#define TEST_CASE(name) JAXCOMM_TEST_CASE(name, JAXCOMM_CONCAT(TestCase, __LINE__))
#define JAXCOMM_TEST_CASE(name, function)                                       \
  static void function();                                                       \
  static ::jaxcomm::test::Case JAXCOMM_CONCAT(function, _case)(name, function); \
  static void function()
