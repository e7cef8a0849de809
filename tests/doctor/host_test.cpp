#include "tesserae/doctor/host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

namespace tesserae::doctor {
namespace {

using ::testing::HasSubstr;

HostFacts good_host() {
  HostFacts host;
  host.system = {.name = "Linux", .release = "6.1.0-13-amd64", .machine = "x86_64"};
  host.processors = 16;
  host.threads = 2;
  host.local_ranks = 8;
  host.has_bf16 = true;
  host.memory = {.total = uint64_t{64} << 30, .available = uint64_t{60} << 30};
  host.shared_memory = {.total = uint64_t{32} << 30, .available = uint64_t{32} << 30};
  host.limits = {.open_files = 65536, .locked_bytes = UINT64_MAX};
  host.has_infiniband = true;
  host.clock_is_synchronised = true;
  return host;
}

Finding about(const std::string& subject, const HostFacts& host) {
  const Findings found = examine(host);
  const auto it = std::find_if(found.begin(), found.end(), [&](const Finding& f) { return f.subject == subject; });
  EXPECT_NE(it, found.end()) << subject;
  return it == found.end() ? Finding{} : *it;
}

TEST(DoctorHost, AGoodHostHasNothingToDo) {
  for (const Finding& finding : examine(good_host())) {
    EXPECT_EQ(finding.verdict, Verdict::good) << finding.subject << ": " << finding.fact;
    EXPECT_EQ(finding.advice, "") << finding.subject;
  }
  EXPECT_EQ(worst_of(examine(good_host())), Verdict::good);
}

TEST(DoctorHost, EachFaultIsNamedWithWhatToDo) {
  struct Case {
    std::string subject;
    Verdict verdict;
    std::string fact, advice;
    std::function<void(HostFacts&)> change;
  };
  const Case cases[] = {
      {"system", Verdict::wrong, "Darwin", "only Linux", [](HostFacts& h) { h.system.name = "Darwin"; }},
      {"system", Verdict::note, "4.18.0", "before 5.3", [](HostFacts& h) { h.system.release = "4.18.0-553.el8"; }},
      {"system", Verdict::note, "5.2.1", "before 5.3", [](HostFacts& h) { h.system.release = "5.2.1"; }},
      {"threads", Verdict::warning, "not set", "OMP_NUM_THREADS=2", [](HostFacts& h) { h.threads = 0; }},
      {"threads", Verdict::warning, "8 ranks of 16 threads on 16 processors", "OMP_NUM_THREADS=2",
       [](HostFacts& h) { h.threads = 16; }},
      {"shared memory", Verdict::warning, "/dev/shm has 64 MiB", "--shm-size",
       [](HostFacts& h) { h.shared_memory = {.total = 64 << 20, .available = 60 << 20}; }},
      {"shared memory", Verdict::warning, "no /dev/shm", "--shm-size", [](HostFacts& h) { h.shared_memory = {}; }},
      {"shared memory", Verdict::wrong, "[create] not permitted", "run.backend to gloo",
       [](HostFacts& h) { h.private_memory_fault = "[create] not permitted"; }},
      {"open files", Verdict::warning, "256", "ulimit -n", [](HostFacts& h) { h.limits.open_files = 256; }},
      {"locked memory", Verdict::warning, "65536 bytes", "ulimit -l",
       [](HostFacts& h) { h.limits.locked_bytes = 65536; }},
      {"bf16 on the CPU", Verdict::note, "no instructions", "cpu_bf16_products",
       [](HostFacts& h) { h.has_bf16 = false; }},
      {"clock", Verdict::note, "NTP", "logs", [](HostFacts& h) { h.clock_is_synchronised = false; }},
  };
  for (const Case& each : cases) {
    HostFacts host = good_host();
    each.change(host);
    const Finding found = about(each.subject, host);
    EXPECT_EQ(found.verdict, each.verdict) << each.subject << ": " << found.fact;
    EXPECT_THAT(found.fact, HasSubstr(each.fact));
    EXPECT_THAT(found.advice, HasSubstr(each.advice)) << found.fact;
    EXPECT_EQ(worst_of(examine(host)), each.verdict);
  }
}

TEST(DoctorHost, RanksOfOneThreadAreNotAdvisedToHaveOne) {
  HostFacts host = good_host();
  host.threads = 1;
  host.local_ranks = host.processors + 1;
  EXPECT_EQ(about("threads", host).verdict, Verdict::warning);
  EXPECT_EQ(about("threads", host).advice, "fewer ranks");
}

TEST(DoctorHost, LocksMatterWhereThereIsInfiniBand) {
  HostFacts host = good_host();
  host.has_infiniband = false;
  host.limits.locked_bytes = 65536;
  EXPECT_EQ(worst_of(examine(host)), Verdict::good);
}

TEST(DoctorHost, LooksAtThisHost) {
  const HostFacts host = HostFacts::look(1);
  EXPECT_EQ(host.system.name, "Linux");
  EXPECT_GE(host.processors, 1);
  EXPECT_GT(host.memory.total, uint64_t{1} << 20);
  EXPECT_EQ(host.private_memory_fault, "");
  EXPECT_GT(host.limits.open_files, 0u);
}

}  // namespace
}  // namespace tesserae::doctor
