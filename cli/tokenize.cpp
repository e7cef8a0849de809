#include "cli/python.h"
#include "cli/verbs.h"

// Tokenizers, JSON and Parquet are the business of Python's libraries: the verb starts `python -m tesserae.tokenize`
// with what it was given, and ends as that does.

namespace tesserae::cli {

void add_tokenize(CLI::App& program, int& status) {
  CLI::App* verb = program.add_subcommand("tokenize", "Turn text, JSON lines and Parquet into tokens to train on");
  verb->prefix_command();
  verb->set_help_flag();  // --help is for Python, which has the options
  verb->callback([verb, &status] { status = run_python("tokenize", "tesserae.tokenize", verb->remaining()); });
}

}  // namespace tesserae::cli
