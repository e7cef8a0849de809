#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/numbers.h"
#include "cli/start.h"
#include "cli/verbs.h"
#include "cli/version.h"
#include "tesserae/comm/agree.h"
#include "tesserae/comm/fabric.h"
#include "tesserae/config/sagemaker.h"
#include "tesserae/doctor/host.h"
#include "tesserae/doctor/links.h"
#include "tesserae/doctor/report.h"
#include "tesserae/doctor/text.h"
#include "tesserae/doctor/torch.h"
#include "tesserae/launch/launcher.h"
#include "tesserae/os/host.h"
#include "tesserae/os/program.h"
#include "tesserae/train/device.h"

namespace tesserae::cli {
namespace {

using doctor::Finding;
using doctor::Findings;
using doctor::Verdict;

struct DoctorArguments {
  int nproc = 0;  // 0: not given
  int mebibytes = 64;
  double deadline = 60;
  bool json = false;
};

void append_findings(Findings& to, Findings more) {
  for (Finding& finding : more) to.push_back(std::move(finding));
}

std::string describe(const mesh::Launch& launch) {
  if (launch.launcher == "single") return "none: one process";
  return cat(launch.launcher, ": ", doctor::counted(launch.size, "rank"), ", ", launch.local_size,
             " on this host, meeting at ", launch.address, ":", launch.port);
}

/// Who starts the ranks; a job of one process where the launcher contradicts itself.
Start examine_start(int nproc, Findings& found) {
  try {
    Start start = find_start(nproc, 1, config::sagemaker_environment());
    const bool alone = start.by == "kubernetes" || start.by == "sagemaker";
    found.push_back({"launcher", Verdict::good, alone ? start.by + ": 1 rank" : describe(start.world.launch()), ""});
    return start;
  } catch (const InvalidArgument& error) {
    found.push_back({"launcher", Verdict::wrong, error.what(), "set these variables as one launcher would"});
    return {};
  }
}

/// Meets the other ranks, measures, and brings all reports to everyone; where ranks cannot meet, this one's alone.
std::vector<doctor::RankReport> meet_ranks(const DoctorArguments& arguments, const mesh::World& world,
                                           doctor::RankReport mine) {
  try {
    comm::FabricOptions options;
    options.connect_deadline = options.deadline =
        std::chrono::milliseconds(static_cast<int64_t>(arguments.deadline * 1e3));
    options.device = train::choose_device("auto", world.launch().local_rank);
    const auto fabric = comm::Fabric::connect(world, options);
    append_findings(mine.findings, examine(doctor::measure_links(*fabric, arguments.mebibytes)));
    std::vector<doctor::RankReport> all;
    for (int rank = 0; rank < fabric->size(); ++rank) {
      all.push_back(doctor::report_from(comm::text_of(*fabric, doctor::to_json(mine).dump(), rank)));
    }
    return all;
  } catch (const Error& error) {
    mine.findings.push_back({"ranks", Verdict::wrong, error.what(),
                             "look whether the ranks that are named run, whether MASTER_ADDR and MASTER_PORT lead to "
                             "rank 0, and at firewalls between the hosts"});
    return {std::move(mine)};
  }
}

void print_reports(const std::vector<doctor::RankReport>& reports, bool json, Verdict worst) {
  if (!json) {
    std::printf("%s\n%s", version_text().c_str(), doctor::in_words(reports).c_str());
    return;
  }
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  for (const doctor::RankReport& report : reports) ranks.push_back(to_json(report));
  const nlohmann::ordered_json all = {{"version", version_text()}, {"verdict", name_of(worst)}, {"ranks", ranks}};
  std::printf("%s\n", all.dump(2).c_str());
}

int run_doctor(const DoctorArguments& arguments) {
  Findings found;
  Start start = examine_start(arguments.nproc, found);
  const mesh::Launch& launch = start.world.launch();
  if (!start.is_rank) {
    start.job.command = {os::program_path(),       "doctor",     "--mib",
                         cat(arguments.mebibytes), "--deadline", cat(arguments.deadline)};
    if (arguments.json) start.job.command.push_back("--json");
    return launch::run_local_job(start.job);
  }
  append_findings(found, examine(doctor::HostFacts::look(launch.local_size)));
  append_findings(found, examine(doctor::TorchFacts::look(launch.local_size)));
  doctor::RankReport mine{.rank = launch.rank, .host = os::host_name(), .findings = std::move(found)};
  std::vector<doctor::RankReport> all;
  if (launch.size > 1) {
    all = meet_ranks(arguments, start.world, std::move(mine));
  } else {
    all.push_back(std::move(mine));
  }
  Verdict worst = Verdict::good;
  for (const doctor::RankReport& report : all) worst = std::max(worst, worst_of(report.findings));
  // Ranks that met say the same, so one speaks; a rank that met nobody speaks for itself.
  if (launch.rank == 0 || static_cast<int>(all.size()) < launch.size) print_reports(all, arguments.json, worst);
  return worst == Verdict::wrong ? exit_failure : 0;
}

}  // namespace

void add_doctor(CLI::App& program, int& status) {
  auto arguments = std::make_shared<DoctorArguments>();
  CLI::App* verb = program.add_subcommand("doctor", "Look whether this machine, and the ranks of a job, can train");
  verb->add_option("--nproc", arguments->nproc, "Start so many ranks on this host, which meet and measure")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  verb->add_flag("--json", arguments->json, "Print JSON");
  verb->add_option("--mib", arguments->mebibytes, "What ranks gather to measure a link, in MiB")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  verb->add_option("--deadline", arguments->deadline, "Seconds to wait for other ranks")
      ->check(from_to(0.1, 86400))
      ->capture_default_str();
  verb->footer(
      "Looks at the system, memory, limits, the clock, torch, accelerators and what the launcher has set. Under "
      "torchrun\n"
      "(--no-python), srun or mpirun, or with --nproc, the ranks meet and measure the links between them; rank 0 "
      "prints\n"
      "what all found.\n"
      "Exit status: 0 all can train (there may be warnings); 1 something is wrong.");
  verb->callback([arguments, &status] { status = run_doctor(*arguments); });
}

}  // namespace tesserae::cli
