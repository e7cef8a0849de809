#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tesserae/monitor/memory_use.h"
#include "tesserae/monitor/step_timer.h"

namespace tesserae::monitor {

/// What a rank tells rank 0, through the store of the job: kilobytes, as CBOR.
struct Report {
  int64_t number = 0;  ///< counts its reports: one that does not grow is of a rank that is silent
  Now now = {};
  std::vector<StepTimes> steps = {};  ///< those after Wish::known, oldest first
  MemoryUse memory = {};
  PerVerb sent{};                         ///< StepTimer::sent
  PerWork work{};                         ///< StepTimer::work
  std::vector<comm::LinkUse> links = {};  ///< StepTimer::links
  int64_t generation = 0;                 ///< Wish::generation, as this rank knows it
  bool ended = false;                     ///< the rank says no more
  std::optional<Timeline> timeline = {};  ///< of a step that Wish::timeline_every divides
  std::vector<Timeline> kept = {};        ///< of the steps that Wish::keep_first asked for those that were kept, once
  int64_t kept_of = 0;                    ///< Wish::keep_first, when that was done
  std::string stacks = {};                ///< what Wish::stacks asked for
  int64_t stacks_of = 0;                  ///< the number of that wish
};

std::string to_bytes(const Report& report);
/// Throws Corruption for what is no report.
Report report_from(std::string_view bytes);

/// What rank 0 wants of all.
struct Wish {
  int64_t generation = 0;  ///< of rank 0's monitor: what is of an earlier one in the store does not count
  int64_t timeline_every = 1;
  int64_t keep_first = 0, keep_last = -1;  ///< timelines of these steps
  int64_t stacks = 0;                      ///< grows when the stacks of all threads are wanted
  bool waits = false;                      ///< for one of the two: reports hold them as long as it does
  int64_t known = 0;                       ///< the last step of which all have told: reports begin after it
};
std::string to_bytes(const Wish& wish);
Wish wish_from(std::string_view bytes);

}  // namespace tesserae::monitor
