#include "tesserae/base/copy.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace tesserae {
namespace {

// Where std::memcpy is called, the sanitizer for undefined behaviour ends this test.
TEST(CopyMemory, OfNothingHasNoPlace) {
  const std::string_view nothing;
  std::string to = "kept";
  copy_memory(to.data(), nothing.data(), nothing.size());
  copy_memory(nullptr, to.data(), 0);
  EXPECT_EQ(to, "kept");
  copy_memory(to.data(), "took", 3);
  EXPECT_EQ(to, "toot");
}

}  // namespace
}  // namespace tesserae
