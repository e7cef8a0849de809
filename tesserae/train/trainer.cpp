#include "tesserae/train/trainer.h"

#include <string>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/base/log.h"
#include "tesserae/comm/error.h"
#include "tesserae/comm/membership.h"
#include "tesserae/os/process.h"
#include "tesserae/os/seconds.h"
#include "tesserae/os/signals.h"
#include "tesserae/train/run.h"

namespace tesserae::train {
namespace {

/// Losses are survived only with a launcher of ours.
void warn_of_another_launcher(const config::Config& config, const comm::Membership& membership) {
  if (membership.served() || membership.rank() != 0 || membership.ranks() == 1) return;
  const auto& asked = config.recovery;
  std::string keys;
  for (const auto& [key, value] :
       {std::pair("replacements", asked.replacements), std::pair("max_restarts", asked.max_restarts),
        std::pair("min_ranks", asked.min_ranks)}) {
    if (value > 0) keys += cat(keys.empty() ? "" : ", ", "recovery.", key);
  }
  if (keys.empty()) return;
  log(LogLevel::warning,
      keys +
          ": without effect here, since another launcher has started the ranks: the loss of one ends the job; "
          "`tesserae train --nproc`, once on each host, starts ranks that survive it");
}

}  // namespace

int train(const config::Config& config, const JobSetup& setup, const mesh::World& world, const Resume& resume) {
  os::name_process(cat("tesserae:", world.rank()));
  os::survive_broken_pipes();
  comm::Membership membership(world.launch(), config.recovery.replacements > 0 || config.recovery.min_ranks > 0);
  // Ranks give up on a missing one one after the other, each at its own deadline.
  const auto deadline = os::milliseconds(config.run.deadline_seconds + config.run.connect_deadline_seconds);
  warn_of_another_launcher(config, membership);
  Run run(config, setup, resume, world, membership);
  for (;;) {
    bool scales = false;
    try {
      run.meet();
      if (const std::optional<int> status = run.train()) return *status;
      scales = true;
    } catch (const StateLost&) {
      throw;
    } catch (const comm::Mismatch&) {
      throw;
    } catch (const comm::CommError& failure) {
      log(LogLevel::info, failure.what());
      if (!membership.next_epoch(run.missing(failure), deadline)) throw;
    }
    if (scales && !membership.wait_for_epoch(deadline)) {
      throw comm::CommError("train", "the job has ended while the number of its ranks was to change");
    }
    if (!membership.has_place()) return 0;  // the others go on without this one
  }
}

}  // namespace tesserae::train
