// launch_ranks N COMMAND...: run_local_job as a program, so that a test can interrupt and kill it. REPLACEMENTS: how
// often it replaces lost ranks. HOSTS, HOST, PORT: it is one of several hosts.
#include <cstdlib>

#include "tesserae/train/launcher.h"

namespace {

int number(const char* variable, int otherwise) {
  const char* const value = std::getenv(variable);
  return value != nullptr ? std::atoi(value) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  return tesserae::train::run_local_job({.ranks = std::atoi(argv[1]),
                                         .hosts = number("HOSTS", 1),
                                         .host = number("HOST", 0),
                                         .address = "first-host",
                                         .port = static_cast<uint16_t>(number("PORT", 0)),
                                         .command = {argv + 2, argv + argc},
                                         .environment = {{"FROM_JOB", "yes"}},
                                         .replacements = number("REPLACEMENTS", 0)});
}
