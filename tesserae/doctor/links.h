#pragma once

#include <vector>

#include "tesserae/comm/fabric.h"
#include "tesserae/doctor/finding.h"

namespace tesserae::doctor {

/// How fast some ranks of the job speak to each other.
struct Link {
  std::string name;             ///< "within hosts" or "between hosts"
  int ranks = 0;                ///< that speak together
  double microseconds = 0;      ///< of a barrier, the median
  double bytes_per_second = 0;  ///< that each rank receives in an all-gather, at best
};

struct LinkFacts {
  int hosts = 1, ranks = 1;
  std::vector<Link> links;
  double clocks_apart = 0;  ///< seconds, between the hosts whose clocks differ most; as good as a barrier is short
};

/// Collective over the fabric: measures with all-gathers of `mebibytes`. Throws what Group's verbs throw.
LinkFacts measure_links(comm::Fabric& fabric, int mebibytes);

Findings examine(const LinkFacts& facts);

}  // namespace tesserae::doctor
