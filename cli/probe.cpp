#include "tesserae/probe/probe.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/numbers.h"
#include "cli/start.h"
#include "cli/verbs.h"
#include "tesserae/base/error.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/config/config.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/offload/host_blocks.h"
#include "tesserae/os/files.h"
#include "tesserae/os/memory.h"
#include "tesserae/os/program.h"
#include "tesserae/os/seconds.h"
#include "tesserae/train/device.h"

namespace tesserae::cli {
namespace {

struct ProbeArguments {
  int nproc = 0;  // 0: not given
  std::string out, name, backend = "auto";
  std::vector<std::string> dtypes;
  double window = 0.05, deadline = 60;
};

std::vector<std::string> command_of(const ProbeArguments& arguments) {
  std::vector<std::string> command = {os::program_path(),    "probe",          "--window",
                                      cat(arguments.window), "--deadline",     cat(arguments.deadline),
                                      "--backend",           arguments.backend};
  if (!arguments.out.empty()) command.insert(command.end(), {"--out", arguments.out});
  if (!arguments.name.empty()) command.insert(command.end(), {"--name", arguments.name});
  for (const std::string& dtype : arguments.dtypes) command.insert(command.end(), {"--dtype", dtype});
  return command;
}

int run_probe(const ProbeArguments& arguments) {
  const mesh::World world = mesh::World::from_environment();
  const mesh::Launch& launch = world.launch();
  offload::use_reusable_host_blocks();  // as `tesserae train` does
  os::keep_freed_memory();
  if (launch.launcher == "single" && arguments.nproc > 1) {
    launch::LocalJob job;
    job.ranks = arguments.nproc;
    run_in_ranks(job, command_of(arguments));
    return launch::run_local_job(job);
  }
  if (arguments.nproc > 0 && launch.launcher != "single" && arguments.nproc != launch.size) {
    throw config::ConfigError("", cat("--nproc ", arguments.nproc, ", but ", launch.launcher, " has started ",
                                      launch.size, " ranks: leave it out"));
  }
  comm::FabricOptions options;
  options.backend = arguments.backend;
  options.connect_deadline = os::milliseconds(arguments.deadline);
  options.device = train::choose_device("auto", launch.local_rank);
  const auto fabric = comm::Fabric::connect(world, options);
  probe::ProbeOptions probing{.name = arguments.name, .window = arguments.window};
  probing.dtypes = !arguments.dtypes.empty()   ? arguments.dtypes
                   : fabric->device().is_cpu() ? std::vector<std::string>{"fp32"}
                                               : std::vector<std::string>{"bf16", "fp32"};
  if (fabric->rank() == 0) {
    probing.say = [](const std::string& what) { std::fprintf(stderr, "measuring %s\n", what.c_str()); };
  }
  const cost::Machine machine = probe::probe(fabric, probing);
  if (fabric->rank() != 0) return 0;
  const std::string text = cost::to_json(machine).dump(2) + "\n";
  if (arguments.out.empty()) {
    std::printf("%s", text.c_str());
  } else {
    try {
      os::files().write(arguments.out, text);
    } catch (const IoError&) {
      std::printf("%s", text.c_str());  // it took a minute of all ranks
      throw;
    }
    std::fprintf(stderr, "wrote %s: give it to `tesserae plan --machine`\n", arguments.out.c_str());
  }
  return 0;
}

}  // namespace

void add_probe(CLI::App& program, int& status) {
  auto arguments = std::make_shared<ProbeArguments>();
  CLI::App* verb =
      program.add_subcommand("probe", "Measure how fast this machine does what training consists of, for the plan");
  verb->add_option("--nproc", arguments->nproc, "Start so many ranks on this host, as a job would have")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  verb->add_option("--out", arguments->out, "Where the numbers go (JSON); by default to standard output");
  verb->add_option("--name", arguments->name, "What the machine is called in plans; by default the host's name");
  verb->add_option("--dtype", arguments->dtypes,
                   "Measure computing in it; may be given again (by default fp32, and bf16 on GPUs)")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->take_all();
  verb->add_option("--backend", arguments->backend, "What carries bytes, as in run.backend")
      ->check(CLI::IsMember({"auto", "gloo", "shm", "nccl"}))
      ->capture_default_str();
  verb->add_option("--window", arguments->window, "Seconds of each measurement; longer ones are less noisy")
      ->check(from_to(0.001, 60))
      ->capture_default_str();
  verb->add_option("--deadline", arguments->deadline, "Seconds to wait for other ranks")
      ->check(from_to(0.1, 86400))
      ->capture_default_str();
  verb->footer(
      "All ranks do the same at once: products, attention, whole blocks and the loss by size, the optimizer, and the\n"
      "collectives, alone and beside a product. Under torchrun (--no-python), srun or mpirun the job's ranks meet;\n"
      "with --nproc they are started here. Use as many ranks a host as jobs will have.\n"
      "Exit status: 0 the numbers are written.");
  verb->callback([arguments, &status] { status = run_probe(*arguments); });
}

}  // namespace tesserae::cli
