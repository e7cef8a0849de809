#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tesserae/comm/fabric.h"

namespace tesserae::comm {

// What the ranks of a fabric tell each other outside the training traffic. Each call is collective over the fabric, on
// the control lane, from the training thread; errors are those of Group's verbs.

/// What each rank passes, by rank.
std::vector<double> from_all_ranks(Fabric& fabric, double value, const Label& label = {});

/// Each value summed over all ranks; all pass the same number of values.
std::vector<double> sums_over_ranks(Fabric& fabric, const std::vector<double>& values, const Label& label = {});
std::vector<int64_t> counts_over_ranks(Fabric& fabric, const std::vector<int64_t>& values, const Label& label = {});
double sum_over_ranks(Fabric& fabric, double value, const Label& label = {});
/// The largest of each value.
std::vector<int64_t> largest_over_ranks(Fabric& fabric, const std::vector<int64_t>& values, const Label& label = {});

/// The largest value of all ranks; NaN if one is.
double max_over_ranks(Fabric& fabric, double value, const Label& label = {});

/// The lowest rank on which `flag` is set; -1: on none.
int lowest_rank_with(Fabric& fabric, bool flag);

/// `text` of rank `root`, on every rank.
std::string text_of(Fabric& fabric, const std::string& text, int root);

}  // namespace tesserae::comm
