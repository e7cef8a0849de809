#pragma once

#include <CLI/CLI.hpp>

namespace tesserae::cli {

/// The exit statuses of the program, as its --help says.
inline constexpr int exit_failure = 1;
inline constexpr int exit_configuration = 2;  ///< the command line or the configuration cannot work; nothing was done

/// What main() does: the program with these arguments, of which the first names it. Returns the exit status.
int run_program(int argc, const char* const* argv);

/// Each adds one verb to the program. The chosen verb's callback does the work, stores its exit status in `status` and
/// throws what it cannot handle: run_program() turns errors into one line and a status.
void add_train(CLI::App& program, int& status);
void add_watch(CLI::App& program, int& status);
void add_dial(CLI::App& program, int& status);
void add_run(CLI::App& program, int& status);
void add_scale(CLI::App& program, int& status);
void add_config(CLI::App& program, int& status);
void add_inspect(CLI::App& program, int& status);
void add_verify(CLI::App& program, int& status);
void add_plan(CLI::App& program, int& status);
void add_probe(CLI::App& program, int& status);
void add_doctor(CLI::App& program, int& status);
void add_convert(CLI::App& program, int& status);
void add_stacks(CLI::App& program, int& status);
void add_tokenize(CLI::App& program, int& status);
void add_trace(CLI::App& program, int& status);

}  // namespace tesserae::cli
