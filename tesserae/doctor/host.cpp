#include "tesserae/doctor/host.h"

#include <charconv>
#include <cstdlib>
#include <filesystem>

#include "tesserae/base/error.h"
#include "tesserae/doctor/text.h"
#include "tesserae/os/memory_file.h"
#include "tesserae/os/process.h"
#include "tesserae/train/device.h"

namespace tesserae::doctor {
namespace {

constexpr uint64_t GiB = uint64_t{1} << 30;
// What a container has if nobody asked for more.
constexpr uint64_t little_shared_memory = GiB;
// A rank has a few for each other rank of its host and for each file of a checkpoint.
constexpr uint64_t files_of_a_rank = 1024;

/// The first two numbers of "6.1.0-13-amd64".
std::pair<int, int> kernel_version(const std::string& release) {
  std::pair<int, int> version{0, 0};
  const char* const end = release.data() + release.size();
  const auto [dot, error] = std::from_chars(release.data(), end, version.first);
  if (error == std::errc() && dot < end && *dot == '.') std::from_chars(dot + 1, end, version.second);
  return version;
}

std::string fault_of_memory_files() {
  try {
    const os::MemoryFile made = os::MemoryFile::create("tesserae-doctor", 4096);
    const os::MemoryFile seen = os::MemoryFile::open(os::process_id(), made.descriptor(), "tesserae-doctor", 4096);
    *static_cast<char*>(made.data()) = 1;
    return *static_cast<const char*>(seen.data()) == 1 ? "" : "what one mapping writes, another does not show";
  } catch (const Error& error) {
    return error.what();
  }
}

Finding system_of(const HostFacts& host) {
  Finding found{"system", Verdict::good,
                cat(host.system.name, " ", host.system.release, ", ", host.system.machine, ", ",
                    counted(host.processors, "processor"), ", ", in_gib(host.memory.total), " of memory (",
                    in_gib(host.memory.available), " available)"),
                ""};
  if (host.system.name != "Linux") {
    found.verdict = Verdict::wrong;
    found.advice = "only Linux is supported";
  } else if (kernel_version(host.system.release) < std::pair(5, 3)) {
    found.verdict = Verdict::note;
    found.advice = "kernels before 5.3 have no process handles: a dead neighbour is noticed by polling";
  }
  return found;
}

Finding threads_of(const HostFacts& host) {
  const int each = std::max(1, host.processors / std::max(1, host.local_ranks));
  if (host.threads == 0) {
    return {"threads", host.local_ranks > 1 ? Verdict::warning : Verdict::good,
            cat("OMP_NUM_THREADS is not set: each of ", counted(host.local_ranks, "rank"), " computes with ",
                counted(host.processors, "thread")),
            host.local_ranks > 1 ? cat("OMP_NUM_THREADS=", each, " (torchrun sets 1)") : ""};
  }
  const bool crowded = host.threads * host.local_ranks > host.processors;
  const std::string fewer = host.threads > each ? cat("fewer ranks, or OMP_NUM_THREADS=", each) : "fewer ranks";
  return {"threads", crowded ? Verdict::warning : Verdict::good,
          cat(counted(host.local_ranks, "rank"), " of ", counted(host.threads, "thread"), " on ",
              counted(host.processors, "processor")),
          crowded ? fewer : ""};
}

Finding shared_memory_of(const HostFacts& host) {
  if (!host.private_memory_fault.empty()) {
    return {"shared memory", Verdict::wrong, host.private_memory_fault,
            "ranks of this host cannot share memory: allow memfd_create and /proc/PID/fd among processes of one user, "
            "or set run.backend to gloo"};
  }
  const std::string size = host.shared_memory.total == 0 ? "there is no /dev/shm"
                                                         : cat("/dev/shm has ", in_gib(host.shared_memory.total), ", ",
                                                               in_gib(host.shared_memory.available), " available");
  if (host.shared_memory.total >= little_shared_memory) return {"shared memory", Verdict::good, size, ""};
  return {"shared memory", Verdict::warning,
          cat(size,
              "; ranks share memory that does not come from there, but workers of a DataLoader and copies of a "
              "checkpoint in memory do"),
          "docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir with medium: Memory at /dev/shm"};
}

Findings limits_of(const HostFacts& host) {
  const auto text = [](uint64_t limit) { return limit == UINT64_MAX ? std::string("unlimited") : cat(limit); };
  const bool few = host.limits.open_files < files_of_a_rank;
  Findings found = {{"open files", few ? Verdict::warning : Verdict::good,
                     cat("a process may have ", text(host.limits.open_files)), few ? "ulimit -n 65536" : ""}};
  if (host.has_infiniband) {
    const bool bound = host.limits.locked_bytes != UINT64_MAX;
    found.push_back(
        {"locked memory", bound ? Verdict::warning : Verdict::good,
         cat("a process may lock ", text(host.limits.locked_bytes), bound ? " bytes" : "",
             "; there is InfiniBand, which locks what it sends"),
         bound ? "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity for slurmd)" : ""});
  }
  return found;
}

Finding clock_of(const HostFacts& host) {
  if (!host.clock_is_synchronised) return {"clock", Verdict::note, "the system does not say who sets it", ""};
  if (*host.clock_is_synchronised) return {"clock", Verdict::good, "synchronised", ""};
  return {"clock", Verdict::note, "nobody keeps it right (no NTP)",
          "times in logs of different hosts cannot be compared; training depends on none"};
}

Finding bf16_of(const HostFacts& host) {
  if (host.has_bf16) return {"bf16 on the CPU", Verdict::good, "in hardware", ""};
  return {"bf16 on the CPU", Verdict::note, "the processor has no instructions for it: products are slow",
          "train in fp32, or set cpu_bf16_products to fp32 (tsm.init)"};
}

}  // namespace

HostFacts HostFacts::look(int local_ranks) {
  HostFacts host;
  host.system = os::system();
  host.processors = os::processors();
  if (const char* const threads = std::getenv("OMP_NUM_THREADS")) host.threads = std::atoi(threads);
  host.local_ranks = local_ranks;
  host.has_bf16 = train::has_bf16(c10::kCPU);
  host.memory = os::host_memory();
  try {
    host.shared_memory = os::space_at("/dev/shm");
  } catch (const IoError&) {
    // There is none.
  }
  host.private_memory_fault = fault_of_memory_files();
  host.limits = os::limits();
  std::error_code none;
  host.has_infiniband = std::filesystem::exists("/sys/class/infiniband", none);
  host.clock_is_synchronised = os::clock_is_synchronised();
  return host;
}

Findings examine(const HostFacts& host) {
  Findings found = {system_of(host), threads_of(host), shared_memory_of(host)};
  for (Finding& finding : limits_of(host)) found.push_back(std::move(finding));
  found.push_back(bf16_of(host));
  found.push_back(clock_of(host));
  return found;
}

}  // namespace tesserae::doctor
