// The behavioural suite of groups (tests/comm) on simulated accelerators, where groups are those that NCCL is used
// through.

#include "tests/comm/group_cases.h"
#include "tests/sim/fabric.h"
#include "tests/sim/fixture.h"

namespace tesserae::sim {
namespace {

std::vector<comm::GroupCase> cases_of_devices() {
  std::vector<comm::GroupCase> cases = comm::group_cases();
  // As NCCL's, sums of bf16 are rounded at each member.
  std::erase_if(cases, [](const auto& test) { return test.name == "sums_of_low_precision_are_formed_in_fp32"; });
  return cases;
}

class SimGroupSuite : public Sim, public ::testing::WithParamInterface<comm::GroupCase> {};

}  // namespace

TEST_P(SimGroupSuite, Behaves) {
  for (uint64_t seed = 0; seed < seeds_of(3) && !HasFailure(); ++seed) {
    restart({.seed = seed});
    run_on_devices(3, GetParam().run);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, SimGroupSuite, ::testing::ValuesIn(cases_of_devices()),
                         [](const auto& info) { return info.param.name; });

}  // namespace tesserae::sim
