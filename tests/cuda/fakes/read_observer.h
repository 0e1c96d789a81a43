// Plain reads of a program that is compiled with -fsanitize=thread and linked with memory_model_explore.cc.
#pragma once

#include <cstddef>

namespace fake {

// Called before each read, unless it is null or runs already.
using ReadObserver = void (*)(const void* address, size_t bytes);
extern ReadObserver read_observer;

}  // namespace fake
