#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <string>

#include "tesserae/os/clock.h"
#include "tesserae/os/files.h"
#include "tesserae/os/process.h"
#include "tests/train/run_program.h"

namespace tesserae::launch {

/// Starts ranks that run a shell script and knows their process ids.
class Launcher : public testing::Test {
 protected:
  Launcher() { os::files().make_directories(folder_); }
  ~Launcher() override { os::files().remove_all(folder_); }

  Program launch(int ranks, const std::string& script, int replacements = 0,
                 std::map<std::string, std::string> environment = {}) {
    begin_ = os::now();
    environment.insert({{"FOLDER", folder_}, {"REPLACEMENTS", std::to_string(replacements)}});
    return Program({LAUNCH_RANKS, std::to_string(ranks), "sh", "-c", "echo $$ > $FOLDER/$RANK.pid; " + script},
                   environment);
  }

  double elapsed() const { return std::chrono::duration<double>(os::now() - begin_).count(); }

  /// The ranks have all started, so that a signal meets them at work.
  void wait_until_started(int ranks) const {
    const os::Deadline deadline{std::chrono::seconds(60)};
    while (os::files().list(folder_).size() < static_cast<size_t>(ranks) && !deadline.passed()) {
      os::sleep_for(std::chrono::milliseconds(5));
    }
    os::sleep_for(std::chrono::milliseconds(200));  // from the first line of the script to its traps
  }

  /// Every rank has ended. A killed parent's children take a moment.
  void expect_nothing_left(int ranks) const {
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t id = std::stoi(os::files().read(folder_ + "/" + std::to_string(rank) + ".pid"));
      const os::Deadline deadline{std::chrono::seconds(20)};
      while (os::start_time(id) && !deadline.passed()) os::sleep_for(std::chrono::milliseconds(5));
      EXPECT_FALSE(os::start_time(id)) << "rank " << rank << ", process " << id;
    }
  }

  const std::string folder_ = testing::TempDir() + "/tesserae-launcher-" + std::to_string(::getpid());
  os::TimePoint begin_;
};

}  // namespace tesserae::launch
