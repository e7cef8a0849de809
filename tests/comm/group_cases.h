#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

/// One behaviour that every fabric whose groups move data must show. Called on all ranks; reports by EXPECT.
struct GroupCase {
  std::string name;
  void (*run)(Fabric& fabric);

  friend std::ostream& operator<<(std::ostream& out, const GroupCase& test) { return out << test.name; }
};

/// The behavioural suite: run over each backend (local_suite_test.cpp, process_suite_test.cpp).
const std::vector<GroupCase>& group_cases();

/// Behaviours that end with a failed group. Each needs a fabric of its own with a short deadline.
void members_that_call_different_verbs_get_mismatch(Fabric& fabric);
void members_that_bring_different_sizes_get_mismatch(Fabric& fabric);
/// One gathers what another reduces, packed.
void members_that_mean_different_contents_get_mismatch(Fabric& fabric);
void members_that_call_different_packed_verbs_get_mismatch(Fabric& fabric);
/// The last rank never calls; it waits `absence` instead.
void a_member_that_never_calls_makes_the_others_time_out(Fabric& fabric, std::chrono::milliseconds absence);

}  // namespace tesserae::comm
