#include <gtest/gtest.h>

#include <cstdio>
#include <exception>
#include <map>
#include <string>

#include "tests/support/rank_main.h"
#include "tests/support/ranks.h"

namespace tesserae::testing {

namespace {

std::map<std::string, void (*)(const RankArgs&)>& rank_mains() {
  static std::map<std::string, void (*)(const RankArgs&)> mains;
  return mains;
}

}  // namespace

int run_rank(const std::string& name, const RankArgs& args) {
  GTEST_FLAG_SET(throw_on_failure, true);
  const auto found = rank_mains().find(name);
  if (found == rank_mains().end()) {
    std::fprintf(stderr, "no RANK_MAIN(%s) in this program\n", name.c_str());
    return 2;
  }
  try {
    found->second(args);
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
}

bool register_rank_main(const char* name, void (*main)(const RankArgs&)) {
  return rank_mains().emplace(name, main).second;
}

}  // namespace tesserae::testing

int main(int argc, char** argv) {
  const std::string flag = "--rank-main=";
  ::testing::InitGoogleTest(&argc, argv);
  if (argc > 1 && std::string(argv[1]).rfind(flag, 0) == 0) {
    return tesserae::testing::run_rank(std::string(argv[1]).substr(flag.size()), {argv + 2, argv + argc});
  }
  return RUN_ALL_TESTS();
}
