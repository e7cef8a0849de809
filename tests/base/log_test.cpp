#include "tesserae/base/log.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

// The level is read once, from TESSERAE_LOG, which ctest leaves unset: warnings and errors are shown.
TEST(Log, ShowsWarningsAndErrorsWithTheRankOnceItIsKnown) {
  ::testing::internal::CaptureStderr();
  log(LogLevel::debug, "hidden");
  log(LogLevel::info, "hidden");
  log(LogLevel::warning, "early");
  set_log_rank(3);
  log(LogLevel::error, "late");
  set_log_rank(-1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "tesserae: early\ntesserae: rank 3: late\n");
  EXPECT_FALSE(log_enabled(LogLevel::info));
  EXPECT_TRUE(log_enabled(LogLevel::warning));
}

}  // namespace
}  // namespace tesserae
