#pragma once

#include <string>
#include <vector>

#include "tesserae/comm/mesh_fabric.h"
#include "tesserae/shard/options.h"

namespace tesserae::shard {

/// Throws comm::Mismatch on every rank unless all ranks pass the same text (lines). A rank whose text differs from rank
/// 0's names the first line that does; the others name such a rank. Collective over the job.
void require_agreement(comm::Fabric& fabric, const std::string& text);

/// What the ranks of a tensor group bring, reduced: the ranks of one fabric agree among themselves, those of other
/// tensor indices hear of it here. Collective over the tensor group.
double over_tensor_ranks(comm::MeshFabric& mesh, double value, comm::Reduction how, comm::Label label = {});
void over_tensor_ranks(comm::MeshFabric& mesh, std::vector<double>& values, comm::Reduction how,
                       comm::Label label = {});
bool on_any_tensor_rank(comm::MeshFabric& mesh, bool flag);

/// What of the options changes numbers, or who calls what: a line each, for require_agreement. Without the degrees,
/// which change.
std::string text_of(const Options& options);

/// A line about how numbers travel between hosts, for require_agreement; nothing where they travel as they are.
std::string wires_of(const Options& options);

}  // namespace tesserae::shard
