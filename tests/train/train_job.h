#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/folder.h"
#include "tesserae/checkpoint/reader.h"
#include "tesserae/config/json.h"
#include "tesserae/dial/client.h"
#include "tesserae/os/files.h"
#include "tests/train/run_program.h"

namespace tesserae::train {

/// A folder with a text, a configuration of a small model with dropout, and the runs of `tesserae train` on it. Define
/// TESSERAE_PROGRAM.
class TrainJob {
 public:
  explicit TrainJob(const std::string& name) : folder_(cat(testing::TempDir(), "tesserae-", name, "-", ::getpid())) {
    os::files().remove_all(folder_);
    os::files().make_directories(folder_);
    std::string text;
    for (int line = 0; line < 1500; ++line)
      text += cat("the square of ", line % 97, " is ", (line % 97) * (line % 97), "\n");
    os::files().write(folder_ + "/text.txt", text);
    const config::Json config = {
        {"run", {{"folder", folder_ + "/run"}, {"log_every", 1}}},
        {"model", {{"dimension", 32}, {"layers", 2}, {"heads", 2}, {"dropout", 0.1}}},
        {"data", {{"path", folder_ + "/text.txt"}, {"sequence_length", 32}}},
        {"train", {{"steps", 24}, {"batch_per_rank", 2}, {"accumulate", 2}, {"eval_batches", 1}}},
        {"optimizer", {{"lr", 1e-2}, {"warmup_steps", 3}}}};
    os::files().write(folder_ + "/job.json", config.dump());
  }
  ~TrainJob() { os::files().remove_all(folder_); }
  TrainJob(const TrainJob&) = delete;
  TrainJob& operator=(const TrainJob&) = delete;

  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  /// `tesserae train` with these arguments, writing to the run folder of that name.
  Program start(const std::string& run, std::vector<std::string> more,
                std::map<std::string, std::string> environment = {}) const {
    std::vector<std::string> arguments = {TESSERAE_PROGRAM, "train", path("job.json"), "--set",
                                          "run.folder=" + path(run)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    environment.try_emplace("OMP_NUM_THREADS", "1");
    return Program(arguments, std::move(environment));
  }

  /// The same from begin to end; expects that it ends well. Returns what it wrote to both streams.
  std::string run(const std::string& run, const std::vector<std::string>& more,
                  const std::map<std::string, std::string>& environment = {}) const {
    Program program = start(run, more, environment);
    const auto exit = program.finish(std::chrono::seconds(200));
    EXPECT_TRUE(exit && exit->success()) << (exit ? exit->text() : "still runs") << "\n"
                                         << program.output << program.errors;
    return program.output + program.errors;
  }

  /// What a run answers to the dial's request in the end: as `tesserae scale` and `dial` hear it, but without the
  /// hundred steps that a program takes to start.
  dial::Json ask(const std::string& run, const dial::Json& request) const {
    const os::Deadline deadline(std::chrono::seconds(100));
    dial::Client client(path(run), request, deadline);
    while (const std::optional<dial::Json> event = client.next(deadline)) {
      if (event->at("event") != "accepted") return *event;
    }
    return {{"event", "error"}, {"message", "no answer"}};
  }

  /// The name of an undisturbed run with these arguments, or with others that make the same numbers: what is saved and
  /// who takes whose place matters only to a run that rolls back.
  std::string reference(const std::vector<std::string>& arguments) {
    const auto begins = [](const std::string& word, std::initializer_list<const char*> with) {
      return std::ranges::any_of(with, [&](const char* prefix) { return word.starts_with(prefix); });
    };
    const bool rolls_back =
        std::ranges::any_of(arguments, [&](const std::string& word) { return begins(word, {"bad_steps."}); });
    std::vector<std::string> matter;
    for (const std::string& word : arguments) {
      if (!rolls_back && begins(word, {"checkpoint.", "recovery.", "monitor.", "run.deadline_seconds="})) {
        matter.pop_back();  // --set
      } else {
        matter.push_back(word);
      }
    }
    const auto [found, is_new] = references_.emplace(matter, cat("alone-", references_.size()));
    if (is_new) run(found->second, matter);
    return found->second;
  }

  std::vector<config::Json> metrics(const std::string& run) const {
    std::vector<config::Json> lines;
    std::istringstream file(os::files().read(path(run) + "/metrics.jsonl"));
    for (std::string line; std::getline(file, line);) lines.push_back(config::Json::parse(line));
    return lines;
  }

  config::Json summary(const std::string& run) const {
    return config::Json::parse(os::files().read(path(run) + "/summary.json"));
  }

  /// Steps of the committed checkpoints, the oldest first.
  std::vector<int64_t> steps(const std::string& run) const {
    std::vector<int64_t> found;
    for (const auto& committed : checkpoint::list_checkpoints(path(run) + "/checkpoints")) {
      found.push_back(committed.step);
    }
    return found;
  }

  /// Flips a bit in the middle of a data file of a checkpoint.
  void damage(const std::string& run, int64_t step, const std::string& file = "rank-0.safetensors") const {
    const std::string name = cat(path(run), "/checkpoints/step-", step, "/", file);
    std::string bytes = os::files().read(name);
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
    os::files().write(name, bytes);
  }

  void copy(const std::string& from, const std::string& to) const {
    std::filesystem::copy(path(from), path(to), std::filesystem::copy_options::recursive);
  }

  /// `run` tells of every step up to `step` once, as `reference` does: the same losses and norms to the last bit.
  void expect_same_history(const std::string& run, const std::string& reference, size_t steps) const {
    const std::vector<config::Json> lines = metrics(run), expected = metrics(reference);
    ASSERT_EQ(lines.size(), steps);
    for (size_t i = 0; i < steps; ++i) {
      EXPECT_EQ(lines[i]["step"], i + 1);
      for (const char* key : {"loss", "grad_norm", "lr"}) EXPECT_EQ(lines[i][key], expected[i][key]) << key << " " << i;
    }
  }

  /// The same to rounding: the largest difference of a loss, relative, up to `step` and as far as `reference` went.
  double difference_in_history(const std::string& run, const std::string& reference, size_t step = SIZE_MAX) const {
    const std::vector<config::Json> lines = metrics(run), expected = metrics(reference);
    double worst = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i]["step"], i + 1);
      if (i >= expected.size() || i >= step) continue;
      const double loss = lines[i]["loss"], wanted = expected[i]["loss"];
      worst = std::max(worst, std::abs(loss - wanted) / wanted);
    }
    return worst;
  }

  checkpoint::Checkpoint open(const std::string& run, int64_t step) const {
    return checkpoint::Checkpoint::open(cat(path(run), "/checkpoints/step-", step));
  }

  /// The checkpoint of `run` holds the parameters and the optimizer's state of the other, bit for bit, and random
  /// numbers, if it has any; in whatever order tensors are stored.
  void expect_same_tensors(const std::string& run, const std::string& reference, int64_t step) const {
    const checkpoint::Checkpoint got = open(run, step), wanted = open(reference, step);
    EXPECT_EQ(got.manifest().training.at("data"), wanted.manifest().training.at("data"));
    EXPECT_EQ(got.step(), wanted.step());
    for (const checkpoint::StoredTensor& tensor : wanted.manifest().tensors) {
      const checkpoint::StoredTensor* const own = got.manifest().find(tensor.name);
      if (own == nullptr && tensor.name.starts_with("random/")) continue;
      ASSERT_NE(own, nullptr) << tensor.name;
      EXPECT_EQ(own->split, tensor.split) << tensor.name;
      EXPECT_TRUE(got.read(tensor.name) == wanted.read(tensor.name)) << tensor.name;
    }
    for (const checkpoint::StoredTensor& tensor : got.manifest().tensors) {
      EXPECT_NE(wanted.manifest().find(tensor.name), nullptr) << tensor.name;
    }
  }

  /// Both checkpoints hold the same tensors, bit for bit: parameters, optimizer, random numbers.
  void expect_same_state(const std::string& run, const std::string& reference, int64_t step) const {
    const checkpoint::Checkpoint got = open(run, step), wanted = open(reference, step);
    ASSERT_EQ(got.manifest().tensors.size(), wanted.manifest().tensors.size());
    expect_same_tensors(run, reference, step);
    size_t random = 0;
    for (const checkpoint::StoredTensor& tensor : wanted.manifest().tensors) {
      random += tensor.name.starts_with("random/");
    }
    EXPECT_EQ(random, static_cast<size_t>(wanted.manifest().mesh().ranks()));
  }

 private:
  std::string folder_;
  std::map<std::vector<std::string>, std::string> references_;  ///< arguments to the name of their run
};

/// The processes that a launcher started.
inline std::vector<pid_t> children_of(pid_t process) {
  std::vector<pid_t> ids;
  std::istringstream file(os::files().read(cat("/proc/", process, "/task/", process, "/children")));
  for (pid_t id = 0; file >> id;) ids.push_back(id);
  return ids;
}

/// The processes of a job by rank: once they have begun to train.
inline std::map<int, pid_t> ranks_of(Program& program) {
  std::map<int, pid_t> ranks;
  for (const pid_t process : children_of(program.process().id())) {
    try {
      const std::string name = os::files().read(cat("/proc/", process, "/comm"));
      const size_t at = name.find(':');
      if (at != std::string::npos) ranks[std::atoi(name.c_str() + at + 1)] = process;
    } catch (const IoError&) {
      continue;  // it has ended meanwhile
    }
  }
  return ranks;
}

}  // namespace tesserae::train
