#include "tesserae/cost/fabric_facts.h"

#include <algorithm>

#include "tesserae/comm/agree.h"
#include "tesserae/comm/transports/two_level_group.h"

namespace tesserae::cost {

Facts facts_of(const comm::Fabric& fabric) {
  Facts facts;
  for (int rank = 0; rank < fabric.size(); ++rank) facts.host_of.push_back(fabric.world().host(rank));
  facts.ranks_share_place = fabric.device().is_cpu();
  return facts;
}

int tensor_ranks_of_host(const comm::MeshFabric& mesh) {
  const mesh::World& world = mesh.job()->world();
  const std::vector<int> first = mesh.mesh().members(mesh::axes::tensor, 0);
  return static_cast<int>(std::ranges::count_if(first, [&](int rank) { return world.host(rank) == world.host(0); }));
}

bool ranks_can_share(comm::Fabric& fabric) {
  if (fabric.size() == 1 || !fabric.device().is_cpu()) return false;
  const std::vector<int> neighbours = fabric.world().host_ranks(fabric.rank());
  comm::Group& group =
      fabric.world().hosts() == 1 ? fabric.everyone() : fabric.group(neighbours, comm::Traffic::control);
  const bool can = neighbours.size() == 1 || group.share(128).defined();  // alone on its host: nobody to share with
  return comm::max_over_ranks(fabric, can ? 0 : 1) == 0;
}

bool goes_in_two_levels(const Facts& facts) {
  return facts.shared_copy && comm::has_two_levels(comm::members_by_host(facts.host_of));
}

}  // namespace tesserae::cost
