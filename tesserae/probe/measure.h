#pragma once

#include <functional>
#include <string>

#include "tesserae/comm/fabric.h"
#include "tesserae/cost/machine.h"

namespace tesserae::probe {

/// Seconds that `body`, which calls no other rank, takes while every rank of the fabric does it at the same time, again
/// and again for `window` seconds: cores and memory that ranks share count. The median of five windows; of devices the
/// slowest one's, where ranks compute on hosts that of their mean rate. Collective; the same on all ranks.
double seconds_of(comm::Fabric& fabric, double window, const std::function<void()>& body);
/// The same of a body that all ranks do together, as many times on each: on the slowest rank.
double seconds_together(comm::Fabric& fabric, double window, const std::function<void()>& body);

/// Of what each rank has found. Collective.
double mean_over_ranks(comm::Fabric& fabric, double own);

/// What was queued has been done.
void wait_for_device(const comm::Fabric& fabric);

c10::ScalarType scalar_type_of(const std::string& dtype);

/// What the measurements below share.
struct Bench {
  comm::Fabric& fabric;
  double window = 0.05;                         ///< seconds of one measurement
  std::function<void(const std::string&)> say;  ///< what is measured next; on every rank
};

/// How fast ranks compute in one dtype. Collective; the same on all ranks.
cost::Machine::Compute measure_compute(const Bench& bench, const std::string& dtype);

/// What libraries keep for products in `dtype`, where ranks compute on the host. Of each dtype before larger products
/// of it. Collective; the same on all ranks.
cost::Machine::Workspaces measure_workspaces(const Bench& bench, const std::string& dtype);

/// Fills in the optimizer, the collectives and how much of them computing hides. Collective; the same on all ranks.
void measure_moving(const Bench& bench, cost::Machine& machine);

/// What whole steps in `dtype` take beyond what all of the above, which are known, add up to. Collective; the same on
/// all ranks.
void measure_steps(const Bench& bench, const std::string& dtype, cost::Machine& machine);

}  // namespace tesserae::probe
