#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/shard/engine.h"
#include "tesserae/shard/lifetime.h"
#include "tesserae/shard/sharded_unit.h"
#include "tesserae/shard/user_collectives.h"

// What can be set of a unit between its steps.

namespace tesserae::shard {

namespace {

// What a lifetime becomes: that of the strategy where that changes, else what the script has made of it.
bool lifetime_after(bool freed, const Options& before, const Options& now, bool mesh::Strategy::*lifetime) {
  const bool same = before.strategy.*lifetime == now.strategy.*lifetime && on_disk(before) == on_disk(now);
  return same ? freed : frees(now, lifetime);
}

}  // namespace

bool ShardedUnit::would_free_after_forward(const Sharding& next) const {
  return lifetime_after(frees_after_forward_, sharding().options, next.options, &mesh::Strategy::free_after_forward);
}

void ShardedUnit::set_sharding(std::shared_ptr<const Sharding> sharding) {
  const Options &before = this->sharding().options, &now = sharding->options;
  frees_after_forward_ = would_free_after_forward(*sharding);
  frees_after_backward_ = lifetime_after(frees_after_backward_, before, now, &mesh::Strategy::free_after_backward);
  context_.sharding = std::move(sharding);
  set_rest_ranks(rest_ranks_);
}

void ShardedUnit::set_rest_ranks(int ranks) {
  rest_ranks_ = ranks;
  rest_group_ = nullptr;
  const comm::Group& all = sharding().parameter_group;
  const int some = std::gcd(ranks, all.size());
  if (ranks == 0 || some == 1 || some == all.size()) return;
  // By rank in the fabric: the group's members are ranks of the job.
  comm::Fabric& fabric = *sharding().fabric;
  const std::vector<int> members = sharding().layout.parameter_group(fabric.rank());
  const auto begin = members.begin() + all.rank() / some * some;
  rest_group_ = fabric.borrow({begin, begin + some}, comm::Traffic::gather);
}

void ShardedUnit::set_gatherer(std::shared_ptr<UserCollective> gatherer) {
  const auto shared = [](const auto& buffer) { return buffer->parameter().shared(); };
  if (gatherer != nullptr && std::ranges::any_of(buffers_, shared)) {
    throw InvalidArgument("set_custom_all_gather",
                          cat("unit \"", name_,
                              "\" has run a step already, and its ranks share the gathered "
                              "parameters in memory: nothing travels. Call it before the first forward"));
  }
  context_.gatherer = std::move(gatherer);
}

void ShardedUnit::set_lifetimes(bool free_after_forward, bool free_after_backward) {
  frees_after_forward_ = free_after_forward;
  frees_after_backward_ = free_after_backward;
}

void ShardedUnit::set_master_dtype(c10::ScalarType dtype) {
  if (engine_->prepared() || !c10::isFloatingType(dtype)) {
    throw InvalidArgument(
        "ShardedUnit::set_master_dtype",
        cat(c10::toString(dtype), " for unit \"", name_, "\"",
            engine_->prepared() ? ", which has run a step already: change dtypes before the first forward"
                                : ": masters are floating-point numbers"));
  }
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers_) {
    if (buffer->shard() == nullptr || buffer->flat().dtypes().master == dtype) continue;
    buffer->set_master_dtype(dtype);
    ++context_.statistics().allocations;
    tell([&](StepObserver& observer) { observer.after_cast(*buffer); });
  }
}

void ShardedUnit::set_gradient_divisor(double divisor) {
  if (!(divisor > 0)) {
    throw InvalidArgument("ShardedUnit::set_gradient_divisor",
                          cat(divisor, " for unit \"", name_, "\": it must be above 0"));
  }
  context_.gradient_divisor = divisor;
  for (const auto& buffer : buffers_) {
    if (buffer->gradient() != nullptr) buffer->gradient()->update_average_factor();
  }
}

void ShardedUnit::set_keeps_pieces(bool keeps) {
  if (keeps && context_.reducer != nullptr) {
    throw InvalidArgument("ShardedUnit::set_keeps_pieces",
                          cat("unit \"", name_,
                              "\" has a hook in place of its reduction, which starts from whole "
                              "gradients; detach it first"));
  }
  keeps_pieces_ = keeps;
}

void ShardedUnit::attach(std::shared_ptr<StepObserver> observer) {
  if (observer->reduces()) {
    if (context_.reducer != nullptr) {
      throw InvalidArgument("ShardedUnit::attach",
                            cat("unit \"", name_, "\" has a hook in place of its reduction already; detach it first"));
    }
    if (!allows_reducer(sharding().layout)) {
      throw InvalidArgument("ShardedUnit::attach", cat("a hook in place of the reduction of unit \"", name_, "\" with ",
                                                       to_string(sharding().layout.degrees()),
                                                       ": all three degrees must be 1 or ", sharding().layout.ranks()));
    }
    if (keeps_pieces()) {
      throw InvalidArgument(
          "ShardedUnit::attach",
          cat("a hook in place of the reduction of unit \"", name_,
              "\", which reduces over G before it (Accumulation::two_hop, or set_keeps_pieces()): use "
              "local, and whole gradients"));
    }
    context_.reducer = observer;
  }
  if (observer->adjusts()) {
    if (context_.adjuster != nullptr) {
      throw InvalidArgument("ShardedUnit::attach",
                            cat("unit \"", name_, "\" has a hook on its averages already; detach it first"));
    }
    context_.adjuster = observer;
  }
  observers_.push_back(std::move(observer));
}

void ShardedUnit::detach(const StepObserver& observer) {
  if (context_.reducer.get() == &observer) context_.reducer = nullptr;
  if (context_.adjuster.get() == &observer) context_.adjuster = nullptr;
  std::erase_if(observers_, [&observer](const auto& attached) { return attached.get() == &observer; });
}

}  // namespace tesserae::shard
