#include "tesserae/mesh/host_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tesserae/base/error.h"

namespace tesserae::mesh {
namespace {

using ::testing::ElementsAre;

TEST(HostList, ExpandsWhatSlurmWrites) {
  EXPECT_THAT(expand_host_list("login1"), ElementsAre("login1"));
  EXPECT_THAT(expand_host_list("a,b.example.org"), ElementsAre("a", "b.example.org"));
  EXPECT_THAT(expand_host_list("node[01-03,07]"), ElementsAre("node01", "node02", "node03", "node07"));
  EXPECT_THAT(expand_host_list("node[01-02,07],gpu-3"), ElementsAre("node01", "node02", "node07", "gpu-3"));
  EXPECT_THAT(expand_host_list("n[9-11]"), ElementsAre("n9", "n10", "n11"));
  EXPECT_THAT(expand_host_list("n[098-101]-ib"), ElementsAre("n098-ib", "n099-ib", "n100-ib", "n101-ib"));
  EXPECT_THAT(expand_host_list("r[1-2]n[03-04]"), ElementsAre("r1n03", "r1n04", "r2n03", "r2n04"));
}

TEST(HostList, RefusesWhatItCannotRead) {
  for (const char* list : {"", "a,,b", "node[01-03", "node01-03]", "node[]", "node[a-b]", "node[3-1]", "n]1[",
                           "node[1-99999999]", "n[1-5000][1-5000]", "node[-3]"}) {
    EXPECT_THROW(expand_host_list(list), InvalidArgument) << list;
  }
}

TEST(HostList, ExpandsTaskCounts) {
  EXPECT_THAT(expand_task_counts("4"), ElementsAre(4));
  EXPECT_THAT(expand_task_counts("4(x2),3"), ElementsAre(4, 4, 3));
  for (const char* counts : {"", "4(x2", "x2", "0", "4(x0)", "4(x99999999)", "-1", "4,,3"}) {
    EXPECT_THROW(expand_task_counts(counts), InvalidArgument) << counts;
  }
}

}  // namespace
}  // namespace tesserae::mesh
