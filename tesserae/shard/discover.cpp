#include "tesserae/shard/discover.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "tesserae/base/error.h"
#include "tesserae/shard/unit.h"
#include "tesserae/tensor/split_parameters.h"

namespace tesserae::shard {
namespace {

struct Found : NamedParameter {
  int owner;
};

class Walk {
 public:
  std::vector<UnitSpec> units;
  std::vector<Found> parameters;

  void visit(torch::nn::Module& module, const std::string& path, int unit) {
    if (auto* base = dynamic_cast<UnitBase*>(&module)) {
      units.push_back({path, unit, base, {}});
      unit = static_cast<int>(units.size()) - 1;
    }
    const std::string prefix = path.empty() ? "" : path + ".";
    std::vector<tensor::SplitParameter> splits;
    if (const auto* split = dynamic_cast<const tensor::SplitParameters*>(&module)) splits = split->split_parameters();
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto found = std::ranges::find(splits, item.key(), &tensor::SplitParameter::name);
      const bool is_split = found != splits.end() && !found->split.whole();
      add({{prefix + item.key()},
           item.value(),
           is_split ? found->split : mesh::Splits{},
           is_split ? found->whole : std::vector<int64_t>{}},
          unit);
    }
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key(), unit);
  }

 private:
  void add(NamedParameter named, int unit) {
    if (!named.parameter.defined()) return;
    const auto [entry, fresh] = seen_.try_emplace(named.parameter.unsafeGetTensorImpl(), parameters.size());
    if (fresh) {
      parameters.push_back({std::move(named), unit});
      return;
    }
    Found& found = parameters[entry->second];
    found.names.push_back(named.names.front());
    if (found.split != named.split || found.whole != named.whole) {
      throw InvalidArgument("shard_model", cat("the tied parameters ", found.names.front(), " and ",
                                               named.names.front(), " are split in different ways"));
    }
    found.owner = common_ancestor(found.owner, unit);
  }

  int common_ancestor(int a, int b) const {
    // Parents have smaller indices than their children, so the larger of two different indices is never an ancestor.
    while (a != b) (a > b ? a : b) = units[std::max(a, b)].parent;
    return a;
  }

  std::unordered_map<const c10::TensorImpl*, size_t> seen_;
};

}  // namespace

namespace {

FlatSpec by_rows(const FlatSpec& all, size_t index) {
  const Slot& slot = all.slots[index];
  if (slot.shape.empty()) {
    throw InvalidArgument("shard_model",
                          cat("parameter ", slot.names.front(),
                              " has no dimension whose rows could be shared out: give it the shape [1]"));
  }
  FlatSpec flat{{slot}, {all.parameters[index]}, {}, all.dtype, all.trainable, CutBy::rows};
  if (all.local[index].defined()) flat.local = {all.local[index]};
  return flat;
}

}  // namespace

std::vector<FlatSpec> group_parameters(const std::vector<NamedParameter>& parameters, CutBy cut_by) {
  using Key = std::pair<bool, c10::ScalarType>;  // (frozen, dtype)
  std::map<Key, std::vector<const NamedParameter*>> groups;
  for (const auto& named : parameters) {
    groups[{!named.parameter.requires_grad(), named.parameter.scalar_type()}].push_back(&named);
  }
  std::vector<FlatSpec> flats;
  for (auto& [key, members] : groups) {
    std::stable_partition(members.begin(), members.end(),
                          [](const NamedParameter* named) { return named->parameter.dim() >= 2; });
    FlatSpec flat{{}, {}, {}, key.second, !key.first};
    for (const NamedParameter* named : members) {
      flat.slots.push_back(
          {named->names, named->parameter.sizes().vec(), 0, 0, named->split, named->whole, named->dim});
      flat.parameters.push_back(named->parameter);
      if (cut_by == CutBy::rows) flat.local.push_back(named->local);
    }
    if (cut_by == CutBy::elements) {
      flats.push_back(std::move(flat));
    } else {
      for (size_t i = 0; i < flat.slots.size(); ++i) flats.push_back(by_rows(flat, i));
    }
  }
  return flats;
}

std::vector<UnitSpec> discover_units(torch::nn::Module& root, CutBy cut_by) {
  if (dynamic_cast<UnitBase*>(&root) == nullptr) {
    throw InvalidArgument("shard_model",
                          cat("the root module ", root.name(), " is not a Unit, so nothing would gather the ",
                              "parameters outside inner units; make it a Unit<...>"));
  }
  Walk walk;
  walk.visit(root, "", -1);
  if (walk.parameters.empty()) {
    throw InvalidArgument("shard_model", cat("the model ", root.name(), " has no parameters"));
  }

  std::vector<std::vector<NamedParameter>> owned(walk.units.size());
  for (const auto& found : walk.parameters) owned[found.owner].push_back(found);
  for (size_t unit = 0; unit < walk.units.size(); ++unit) {
    walk.units[unit].flats = group_parameters(owned[unit], cut_by);
  }
  return std::move(walk.units);
}

mesh::AxisSet state_axes(const UnitSpec& unit) {
  const Slot* first = nullptr;
  for (const auto& flat : unit.flats) {
    for (const auto& slot : flat.slots) {
      if (first == nullptr) first = &slot;
      const mesh::AxisSet axes = mesh::state_axes(slot.split), others = mesh::state_axes(first->split);
      if (axes == others) continue;
      throw InvalidArgument("shard_model",
                            cat("unit \"", unit.name, "\" has ", first->names.front(), ", whose state is sharded over ",
                                to_string(others), ", and ", slot.names.front(), ", whose is over ", to_string(axes),
                                ": make what is split over experts a unit of its own"));
    }
  }
  return first == nullptr ? mesh::axes::state : mesh::state_axes(first->split);
}

std::string describe(const std::vector<UnitSpec>& units) {
  std::ostringstream out;
  for (const auto& unit : units) {
    out << "unit \"" << unit.name << "\"\n";
    for (const auto& flat : unit.flats) {
      for (const auto& slot : flat.slots) {
        out << "parameter " << slot.names.front() << " [";
        for (size_t d = 0; d < slot.shape.size(); ++d) out << (d ? ", " : "") << slot.shape[d];
        out << "] " << c10::toString(flat.dtype) << (flat.trainable ? "" : " frozen");
        for (const mesh::Split& split : {slot.split.first(), slot.split.second()}) {
          if (!split.whole()) out << " cut in " << split.parts << " over " << mesh::to_string(split.axis);
        }
        out << "\n";
      }
    }
  }
  return out.str();
}

}  // namespace tesserae::shard
