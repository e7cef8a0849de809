#include "tesserae/launch/ranks_output.h"

#include <chrono>
#include <cstdio>

#include "tesserae/base/error.h"
#include "tesserae/os/clock.h"
#include "tesserae/os/descriptor.h"
#include "tesserae/os/terminal.h"

namespace tesserae::launch {
namespace {

constexpr size_t kept_lines = 12;

}  // namespace

RanksOutput::RanksOutput() : live_screen_(os::is_terminal(os::Stream::output)) {}

void RanksOutput::print(const std::string& line) const {
  // Rank 0 may have drawn its live line on the same screen.
  std::fprintf(stderr, "%s%s\n", live_screen_ ? "\r\033[K" : "", line.c_str());
}

void RanksOutput::wait(std::vector<LaunchedRank>& ranks, SpareRanks& spares, int signals) {
  std::vector<int> descriptors;
  for (const LaunchedRank& rank : ranks) descriptors.push_back(rank.output.get());
  spares.add_outputs(descriptors);
  if (signals >= 0) descriptors.push_back(signals);
  // A rank whose output was closed or handed on tells nothing by its descriptor: hence the short deadline.
  for (const int ready : os::wait_readable(descriptors, os::Deadline(std::chrono::milliseconds(50)))) {
    for (LaunchedRank& rank : ranks) {
      if (rank.output.get() == ready) read(rank);
    }
    for (const std::string& line : spares.read(ready)) print("spare: " + line);
  }
}

void RanksOutput::drain(LaunchedRank& rank) {
  while (rank.output) {
    if (os::wait_readable({rank.output.get()}, os::Deadline(std::chrono::milliseconds(0))).empty()) return;
    read(rank);
  }
}

void RanksOutput::read(LaunchedRank& rank) {
  for (const std::string& line : rank.read()) {
    rank.last.push_back(line);
    if (rank.last.size() > kept_lines) rank.last.pop_front();
    if (shown_ && rank.process->id() != *shown_) continue;
    // Our own lines say which rank they come from.
    print(line.starts_with("tesserae: ") ? line : cat("rank ", rank.rank, ": ", line));
    last_speaker_ = rank.process->id();
  }
}

void RanksOutput::show_only(const LaunchedRank& rank) {
  shown_ = rank.process ? rank.process->id() : nobody;
}

void RanksOutput::repeat(const LaunchedRank& rank) const {
  if (rank.last.empty() || last_speaker_ == rank.process->id()) return;
  print("the last that it wrote:");
  for (const std::string& line : rank.last) print("  " + line);
}

}  // namespace tesserae::launch
