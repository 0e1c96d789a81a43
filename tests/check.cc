// Runs the cases of a native test: test_x [--list] [--full] [part of a name ...].
#include "check.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

namespace jaxcomm {
namespace test {
namespace {

Case* first = nullptr;
Case** end = &first;

bool Selected(const char* name, bool full, char** parts, int num_parts) {
  if ((std::strstr(name, "[full]") != nullptr) != full) return false;
  for (int i = 0; i < num_parts; ++i) {
    if (std::strstr(name, parts[i]) != nullptr) return true;
  }
  return num_parts == 0;
}

}  // namespace

Case::Case(const char* name, void (*run)()) : name(name), run(run) {
  *end = this;
  end = &next;
}

int RunCases(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  bool list = false, full = false;
  int begin = 1;
  for (; begin < argc && argv[begin][0] == '-'; ++begin) {
    const std::string option = argv[begin];
    list |= option == "--list";
    full |= option == "--full";
    if (option != "--list" && option != "--full") {
      std::fprintf(stderr, "%s: unknown option %s\n", argv[0], argv[begin]);
      return 2;
    }
  }
  int passed = 0;
  for (auto* test = first; test != nullptr; test = test->next) {
    if (!Selected(test->name, full, argv + begin, argc - begin)) continue;
    if (list) {
      std::printf("%s\n", test->name);
      ++passed;
      continue;
    }
    const auto began = Clock::now();
    std::fprintf(stderr, "%s ...\n", test->name);
    test->run();
    std::printf("ok %s (%.2f s)\n", test->name, std::chrono::duration<double>(Clock::now() - began).count());
    std::fflush(stdout);
    ++passed;
  }
  if (passed == 0) std::fprintf(stderr, "%s: no case is named so\n", argv[0]);
  return passed == 0 ? 1 : 0;
}

}  // namespace test
}  // namespace jaxcomm
