// main() of native tests that need none of their own.
#include "check.h"

int main(int argc, char** argv) { return jaxcomm::test::RunCases(argc, argv); }
