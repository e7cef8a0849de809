#include "tesserae/base/error.h"

#include <gtest/gtest.h>

namespace tesserae {
namespace {

TEST(Error, NamesTheFunctionFirst) {
  const InvalidArgument error("Layout", cat("P=", 3, " does not divide G=", 4));
  EXPECT_STREQ(error.what(), "[Layout] P=3 does not divide G=4");
}

TEST(Error, KindsAreToldApartByType) {
  const auto kind = [](const auto& raise) -> std::string {
    try {
      raise();
    } catch (const Corruption&) {
      return "corruption";
    } catch (const IoError&) {
      return "io";
    } catch (const Error&) {
      return "error";
    }
    return "none";
  };
  EXPECT_EQ(kind([] { throw Corruption("f", "m"); }), "corruption");
  EXPECT_EQ(kind([] { throw IoError("f", "m"); }), "io");
  EXPECT_EQ(kind([] { throw InvalidArgument("f", "m"); }), "error");
}

}  // namespace
}  // namespace tesserae
