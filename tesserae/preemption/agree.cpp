#include "tesserae/preemption/agree.h"

#include <string>

#include "tesserae/base/error.h"
#include "tesserae/comm/agree.h"

namespace tesserae::preemption {

std::optional<Notice> agree(const std::optional<Notice>& own, comm::Fabric& fabric) {
  if (fabric.size() == 1) return own;
  const int rank = comm::lowest_rank_with(fabric, own.has_value());
  if (rank < 0) return std::nullopt;
  // "SIGNAL REASON", as text: it is sent once in the life of a job.
  const std::string text = comm::text_of(fabric, own ? cat(own->signal, " ", own->reason) : "", rank);
  const size_t space = text.find(' ');
  return Notice{std::stoi(text.substr(0, space)), cat(text.substr(space + 1), " (rank ", rank, ")")};
}

bool asks_for_host(const mesh::World& world) {
  return world.host_ranks(world.rank()).front() == world.rank();  // ranks may have met anew since the launcher spoke
}

}  // namespace tesserae::preemption
