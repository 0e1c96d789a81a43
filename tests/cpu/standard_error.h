// Captures standard error during the lifetime of an object.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

#include "../check.h"

namespace jaxcomm {

class StandardError {
 public:
  StandardError() : file_(std::tmpfile()), before_(dup(STDERR_FILENO)) {
    CHECK(file_ != nullptr && before_ >= 0);
    std::fflush(stderr);
    CHECK(dup2(fileno(file_), STDERR_FILENO) >= 0);
  }
  ~StandardError() {
    std::fflush(stderr);
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  // All text so far.
  std::string text() const {
    char buffer[4096];
    const ssize_t size = pread(fileno(file_), buffer, sizeof(buffer), 0);
    return std::string(buffer, size > 0 ? static_cast<size_t>(size) : 0);
  }

 private:
  std::FILE* const file_;
  const int before_;
};

}  // namespace jaxcomm
