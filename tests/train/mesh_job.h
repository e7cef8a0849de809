#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/train/train_job.h"

namespace tesserae::train {

/// A job whose numbers must not depend on how it is cut over ranks: a model of 4 heads without dropout, trained as a
/// whole and over several axes of a mesh.
class MeshJob : public testing::Test {
 protected:
  /// `settings`: of all runs, as "name=value".
  MeshJob(const std::string& name, std::vector<std::string> settings) : job_(name), settings_(std::move(settings)) {}

  /// The arguments of a run on `count` ranks with `more` settings.
  std::vector<std::string> ranks(int count, const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"--nproc", std::to_string(count), "--set", "model.heads=4",
                                    "--set",   "model.dropout=0"};
    for (const auto* assignments : {&settings_, &more}) {
      for (const std::string& assignment : *assignments) all.insert(all.end(), {"--set", assignment});
    }
    return all;
  }

  /// From the end, since a run that was resumed tells of its own steps only.
  void expect_same_losses(const std::string& run, const std::string& reference) const {
    const std::vector<config::Json> lines = job_.metrics(run), expected = job_.metrics(reference);
    ASSERT_GE(lines.size(), 12u);
    for (size_t i = 1; i <= std::min(lines.size(), expected.size()); ++i) {
      const config::Json &line = lines[lines.size() - i], &wanted = expected[expected.size() - i];
      const double loss = wanted["loss"], norm = wanted["grad_norm"];
      EXPECT_NEAR(line["loss"].get<double>(), loss, 1e-4 * loss) << run << ", " << i << " to go";
      EXPECT_NEAR(line["grad_norm"].get<double>(), norm, 1e-3 * norm) << run << ", " << i << " to go";
    }
    EXPECT_NEAR(lines.back()["val_loss"].get<double>(), expected.back()["val_loss"].get<double>(), 1e-3);
  }

  /// `run` goes on from step 12 of `from`, and trains what `reference` did.
  void expect_continues(const std::string& run, const std::string& from, int count,
                        const std::vector<std::string>& more, const std::string& reference = "whole") const {
    std::vector<std::string> arguments = ranks(count, more);
    arguments.insert(arguments.begin(), {"--resume", job_.path(from + "/checkpoints/step-12")});
    EXPECT_THAT(job_.run(run, arguments), testing::HasSubstr("resumed at step 12 "));
    expect_same_losses(run, reference);
  }

  /// What a run writes that must not come to an end.
  std::string refused(int count, const std::vector<std::string>& more) const {
    Program program = job_.start("refused", ranks(count, more));
    const auto exit = program.finish(std::chrono::seconds(100));
    EXPECT_TRUE(exit && !exit->success());
    return program.output + program.errors;
  }

  const TrainJob job_;

 private:
  const std::vector<std::string> settings_;
};

}  // namespace tesserae::train
