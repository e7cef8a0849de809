#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include "tesserae/os/files.h"

namespace tesserae::os {

/// A test with an empty folder of its own, removed afterwards.
class Scratch : public ::testing::Test {
 protected:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "tesserae-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = name;
  }
  ~Scratch() override { std::filesystem::remove_all(folder_); }

  Path folder_;
};

}  // namespace tesserae::os
