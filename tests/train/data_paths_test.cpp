#include "tesserae/train/data_paths.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

#include "tests/config/documents.h"

namespace tesserae::train {
namespace {

/// A variable of the environment while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

TEST(DataPaths, MissingPathsAreNamedByTheirKey) {
  EXPECT_EQ(config::error_of([] { resolve_data_paths({"/nowhere/text"}); }),
            "[configuration] data.path: there is no file or folder /nowhere/text");
  EXPECT_EQ(config::error_of([] {
              resolve_data_paths({"/", "/nowhere/text"});
            }),
            "[configuration] data.path[1]: there is no file or folder /nowhere/text");
}

TEST(DataPaths, PythonIsAskedForItsLibrary) {
  const std::vector<std::string> paths = resolve_data_paths({"python:stdlib"});
  const auto ends = [&](const std::string& name) {
    return std::ranges::any_of(paths, [&](const std::string& path) { return path.ends_with(name); });
  };
  EXPECT_TRUE(ends("/argparse.py"));
  EXPECT_TRUE(ends("/json"));
  EXPECT_FALSE(ends("/site-packages"));
  EXPECT_FALSE(ends("/test"));
}

TEST(DataPaths, WithoutPythonTheErrorSaysWhatToDo) {
  const Variable python("TESSERAE_PYTHON", "/nowhere/python");
  EXPECT_EQ(
      config::error_of([] { resolve_data_paths({"python:stdlib"}); }),
      "[configuration] data.path: python:stdlib needs /nowhere/python to say where its library lies, and it cannot be "
      "run; give a folder of text instead");
}

}  // namespace
}  // namespace tesserae::train
