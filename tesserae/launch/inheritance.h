#pragma once

#include <memory>
#include <string>

#include "tesserae/comm/membership.h"
#include "tesserae/comm/succession.h"

namespace tesserae::launch {

/// With what a launcher decides on the job that has followed another host's: a claim that was granted.
struct Inheritance {
  std::unique_ptr<comm::MembershipServer> membership;  ///< ranks reach it already
  comm::Succession succession;
  comm::Claim claim;
  std::string why;  ///< as people read it
};

}  // namespace tesserae::launch
