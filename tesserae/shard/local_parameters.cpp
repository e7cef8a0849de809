#include "tesserae/shard/local_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "tesserae/base/error.h"

namespace tesserae::shard {
namespace {

at::Tensor elements_of(const at::Tensor& tensor, const mesh::Range& range) {
  return tensor.narrow(0, range.begin, range.size());
}

/// Whether `shown`, of any shape, is the memory of these elements of `local`. The user may have given it other memory,
/// as by `.data = ...` or `.grad.data = ...`.
bool lies_at(const at::Tensor& shown, const at::Tensor& local, const mesh::Range& range) {
  const auto* base = static_cast<const char*>(local.const_data_ptr());
  return range.empty() || shown.const_data_ptr() == base + range.begin * static_cast<int64_t>(local.element_size());
}

}  // namespace

LocalParameters::LocalParameters(const Flat& flat, FlatParameter& values, FlatGradient* gradients,
                                 const UserTensors& parameters)
    : flat_(flat), values_(values), gradients_(gradients) {
  const mesh::Range mine = values.local_range();
  if (parameters.size() == 1 && flat.slots().size() != 1) {
    entries_.push_back({parameters[0], {0, mine.size()}});
    return;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Slot& slot = flat.slots()[i];
    const int64_t begin = std::clamp(slot.begin, mine.begin, mine.end) - mine.begin;
    const int64_t end = std::clamp(slot.end(), mine.begin, mine.end) - mine.begin;
    const bool whole = parameters[i]->keeps_shape() && flat.layout().degrees().optimizer == 1;
    entries_.push_back({parameters[i], {begin, end}, whole || flat.cut_by() == CutBy::rows ? &slot : nullptr});
  }
}

at::Tensor LocalParameters::part_of(const at::Tensor& local, const Entry& entry) {
  const at::Tensor part = elements_of(local, entry.range);
  return entry.shape != nullptr ? entry.shape->shaped(part) : part;
}

at::Tensor LocalParameters::elements_in(const at::Tensor& users, const Entry& entry) {
  return entry.shape != nullptr ? entry.shape->flattened(users) : users.reshape({-1});
}

void LocalParameters::show_values() {
  const at::NoGradGuard no_grad;
  for (const auto& entry : entries_) entry.parameter->show(part_of(values_.local(), entry));
}

void LocalParameters::take_values() {
  const at::NoGradGuard no_grad;
  const at::Tensor& local = values_.local();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const at::Tensor parameter = entry.parameter->values();
    if (parameter.is_meta()) {
      throw InvalidArgument("FSDP",
                            cat("parameter ", flat_.slots()[i].names.front(),
                                " is on the meta device and has no values: give the model memory and values "
                                "(to_empty, then its initialisation or load_state_dict) before its first step"));
    }
    const bool same_size = parameter.numel() == entry.range.size() && parameter.scalar_type() == local.scalar_type();
    if (!same_size) {
      const bool by_rows = flat_.cut_by() == CutBy::rows;
      throw InvalidArgument(
          by_rows ? "fully_shard" : "FSDP",
          cat("parameter ", flat_.slots()[i].names.front(), " has ", parameter.numel(), " elements of ",
              c10::toString(parameter.scalar_type()), " and was sharded with ", entry.range.size(), " elements of ",
              c10::toString(local.scalar_type()), " on this rank: its data were replaced behind the engine. ",
              by_rows ? "Change sizes and dtypes (half(), to(dtype)) before the first forward"
                      : "Change whole parameters inside summon_full_params, their size or dtype before FSDP"));
    }
    if (lies_at(parameter, local, entry.range)) continue;
    elements_of(local, entry.range).copy_(elements_in(parameter.detach(), entry));
    entry.parameter->show(part_of(local, entry));
  }
}

void LocalParameters::show_requires_grad(const std::vector<at::Tensor>& tensors, bool freezes) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool wanted = entries_[entries_.size() == 1 ? 0 : i].parameter->requires_grad();
    if (tensors[i].requires_grad() != wanted && (wanted || freezes)) tensors[i].requires_grad_(wanted);
  }
}

bool LocalParameters::has_gradient(const Entry& entry) const {
  return !entry.range.empty() || flat_.cut_by() == CutBy::rows;
}

bool LocalParameters::any_gradient() const {
  return std::ranges::any_of(
      entries_, [this](const Entry& entry) { return has_gradient(entry) && entry.parameter->gradient().defined(); });
}

void LocalParameters::take_gradients(Shard& shard) {
  hidden_ = false;  // of a backward that threw
  if (!any_gradient()) {
    shard.grad = at::Tensor();
    let_go_of_kept();
    return;
  }
  const at::NoGradGuard no_grad;
  if (!shard.grad.defined()) shard.grad = gradients_->memory().zero_();
  for (Entry& entry : entries_) {
    const at::Tensor theirs = entry.parameter->gradient();
    entry.none = has_gradient(entry) && !theirs.defined();
    if (entry.range.empty()) continue;
    const at::Tensor mine = elements_of(shard.grad, entry.range);
    if (!theirs.defined()) {
      mine.zero_();
    } else if (!lies_at(theirs, shard.grad, entry.range)) {
      mine.copy_(elements_in(theirs, entry));
    }
  }
}

/// A `.grad` that the user has put aside stays as it is: the next backward gets other memory.
void LocalParameters::let_go_of_kept() {
  if (gradients_ == nullptr || !shown_.defined()) return;
  const auto views = static_cast<size_t>(std::ranges::count_if(views_, &at::Tensor::defined));
  const bool kept = std::ranges::any_of(views_, [](const at::Tensor& view) { return view.use_count() > 1; });
  if (!kept && !gradients_->is_shared_beyond(views)) return;
  gradients_->part_with();
  shown_ = at::Tensor();
  views_.clear();
}

void LocalParameters::hide_gradients() {
  for (const auto& entry : entries_) entry.parameter->show_gradient({});
  hidden_ = true;
}

void LocalParameters::expect_reduction() {
  for (Entry& entry : entries_) entry.none = false;
}

/// What autograd gave the tensors themselves since hide_gradients().
void LocalParameters::add_given(Shard& shard) {
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    const at::Tensor given = entry.range.empty() ? at::Tensor() : entry.parameter->gradient();
    if (!given.defined()) continue;
    entry.none = false;
    if (!shard.grad.defined()) shard.grad = gradients_->memory().zero_();
    elements_of(shard.grad, entry.range).add_(elements_in(given, entry));
  }
}

void LocalParameters::show_gradients(Shard& shard) {
  if (std::exchange(hidden_, false)) add_given(shard);
  if (views_.empty() || !shown_.is_same(shard.grad)) {  // undefined is the same as undefined: an unused unit
    shown_ = shard.grad;
    views_.clear();
    for (const auto& entry : entries_) {
      views_.push_back(shown_.defined() && has_gradient(entry) ? part_of(shown_, entry) : at::Tensor());
    }
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    UserTensor& parameter = *entries_[i].parameter;
    at::Tensor& view = views_[i];
    if (view.defined() && !lies_at(view, shown_, entries_[i].range)) view = part_of(shown_, entries_[i]);
    parameter.show_gradient(parameter.requires_grad() && !entries_[i].none ? view : at::Tensor());
  }
}

at::Tensor LocalParameters::join(const std::vector<at::Tensor>& slices, c10::ScalarType dtype) const {
  if (slices.size() != entries_.size()) {
    throw InvalidArgument("LocalParameters::join", cat(slices.size(), " slices for ", entries_.size(),
                                                       " parameters of unit \"", flat_.unit(), "\""));
  }
  at::Tensor local = at::zeros({values_.local_range().size()}, values_.local().options().dtype(dtype));
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto& range = entries_[i].range;
    if (!slices[i].defined() || range.empty()) continue;
    if (slices[i].numel() != range.size()) {
      throw InvalidArgument("LocalParameters::join",
                            cat("a tensor of ", slices[i].numel(), " elements for parameter ", i, " of unit \"",
                                flat_.unit(), "\", of which this rank has ", range.size(), " elements"));
    }
    elements_of(local, range).copy_(elements_in(slices[i], entries_[i]));
  }
  return local;
}

std::vector<at::Tensor> LocalParameters::split(const at::Tensor& local) const {
  std::vector<at::Tensor> slices;
  for (const auto& entry : entries_) slices.push_back(part_of(local, entry));
  return slices;
}

}  // namespace tesserae::shard
