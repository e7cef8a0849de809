#include "tesserae/train/trainer.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cli/start.h"
#include "cli/verbs.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/config/sagemaker.h"
#include "tesserae/launch/restarts.h"
#include "tesserae/offload/host_blocks.h"
#include "tesserae/os/files.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/program.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/device.h"
#include "tesserae/train/job_size.h"

namespace tesserae::cli {
namespace {

struct TrainArguments {
  std::string config;
  int nproc = 0;  // 0: not given
  std::vector<std::string> assignments;
  std::string resume = "never";
  bool dry_run = false;
};

/// How long the ranks may take to end: writing a checkpoint can take long, and whoever cannot wait signals again.
std::chrono::milliseconds stop_grace(const config::Config& config) {
  return config.checkpoint.enabled() ? std::chrono::minutes(30) : std::chrono::seconds(20);
}

/// What was given for these options of `verb`, in the order in which it stands on the command line.
std::vector<std::string> in_order(const CLI::App& verb, const std::vector<CLI::Option*>& options) {
  std::map<const CLI::Option*, size_t> next;
  std::vector<std::string> values;
  for (CLI::Option* option : verb.parse_order()) {
    if (std::ranges::find(options, option) != options.end()) values.push_back(option->results().at(next[option]++));
  }
  return values;
}

std::vector<std::string> rank_command(const TrainArguments& arguments, const std::string& resume) {
  std::vector<std::string> command = {os::program_path(), "train", arguments.config, "--resume", resume};
  for (const std::string& assignment : arguments.assignments) {
    command.push_back("--set");
    command.push_back(assignment);
  }
  return command;
}

/// Nothing is overwritten, and who would learn that after the training has lost it.
void require_room_for_weights(const config::Config& config) {
  if (!config.run.weights_folder) return;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (!os::files().exists(os::Path(*config.run.weights_folder) / name)) continue;
    throw config::ConfigError("run.weights_folder", cat(*config.run.weights_folder, " has weights already (", name,
                                                        "): name another folder, or move them away"));
  }
}

/// Where another host may take over.
std::string shared_folder(const config::Config& config) {
  const std::string& folder = config.recovery.shared;
  if (!folder.empty() && os::files().status(folder).kind != os::FileKind::directory)
    throw config::ConfigError("recovery.shared", cat(folder, " is no folder: make it, on storage that all hosts see"));
  return folder;
}

/// Where a job goes on that has saved up to step `saved`; other runs may save to the same folder. Empty: nowhere.
std::string newest_of(const os::Path& checkpoints, const std::string& saved) {
  if (saved.empty()) return "";
  const auto committed = checkpoint::last_of_step(checkpoints, std::stoll(saved));
  return committed ? committed->path.native() : "";
}

/// How a job begins again that wrote to the folder end.run: from what it has kept. Without anything, as at first.
launch::Restarts restarts(const config::Config& config, const TrainArguments& arguments) {
  using Mode = train::Resume::Mode;
  const Mode mode = train::Resume::from_text(arguments.resume).mode;
  const auto prepare = [config, arguments, mode](launch::LocalJob& job, const launch::JobEnd& end) {
    if (end.run.empty() || !config.checkpoint.enabled()) return;
    const bool alone = mode == Mode::never && !config.checkpoint.folder;  // what is there is of this run
    const os::Path checkpoints = config.checkpoint.folder.value_or(end.run + "/checkpoints");
    const std::string resume = mode == Mode::automatic || alone ? "auto" : newest_of(checkpoints, end.saved);
    if (resume.empty()) return;
    job.command = rank_command(arguments, resume);
    // A folder that reads as JSON (20261203) would be no text.
    const std::string folder = config::Json::accept(end.run) ? config::Json(end.run).dump() : end.run;
    job.command.insert(job.command.end(), {"--set", "run.folder=" + folder});
  };
  return {.most = config.recovery.max_restarts, .prepare = prepare};
}

/// Memory that ran out, with what needs less of it.
OutOfMemory out_of_memory(const std::string& what) {
  return {"train",
          cat(what, "; a smaller train.batch_per_rank with more train.accumulate, model.checkpoint_activations, ",
              "a higher hybrid_shard_degree or offload need less: `tesserae plan` says what fits")};
}

int run_rank(const config::Config& config, const train::JobSetup& setup, const mesh::World& world,
             const train::Resume& resume) {
  try {
    return train::train(config, setup, world, resume);
  } catch (const c10::OutOfMemoryError& error) {
    throw out_of_memory(error.what_without_backtrace());
  } catch (const OutOfMemory& error) {
    throw out_of_memory(config::without_function(error));
  } catch (const std::bad_alloc&) {
    throw out_of_memory("the host has no memory left");
  }
}

int run_train(const TrainArguments& arguments) {
  const mesh::Lookup environment = config::sagemaker_environment();
  const config::Config config = config::load_train_config(arguments.config, arguments.assignments, environment);
  const train::Resume resume = train::Resume::from_text(arguments.resume);
  if (resume.mode == train::Resume::Mode::automatic && !config.checkpoint.enabled()) {
    throw config::ConfigError("checkpoint",
                              "--resume auto continues what this run has saved, but nothing says when to "
                              "save: give checkpoint.every_steps or another key of that section");
  }
  require_room_for_weights(config);
  offload::use_reusable_host_blocks();
  if (!config.offload.memory_limit) os::keep_freed_memory();  // what one phase needed would stay in the next
  Start start = find_start(arguments.nproc, config.run.nproc, environment);
  if (start.alone && config.recovery.max_restarts > 0) start.is_rank = false;  // somebody must begin it again
  // Everything that can be known to fail fails here, before any rank starts.
  const mesh::Launch& launch = start.world.launch();
  train::choose_device(config.run.device, (start.is_rank ? launch.local_size : start.job.ranks) - 1);  // of the last
  const train::JobSetup setup =
      train::set_up_job(train::for_ranks(config, train::configured_ranks(start.ranks), start.ranks), start.ranks,
                        train::choose_device(config.run.device, launch.local_rank));
  if (arguments.dry_run) {
    std::printf("%s\n%s\n", config.resolved.dump(2).c_str(), train::describe(setup, config).c_str());
    return 0;
  }
  if (!start.is_rank) {
    run_in_ranks(start.job, rank_command(arguments, arguments.resume));
    start.job.stop_grace = stop_grace(config);
    start.job.early_exit_code = config.preemption.exit_code;
    start.job.replacements = config.recovery.replacements;
    start.job.min_ranks = config.recovery.min_ranks;
    start.job.succession = shared_folder(config);
    start.job.host_patience = os::milliseconds(config.run.deadline_seconds);
    return launch::run_with_restarts(start.job, restarts(config, arguments));
  }
  return run_rank(config, setup, start.world, resume);
}

}  // namespace

void add_train(CLI::App& program, int& status) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* verb = program.add_subcommand("train", "Train a transformer as a configuration says");
  verb->add_option("CONFIG", arguments->config, "The configuration, a JSON file")->required();
  verb->add_option("--nproc", arguments->nproc, "Start so many ranks on this host (default: run.nproc)")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  CLI::Option* const set =
      verb->add_option("--set", "Change one key of the configuration; may be repeated, and the last one counts")
          ->type_name("KEY=VALUE")
          ->expected(1, -1)
          ->allow_extra_args(false);
  CLI::Option* const more =
      verb->add_option("MORE")->expected(0, -1)->allow_extra_args()->group("");  // `--set a=1 b=2`
  verb->add_option("--resume", arguments->resume,
                   "Continue: auto (the newest checkpoint of this run that can be loaded, in its own run folder), "
                   "never, or a checkpoint, a folder of them or a run folder")
      ->type_name("auto|never|PATH")
      ->capture_default_str();
  verb->add_flag("--dry-run", arguments->dry_run, "Check everything, print the resolved configuration and end");
  verb->footer(
      "Under torchrun (--no-python), srun or mpirun it joins the job that they started; where srun or mpirun started "
      "one\n"
      "process a host, --nproc starts so many ranks on each. In a job of SageMaker or a PyTorchJob of Kubernetes it "
      "starts\n"
      "the ranks of its host: --nproc, else what the job says, else one for each GPU.\n"
      "`tesserae config` explains the keys of a configuration.\n"
      "Ctrl-C, SIGTERM or SIGUSR1 ends a run after the current step, saves that step if the section `checkpoint` of "
      "the\n"
      "configuration asks for checkpoints, and writes the summary; once more ends it at once. The section "
      "`preemption`\n"
      "adds a file and a command that ask for the same, and the exit status then. Then, or after a crash,\n"
      "--resume auto goes on.");
  verb->callback([=, &status] {
    arguments->assignments = in_order(*verb, {set, more});
    status = run_train(*arguments);
  });
}

}  // namespace tesserae::cli
