#include "tesserae/mesh/launch.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/mesh/host_list.h"
#include "tesserae/mesh/variables.h"

namespace tesserae::mesh {
namespace {

/// The names under which a launcher publishes the four numbers.
struct Names {
  std::string launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

void check_within(const char* index, int i, const char* count, int n) {
  if (n < 1) fail_launch(cat(count, "=", n, " is not positive"));
  if (i < 0 || i >= n) fail_launch(cat(index, "=", i, " contradicts ", count, "=", n, ": it must be in [0, ", n, ")"));
}

void check(const Launch& launch, const Names& names) {
  check_within(names.rank, launch.rank, names.size, launch.size);
  check_within(names.local_rank, launch.local_rank, names.local_size, launch.local_size);
  if (launch.local_size > launch.size) {
    fail_launch(cat(names.local_size, "=", launch.local_size, " contradicts ", names.size, "=", launch.size,
                    ": a host cannot have more ranks than the job"));
  }
}

Launch read_numbers(const Variables& variables, const Names& names) {
  Launch launch;
  launch.launcher = names.launcher;
  launch.rank = variables.number(names.rank, names.launcher);
  launch.size = variables.number(names.size, names.launcher);
  launch.local_rank = variables.number(names.local_rank, names.launcher);
  launch.local_size = variables.number(names.local_size, names.launcher);
  check(launch, names);
  return launch;
}

/// A port below the range that Linux hands out by itself (32768 and up), the same on every rank of the job.
uint16_t port_for(std::string_view job) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a: std::hash may differ between builds, and ranks must agree
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<uint16_t>(15000 + hash % 15000);
}

/// MPI launchers publish no address. On one host there is only one it can be; the port comes from what names the job.
void read_mpi_rendezvous(const Variables& variables, Launch& launch, std::vector<const char*> job_names) {
  if (variables.has("MASTER_ADDR")) {
    launch.address = variables.text("MASTER_ADDR");
  } else if (launch.local_size < launch.size) {
    fail_launch(cat(launch.launcher, " runs ", launch.size,
                    " ranks on several hosts and says nothing of where they meet: set "
                    "MASTER_ADDR to the host of rank 0 (and MASTER_PORT to a free port there)"));
  }
  if (variables.has("MASTER_PORT")) {
    launch.port = variables.port("MASTER_PORT");
    return;
  }
  for (const char* name : job_names) {
    if (!variables.has(name)) continue;
    launch.port = port_for(variables.text(name));
    return;
  }
  if (launch.size > 1)
    fail_launch(cat("no variable of ", launch.launcher, " names the job: set MASTER_PORT to a free port"));
}

Launch read_torchrun(const Variables& variables) {
  if (!variables.has("LOCAL_RANK") && variables.has("PET_NNODES")) {
    fail_launch(cat("RANK=", variables.text("RANK"), " counts pods here (PET_NNODES=", variables.text("PET_NNODES"),
                    "), not ranks: start the ranks by torchrun, which reads PET_*, or by `tesserae train`"));
  }
  Launch launch = read_numbers(variables, {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  launch.store_is_served = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (variables.has("MASTER_ADDR")) launch.address = variables.text("MASTER_ADDR");
  if (variables.has("MASTER_PORT")) launch.port = variables.port("MASTER_PORT");
  if (launch.size > 1 && !variables.has("MASTER_ADDR"))
    fail_launch("torchrun started this process, but MASTER_ADDR is not set");
  if (launch.size > 1 && !variables.has("MASTER_PORT"))
    fail_launch("torchrun started this process, but MASTER_PORT is not set");
  return launch;
}

Launch read_openmpi(const Variables& variables) {
  Launch launch = read_numbers(variables, {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  read_mpi_rendezvous(variables, launch, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
  return launch;
}

Launch read_mpich(const Variables& variables) {
  Launch launch = read_numbers(variables, {"mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  read_mpi_rendezvous(variables, launch, {"PMI_JOBID", "PMI_KVSNAME"});
  return launch;
}

/// How many tasks of the step run on this host. Slurm says so in one of three ways, none of which is always there.
int slurm_local_size(const Variables& variables, const Launch& launch, const char*& name) {
  for (const char* counts : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (!variables.has(counts)) continue;
    name = counts;
    const std::vector<int> tasks = expand_task_counts(variables.text(counts));
    const int node = variables.has("SLURM_NODEID") ? variables.number("SLURM_NODEID", "slurm") : 0;
    check_within("SLURM_NODEID", node, counts, static_cast<int>(tasks.size()));
    // Without a node id the count is only known if it is the same everywhere.
    if (variables.has("SLURM_NODEID") || std::ranges::count(tasks, tasks[0]) == std::ssize(tasks)) return tasks[node];
  }
  if (variables.has("SLURM_NTASKS_PER_NODE")) {
    name = "SLURM_NTASKS_PER_NODE";
    // What was asked for, not what was given: a job smaller than one full host has fewer.
    return std::min(variables.number(name, "slurm"), launch.size);
  }
  if (launch.size == 1) return 1;
  fail_launch(
      "slurm started this process, but neither SLURM_STEP_TASKS_PER_NODE nor SLURM_NTASKS_PER_NODE is set: start with "
      "srun --ntasks-per-node");
}

void read_slurm_rendezvous(const Variables& variables, Launch& launch) {
  if (variables.has("MASTER_ADDR")) {
    launch.address = variables.text("MASTER_ADDR");
  } else if (launch.local_size < launch.size) {
    const char* found = nullptr;
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (found == nullptr && variables.has(name)) found = name;
    }
    if (found == nullptr)
      fail_launch(
          "slurm started this process on several hosts, but SLURM_STEP_NODELIST is not set; set it or MASTER_ADDR");
    launch.address = expand_host_list(variables.text(found)).front();
  }
  if (variables.has("MASTER_PORT")) {
    launch.port = variables.port("MASTER_PORT");
  } else if (variables.has("SLURM_JOB_ID")) {
    launch.port = port_for(cat(variables.text("SLURM_JOB_ID"), ".", variables.text("SLURM_STEP_ID")));
  } else if (launch.size > 1) {
    fail_launch("slurm started this process, but SLURM_JOB_ID is not set; set it or MASTER_PORT");
  }
}

/// The shells of a job script (no step) and of salloc (step 0xfffffffa) are told, too, that they are task 0 of all that
/// srun would start. Users' steps count from 0, Slurm's own begin at 0xfffffff0.
bool in_slurm_step(const Variables& variables) {
  const std::string step =
      variables.has("SLURM_STEP_ID") ? variables.text("SLURM_STEP_ID") : variables.text("SLURM_STEPID");
  return variables.has("SLURM_PROCID") && !step.empty() && step.size() < std::string_view("4294967280").size();
}

Launch read_slurm(const Variables& variables) {
  Launch launch;
  launch.launcher = "slurm";
  launch.rank = variables.number("SLURM_PROCID", "slurm");
  launch.size = variables.number("SLURM_NTASKS", "slurm");
  launch.local_rank = variables.number("SLURM_LOCALID", "slurm");
  check_within("SLURM_PROCID", launch.rank, "SLURM_NTASKS", launch.size);
  if (variables.has("WORLD_SIZE") && variables.number("WORLD_SIZE", "slurm") != launch.size) {
    fail_launch(cat("WORLD_SIZE=", variables.text("WORLD_SIZE"), " contradicts SLURM_NTASKS=", launch.size,
                    ", and RANK, which would decide, is not set"));
  }
  const char* local_size = "the tasks per node";
  launch.local_size = slurm_local_size(variables, launch, local_size);
  check(launch, {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", local_size});
  read_slurm_rendezvous(variables, launch);
  return launch;
}

}  // namespace

Launch read_launch(const Lookup& lookup) {
  const Variables variables(lookup);
  if (variables.has("RANK")) return read_torchrun(variables);
  if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) return read_openmpi(variables);
  // srun --mpi=pmi2 sets PMI_RANK as well, but says the local rank in its own variable only.
  if (variables.has("MPI_LOCALRANKID") || (variables.has("PMI_RANK") && !in_slurm_step(variables))) {
    return read_mpich(variables);
  }
  if (in_slurm_step(variables)) return read_slurm(variables);
  for (const char* name : {"WORLD_SIZE", "LOCAL_RANK"}) {
    if (variables.has(name))
      fail_launch(cat(name, "=", variables.text(name), " is set, but RANK is not: unset it or set both"));
  }
  if (variables.has("PMI_SIZE")) fail_launch("PMI_SIZE is set, but PMI_RANK is not: unset it or set both");
  Launch alone;
  alone.launcher = "single";
  return alone;
}

}  // namespace tesserae::mesh
