#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/python.h"
#include "cli/verbs.h"
#include "tesserae/config/json.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/launcher.h"

namespace tesserae::cli {

void add_run(CLI::App& program, int& status) {
  struct Arguments {
    int nproc = 1, replacements = 0, spares = 0, min_ranks = 0;
    double grace_seconds = 20;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* verb =
      program.add_subcommand("run", "Start the ranks of a Python script on this host, and keep them going");
  verb->prefix_command();
  verb->add_option("--nproc", arguments->nproc, "So many ranks")
      ->check(CLI::Range(1, 4096))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--replacements", arguments->replacements,
                   "So often a new process takes the place of a rank that was lost")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--spares", arguments->spares,
                   "So many processes wait for that, with all imported that the script imports")
      ->check(CLI::Range(0, 64))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--min-ranks", arguments->min_ranks,
                   "Where none does (any more), the others go on if they are so many; 0: a loss ends the job")
      ->check(CLI::Range(0, 4096))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--grace", arguments->grace_seconds, "How long ranks may take to end when this process is asked to")
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->footer(
      "tesserae run [OPTIONS] SCRIPT [ITS ARGUMENTS...]: every rank runs SCRIPT with torchrun's variables.\n"
      "A script that trains inside tsm.elastic (docs/python.md) goes on in the same processes when a rank is lost, "
      "and\n"
      "`tesserae scale` changes the number of its ranks.\n"
      "Ctrl-C, SIGTERM and SIGUSR1 are handed on to the ranks; once more ends them at once.");
  verb->callback([arguments, verb, &status] {
    const std::vector<std::string> words = verb->remaining();
    if (words.empty()) throw config::ConfigError("", "tesserae run needs the script that its ranks run");
    // CLI11 takes an option that it does not know for the script.
    if (words.front().starts_with("-")) throw CLI::ExtrasError({words.front()});
    Script script = python_script("run", words);
    train::LocalJob job;
    job.ranks = arguments->nproc;
    job.command = script.command;
    job.environment = script.environment;
    job.environment["TESSERAE_MIN_RANKS"] = std::to_string(arguments->min_ranks);
    job.stop_grace = os::milliseconds(arguments->grace_seconds);
    job.replacements = arguments->replacements;
    job.spares = arguments->spares;
    job.min_ranks = arguments->min_ranks;
    status = train::run_local_job(job);
  });
}

}  // namespace tesserae::cli
