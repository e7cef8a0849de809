#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/numbers.h"
#include "cli/python.h"
#include "cli/start.h"
#include "cli/verbs.h"
#include "tesserae/config/json.h"
#include "tesserae/config/sagemaker.h"
#include "tesserae/launch/restarts.h"
#include "tesserae/os/files.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/device.h"

namespace tesserae::cli {

namespace {

struct RunArguments {
  int nproc = 0, hosts = 0, host = 0;  // 0 ranks or hosts: not given
  int port = 29500;
  std::string address, shared;
  bool cold = false;
  int replacements = 0, spares = 0, min_ranks = 0, max_restarts = 0, early_exit = 0;
  double grace_seconds = 20, host_deadline_seconds = 300;
};

/// The ranks and hosts that the options name, else what the platform says of this process.
launch::LocalJob find_job(const RunArguments& arguments) {
  const int ranks = arguments.nproc > 0 ? arguments.nproc : std::max(train::accelerators(), 1);
  launch::LocalJob job;
  job.ranks = ranks;
  if (arguments.hosts > 0) {
    if (arguments.hosts > 1 && arguments.address.empty()) {
      throw config::ConfigError("", "--hosts needs --address, by which all of them reach the first one");
    }
    job.hosts = arguments.hosts;
    job.host = arguments.host;
    job.address = arguments.address;
    job.port = static_cast<uint16_t>(arguments.port);
    return job;
  }
  const Start start = find_start(arguments.nproc, ranks, config::sagemaker_environment());
  if (!start.is_rank) return start.job;
  const mesh::Launch& launch = start.world.launch();
  if (start.ranks == 1) return launch.launcher == "single" ? start.job : job;  // or it is the only task of all
  if (launch.local_size != 1 || launch.launcher == "torchrun") {
    throw config::ConfigError("",
                              cat(start.by, " has started ", start.ranks, " ranks, and `tesserae run` starts its own: ",
                                  "run the script itself there, or one `tesserae run` on each host"));
  }
  job.hosts = launch.size;
  job.host = launch.rank;
  job.address = launch.address;
  job.port = launch.port;
  return job;
}

/// Ranks of several hosts have no memory in common.
void share_memory(launch::LocalJob& job, const std::string& shared) {
  const bool survives = job.replacements > 0 || job.min_ranks > 0;
  if (!shared.empty()) {
    if (os::files().status(shared).kind != os::FileKind::directory)
      throw config::ConfigError("", cat("--shared ", shared, ": there is no such folder"));
    // As it was named: links may lead elsewhere on another host.
    job.memory = (std::filesystem::absolute(shared) / ".").lexically_normal().parent_path();
    job.environment["TESSERAE_SHARED"] = job.memory;
    job.succession = job.memory;
  } else if (job.hosts > 1 && survives) {
    throw config::ConfigError("",
                              "on several hosts, ranks that go on after a loss need a folder that all hosts see, for "
                              "the state that those that are left hold: --shared FOLDER");
  }
}

}  // namespace

void add_run(CLI::App& program, int& status) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* verb =
      program.add_subcommand("run", "Start the ranks of a Python script on this host, and keep them going");
  verb->prefix_command();
  verb->add_option("--nproc", arguments->nproc,
                   "So many ranks on this host (default: as many as the platform says, one for each accelerator, or 1)")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  verb->add_option("--replacements", arguments->replacements,
                   "So often a new process takes the place of a rank that was lost")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option("--spares", arguments->spares,
                   "Processes on each host that wait to do so, with the script's imports done")
      ->check(CLI::Range(0, 64))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option(
          "--min-ranks", arguments->min_ranks,
          "Where no lost rank is replaced (any more), go on if at least so many are left; 0: the loss ends the "
          "job")
      ->check(CLI::Range(0, 4096))
      ->type_name("N")
      ->capture_default_str();
  verb->add_option(
          "--max-restarts", arguments->max_restarts,
          "Where ranks cannot go on: start all of them again so often, on one host. It waits before that, for 1 "
          "s and then twice as long each time; what the same error has ended twice in a row is left")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N")
      ->capture_default_str();
  CLI::Option* hosts =
      verb->add_option(
              "--hosts", arguments->hosts,
              "Number of hosts of the job, each of which runs this same command (default: as the platform says)")
          ->check(CLI::Range(1, 1 << 16))
          ->type_name("N");
  verb->add_option("--host", arguments->host, "Which of them this one is")
      ->needs(hosts)
      ->check(CLI::Range(0, 1 << 16))
      ->type_name("I")
      ->capture_default_str();
  verb->add_option("--address", arguments->address, "By which all of them reach the first one")->needs(hosts);
  verb->add_option("--port", arguments->port, "Of the first one, where launchers and ranks meet")
      ->needs(hosts)
      ->check(CLI::Range(1, 65535))
      ->type_name("P")
      ->capture_default_str();
  verb->add_option("--shared", arguments->shared,
                   "A folder that all hosts see, for the state from which ranks go on after a loss, and (with "
                   "--min-ranks) by which "
                   "another host takes over when the first one is lost (default: /dev/shm, on one host)")
      ->type_name("FOLDER");
  verb->add_option("--host-deadline", arguments->host_deadline_seconds,
                   "A host of which nothing is heard for so long is lost, with its ranks")
      ->check(positive())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->add_flag("--cold", arguments->cold,
                 "Every rank starts a Python of its own, instead of being a copy of one that has done the imports of "
                 "torch, tesserae and numpy with which the script begins");
  verb->add_option("--grace", arguments->grace_seconds, "How long ranks may take to end when this process is asked to")
      ->check(not_negative())
      ->type_name("SECONDS")
      ->capture_default_str();
  verb->add_option(
          "--early-exit", arguments->early_exit,
          "The status of a script that was asked to end and has saved (exit_code of tsm.preemption): that of the job "
          "then, and no failure")
      ->check(CLI::Range(1, 255))
      ->type_name("STATUS");
  verb->footer(
      "tesserae run [OPTIONS] SCRIPT [ITS ARGUMENTS...]: every rank runs SCRIPT with torchrun's variables\n"
      "(or -m MODULE, as Python does).\n"
      "A script that trains inside tsm.elastic (docs/python.md) goes on in the same processes when a rank is lost, "
      "and\n"
      "`tesserae scale` changes the number of its ranks.\n"
      "On several hosts, start `tesserae run` on each, with the same options but --host. In a job of SageMaker, a "
      "PyTorchJob,\n"
      "or as the only task of a node of Slurm or mpirun it finds the others; elsewhere give --hosts, --host and "
      "--address.\n"
      "Ctrl-C, SIGTERM and SIGUSR1 are handed on to the ranks; once more ends them at once.");
  verb->callback([arguments, verb, &status] {
    const std::vector<std::string> words = verb->remaining();
    if (words.empty()) throw config::ConfigError("", "tesserae run needs the script that its ranks run");
    // CLI11 takes an option that it does not know for the script.
    const bool is_module = words.front() == "-m" && words.size() > 1;
    if (words.front().starts_with("-") && !is_module) throw CLI::ExtrasError({words.front()});
    Script script = python_script("run", words);
    launch::LocalJob job = find_job(*arguments);
    job.command = script.command;
    job.environment = script.environment;
    if (job.hosts > 1) job.environment["TESSERAE_HOST_DEADLINE"] = cat(arguments->host_deadline_seconds);
    job.environment["TESSERAE_MIN_RANKS"] = std::to_string(arguments->min_ranks);
    job.early_exit_code = arguments->early_exit;
    job.stop_grace = os::milliseconds(arguments->grace_seconds);
    job.replacements = arguments->replacements;
    job.spares = arguments->spares;
    job.min_ranks = arguments->min_ranks;
    job.host_patience = os::milliseconds(arguments->host_deadline_seconds);
    // One rank that nobody replaces is not worth a process beside it.
    const bool makes_several = job.ranks > 1 || job.replacements > 0 || arguments->max_restarts > 0;
    if (makes_several && !arguments->cold) job.fork_server = script.fork_server;
    share_memory(job, arguments->shared);
    status = launch::run_with_restarts(job, {.most = arguments->max_restarts});
  });
}

}  // namespace tesserae::cli
