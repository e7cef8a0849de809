#pragma once

#include <string>

#include "tesserae/comm/fabric.h"
#include "tesserae/shard/options.h"

namespace tesserae::shard {

/// Throws comm::Mismatch on every rank unless all ranks pass the same text (lines). A rank whose text differs from rank
/// 0's names the first line that does; the others name such a rank. Collective over the job.
void require_agreement(comm::Fabric& fabric, const std::string& text);

/// What tensor-parallel ranks bring, reduced: the ranks of one fabric agree among themselves, those of other tensor
/// indices hear of it here. `tensor_group`: Options::tensor_group, may be null. Collective over it.
double over_tensor_ranks(comm::Group* tensor_group, double value, comm::Reduction how, c10::Device device,
                         comm::Label label = {});
bool on_any_tensor_rank(comm::Group* tensor_group, bool flag, c10::Device device);

/// A line about how numbers travel between hosts, for require_agreement; nothing where they travel as they are.
std::string wires_of(const Options& options);

}  // namespace tesserae::shard
