// launch_ranks N COMMAND...: run_local_job as a program, so that a test can interrupt and kill it. REPLACEMENTS: how
// often it replaces lost ranks.
#include <cstdlib>

#include "tesserae/train/launcher.h"

int main(int argc, char** argv) {
  const char* const replacements = std::getenv("REPLACEMENTS");
  return tesserae::train::run_local_job({.ranks = std::atoi(argv[1]),
                                         .command = {argv + 2, argv + argc},
                                         .environment = {{"FROM_JOB", "yes"}},
                                         .replacements = replacements != nullptr ? std::atoi(replacements) : 0});
}
