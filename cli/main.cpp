#include <c10/util/env.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "cli/verbs.h"
#include "cli/version.h"
#include "tesserae/comm/error.h"
#include "tesserae/config/json.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/os/signals.h"

using namespace tesserae;

namespace {

constexpr const char* exit_statuses =
    "Exit status: 0 done; 1 failed; 2 the command line or the configuration cannot work, and nothing was done;\n"
    "3 other ranks were lost; 128 + signal: ended by that signal.";

int report(const std::exception& error, int status) {
  std::fflush(stdout);
  const bool frames = c10::utils::check_env("TORCH_SHOW_CPP_STACKTRACES") == true;  // as errors of torch in Python
  std::fprintf(stderr, "tesserae: %s\n", frames ? error.what() : comm::reason_of(error).c_str());
  return status;
}

/// What a command prints is what it was asked for: where that is lost, on a disk that is full, it has failed. Training
/// has not.
int printed(const CLI::App& program, int status) {
  const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (!lost || status != 0 || program.got_subcommand("train") || program.got_subcommand("run")) return status;
  std::fprintf(stderr, "tesserae: what it printed could not be written\n");
  return cli::exit_failure;
}

}  // namespace

int tesserae::cli::run_program(int argc, const char* const* argv) {
  os::keep_ended_children();
  CLI::App program("Trains PyTorch models that are too big for one device, by sharding their training state.",
                   "tesserae");
  int status = 0;
  program.set_version_flag("--version", cli::version_text(), "Print the version and end");
  program.require_subcommand(1);
  program.footer(exit_statuses);
  cli::add_train(program, status);
  cli::add_run(program, status);
  cli::add_watch(program, status);
  cli::add_dial(program, status);
  cli::add_scale(program, status);
  cli::add_stacks(program, status);
  cli::add_trace(program, status);
  cli::add_config(program, status);
  cli::add_inspect(program, status);
  cli::add_verify(program, status);
  cli::add_plan(program, status);
  cli::add_probe(program, status);
  cli::add_convert(program, status);
  cli::add_tokenize(program, status);
  cli::add_doctor(program, status);
  try {
    program.parse(argc, argv);
    return printed(program, status);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? printed(program, 0) : cli::exit_configuration;
  } catch (const config::ConfigError& error) {
    return report(error, cli::exit_configuration);
  } catch (const comm::CommError& error) {
    return report(error, launch::exit_peer_lost);
  } catch (const std::exception& error) {
    return report(error, cli::exit_failure);
  }
}

int main(int argc, char** argv) {
  return tesserae::cli::run_program(argc, argv);
}
