#include "tesserae/shard/flat_gradient.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "tesserae/comm/several.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/memory.h"
#include "tesserae/shard/step_observer.h"
#include "tesserae/shard/user_collectives.h"

namespace tesserae::shard {
namespace {

// A sum over N ranks in fp16 overflows early, and dividing by N first underflows: meet in the middle with a power of
// two.
double fp16_prescale(int ranks) {
  return std::exp2(-std::ceil(std::log2(static_cast<double>(ranks)) / 2));
}

}  // namespace

FlatGradient::FlatGradient(const UnitContext& context, const Flat& flat, Shard& shard)
    : context_(context),
      sharding_(context.sharding),
      flat_(flat),
      shard_(shard),
      prescale_(flat.dtypes().reduce == at::kHalf ? fp16_prescale(context.sharding->ranks) : 1),
      filled_(flat.slots().size(), false),
      fired_(flat.slots().size(), false),
      given_(flat.slots().size()),
      missing_(static_cast<int>(flat.slots().size())) {
  update_average_factor();
}

void FlatGradient::update_average_factor() {
  const double divisor = context_.gradient_divisor > 0 ? context_.gradient_divisor : sharding_->ranks;
  average_factor_ = at::scalar_tensor(1.0 / (divisor * prescale_), at::kDouble);
}

void FlatGradient::expect_all() {
  std::fill(fired_.begin(), fired_.end(), false);
  std::fill(given_.begin(), given_.end(), std::nullopt);
  missing_ = static_cast<int>(fired_.size());
}

void FlatGradient::take_buffer() {
  buffer_ = context_.pool().acquire(buffer_bytes(), this);
  if (buffer_ == viewed_) return;
  viewed_ = buffer_;
  auto views = std::make_shared<Views>();
  const auto range = flat_.gradient_range(), chunk = flat_.chunk_range();
  views->whole = context_.pool().view(buffer_, flat_.total(), flat_.dtypes().reduce);
  views->piece = views->whole.narrow(0, range.begin, range.size());
  views->chunk = views->whole.narrow(0, chunk.begin, chunk.size());
  for (const auto& slot : flat_.slots()) {
    views->slots.push_back(slot.shaped(views->whole.narrow(0, slot.begin, slot.elements)));
  }
  for (const auto& gap : flat_.gaps()) views->gaps.push_back(views->whole.narrow(0, gap.begin, gap.size()));
  views_ = std::move(views);
}

at::Tensor FlatGradient::destination(int slot) {
  if (filled_[slot] || given_[slot]) return {};
  if (buffer_ < 0) take_buffer();
  // A tensor of its own, with no other reference to it: AccumulateGrad takes over such, and copies what others hold.
  at::Tensor destination = views_->slots[slot].detach();
  given_[slot] = WeakTensor(destination.getIntrusivePtr());
  return destination;
}

// A gradient that was written to its slot is on its way here. If another of the slot is earlier (its backward runs
// inside of the other's), that one moves out.
void FlatGradient::evict(int slot) {
  if (!given_[slot]) return;
  const at::Tensor other(given_[slot]->lock());
  if (other.defined()) other.set_data(other.clone());
}

/// Without the prescaling, which is of the reduce dtype.
void FlatGradient::add_up(int slot, const at::Tensor& gradient) {
  if (!sum_.defined()) {
    sum_ = at::zeros({flat_.total()}, at::TensorOptions().dtype(flat_.dtypes().compute).device(sharding_->device));
    ++context_.statistics().allocations;
  }
  const Slot& of = flat_.slots()[static_cast<size_t>(slot)];
  of.shaped(sum_.narrow(0, of.begin, of.elements)).add_(gradient);
}

void FlatGradient::round_sum() {
  if (prescale_ != 1) sum_.mul_(prescale_);
  views_->whole.copy_(sum_);
  sum_ = at::Tensor();
}

void FlatGradient::add(int slot, const at::Tensor& gradient, bool waits) {
  const bool narrower = c10::elementSize(flat_.dtypes().reduce) < c10::elementSize(flat_.dtypes().compute);
  if (sum_.defined() || (waits && narrower && buffer_ < 0)) {
    add_up(slot, gradient);
    fire(slot);
    return;
  }
  if (buffer_ < 0) take_buffer();
  const at::Tensor& view = views_->slots[slot];
  if (!filled_[slot]) {
    if (gradient.data_ptr() == view.data_ptr()) {
      ++context_.statistics().gradients_in_place;
    } else {
      evict(slot);
      view.copy_(gradient);
    }
    if (prescale_ != 1) view.mul_(prescale_);
    filled_[slot] = true;
  } else {
    view.add_(gradient, prescale_);
  }
  fire(slot);
}

void FlatGradient::fire(int slot) {
  if (fired_[slot]) return;
  fired_[slot] = true;
  --missing_;
}

void FlatGradient::zero_missing() {
  for (size_t i = 0; i < filled_.size(); ++i) {
    if (!filled_[i]) views_->slots[i].zero_();
  }
  for (const auto& gap : views_->gaps) gap.zero_();
}

void FlatGradient::reduce(const std::vector<FlatGradient*>& all, bool boundary, bool always_whole,
                          const UnitContext& context, const comm::Label& label) {
  std::vector<Job> jobs;
  for (FlatGradient* gradient : all) jobs.push_back(gradient->begin_reduction(boundary, always_whole));
  if (jobs.empty()) return;
  const auto ticket = context.sharding->reduce_lane.submit(
      [jobs = std::move(jobs), boundary, label, sharding = context.sharding, reducer = context.reducer,
       adjuster = context.adjuster, scatterer = context.scatterer] {
        if (reducer == nullptr) {
          carry(jobs, boundary, *sharding, label, adjuster.get(), scatterer.get());
        } else {
          for (const Job& job : jobs) job.of->carry_elsewhere(job, *reducer);
        }
      });
  for (FlatGradient* gradient : all) gradient->ticket_ = ticket;
}

FlatGradient::Job FlatGradient::begin_reduction(bool boundary, bool always_whole) {
  finish();
  const bool fresh = always_whole || buffer_ >= 0 || sum_.defined() || !piece_pending_;
  if (buffer_ < 0) take_buffer();
  if (sum_.defined()) {
    round_sum();
  } else if (fresh) {
    zero_missing();
  }
  Job job{this, fresh, piece_pending_, false, false, views_};
  if (!boundary && !piece_.defined()) {
    piece_ = at::empty({flat_.gradient_piece()}, views_->whole.options());
    ++context_.statistics().allocations;
  }
  if (boundary) memory();
  job.add_grad = shard_.grad.defined();
  job.straight = fresh && boundary && !job.add_piece && !job.add_grad && first_hop_delivers();

  ++context_.statistics().reductions;
  in_flight_ = buffer_;
  buffer_ = -1;
  std::fill(filled_.begin(), filled_.end(), false);
  expect_all();
  piece_pending_ = !boundary;
  if (boundary) shard_.grad = grad_;
  return job;
}

void FlatGradient::carry(const std::vector<Job>& jobs, bool boundary, const Sharding& sharding,
                         const comm::Label& label, StepObserver* adjuster, UserCollective* scatterer) {
  const comm::Wire wire = sharding.options.gradient_wire;
  std::vector<comm::ReduceScatter> first, second;
  std::vector<at::Tensor> third;
  for (const Job& job : jobs) {
    if (!job.fresh) continue;
    first.push_back({job.views->whole});
    if (job.straight) first.back() = {job.views->whole, job.of->grad_, job.of->average_factor_.item<double>()};
  }
  const auto reduce_scatter = [&](comm::Group& group, const std::vector<comm::ReduceScatter>& all) {
    if (scatterer == nullptr || group.size() == 1 || all.empty()) {
      comm::reduce_scatter(group, all, label, wire);
      return true;
    }
    std::vector<at::Tensor> buffers;
    for (const auto& each : all) buffers.push_back(each.buffer);
    return run_users(*scatterer, buffers, group, jobs);
  };
  if (!reduce_scatter(sharding.gradient_group, first)) return;
  for (const Job& job : jobs) {
    const at::Tensor &piece = job.views->piece, &kept = job.of->piece_;
    if (!boundary) {
      job.add_piece ? kept.add_(piece) : kept.copy_(piece);
      continue;
    }
    if (job.straight) continue;
    if (!job.fresh) piece.copy_(kept);
    if (job.fresh && job.add_piece) piece.add_(kept);
    second.push_back({piece});
    third.push_back(job.views->chunk);
  }
  // The user's own is for one hop: the first that leaves this rank.
  if (sharding.gradient_group.size() > 1) scatterer = nullptr;
  if (!reduce_scatter(sharding.optimizer_group, second)) return;
  comm::all_reduce(sharding.replica_group, third, label, wire);
  for (const Job& job : jobs) {
    if (!boundary || job.straight) continue;
    if (adjuster != nullptr) {
      job.of->deliver_adjusted(job.views->chunk, job.add_grad, *adjuster);
    } else {
      job.of->deliver(job.views->chunk, job.add_grad, /*divided=*/false);
    }
  }
}

// What the user's code throws is this step's error, not the lane's: a CommError is, for good. False: it threw.
template <class Body>
bool FlatGradient::keep_failure(const Body& body) {
  try {
    body();
    return true;
  } catch (const comm::CommError&) {
    throw;
  } catch (...) {
    failure_ = std::current_exception();
    return false;
  }
}

// False: it threw, and nothing of `jobs` was delivered.
bool FlatGradient::run_users(UserCollective& scatterer, const std::vector<at::Tensor>& buffers,
                             const comm::Group& group, const std::vector<Job>& jobs) {
  FlatGradient& first = *jobs.front().of;
  if (first.keep_failure([&] { scatterer.run(buffers, group.rank(), group.size()); })) return true;
  for (const Job& job : jobs) job.of->failure_ = first.failure_;
  return false;
}

void FlatGradient::carry_elsewhere(const Job& job, StepObserver& reducer) {
  at::Tensor chunk;
  if (keep_failure([&] { chunk = reduce_elsewhere(*job.views, reducer); })) {
    deliver(chunk, job.add_grad, /*divided=*/true);
  }
}

void FlatGradient::deliver_adjusted(const at::Tensor& sum, bool add, StepObserver& adjuster) {
  sum.mul_(average_factor_);
  const at::Tensor shown = sum.detach();
  if (keep_failure([&] { adjuster.adjust(shown); })) deliver(shown, add, /*divided=*/true);
}

bool FlatGradient::first_hop_delivers() const {
  return context_.reducer == nullptr && context_.adjuster == nullptr && context_.scatterer == nullptr &&
         sharding_->optimizer_group.size() == 1 && sharding_->replica_group.size() == 1 &&
         grad_.scalar_type() == flat_.dtypes().reduce && grad_.device() == sharding_->device &&
         !offload::is_paged(grad_);
}

const at::Tensor& FlatGradient::memory() {
  if (!grad_.defined()) {
    grad_ = sharding_->allocate(flat_.chunk(), flat_.dtypes().master, sharding_->options.tiers.gradients);
    ++context_.statistics().allocations;
  }
  return grad_;
}

// A reducer sums and averages by itself, from the gradients as they are. It may give its tensors other data (torch's
// hooks for bf16 do): they are its own, and the views that stay are not.
at::Tensor FlatGradient::reduce_elsewhere(const Views& views, StepObserver& reducer) {
  if (prescale_ != 1) views.whole.div_(prescale_);
  const at::Tensor whole = views.whole.detach();
  if (flat_.layout().degrees().optimizer == 1) {
    reducer.reduce(whole, at::Tensor());
    return whole;
  }
  at::Tensor chunk = at::empty_like(views.chunk);
  reducer.reduce(whole, chunk);
  return chunk;
}

// `chunk`: summed over all ranks; `divided`: averaged already.
void FlatGradient::deliver(const at::Tensor& chunk, bool add, bool divided) {
  if (chunk.device() != grad_.device() && !offload::is_paged(grad_)) return deliver_to_host(chunk, add, divided);
  const auto access = add ? offload::Access::update : offload::Access::fill;
  offload::in_runs({{grad_, access}}, grad_.numel(), [&](int64_t begin, int64_t end) {
    at::Tensor to = offload::part(grad_, begin, end);
    const at::Tensor from = offload::part(chunk, begin, end);
    if (add) {
      to.add_(from.to(to.device()), divided ? 1.0 : average_factor_.item<double>());
    } else if (!divided && to.scalar_type() == from.scalar_type() && to.device() == from.device()) {
      at::mul_out(to, from, average_factor_);
    } else {
      const bool narrows = from.element_size() > to.element_size();  // a sum may be beyond what an average is not
      if (!divided && narrows) from.mul_(average_factor_);
      to.copy_(from);
      if (!divided && !narrows) to.mul_(average_factor_);
    }
  });
}

// The device does the sums, on the lane's stream: what the host gets is final, and nobody waits here. Who lets the host
// read it waits once for all (Engine::finish_reading).
void FlatGradient::deliver_to_host(const at::Tensor& chunk, bool add, bool divided) {
  const bool narrows = chunk.element_size() > grad_.element_size();
  if (!divided && narrows) chunk.mul_(average_factor_);  // a sum may be beyond what an average is not
  at::Tensor value = chunk.to(grad_.scalar_type());
  const bool done = divided || narrows;
  if (add) {
    at::Tensor sum = at::empty(grad_.sizes(), grad_.options().device(chunk.device()));
    queue_copy(sum, grad_);
    value = sum.add_(value, done ? 1.0 : average_factor_.item<double>());
  } else if (!done) {
    value = at::mul(value, average_factor_);
  }
  queue_copy(grad_, value);
}

void FlatGradient::finish() {
  if (in_flight_ < 0) return;
  context_.workspace->exposed_reduce.wait(ticket_);
  ticket_ = {};
  context_.pool().release(in_flight_);
  in_flight_ = -1;
  if (failure_ != nullptr) {
    shard_.grad = at::Tensor();  // nothing was delivered
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void FlatGradient::discard() {
  if (in_flight_ >= 0) {
    sharding_->reduce_lane.drain();
    context_.pool().release(in_flight_);
    in_flight_ = -1;
    ticket_ = {};
    failure_ = nullptr;
  }
  if (buffer_ >= 0) {
    context_.pool().release(buffer_);
    buffer_ = -1;
  }
  sum_ = at::Tensor();
  std::fill(filled_.begin(), filled_.end(), false);
  expect_all();
  piece_pending_ = false;
}

void FlatGradient::give_back() {
  if (context_.pool().elastic()) part_with();
}

void FlatGradient::part_with() {
  if (!offload::is_paged(grad_)) grad_ = at::Tensor();
}

bool FlatGradient::is_shared_beyond(size_t views) const {
  return grad_.defined() && !offload::is_paged(grad_) && grad_.storage().use_count() > 1 + views;
}

void FlatGradient::zero() {
  discard();
  shard_.grad = at::Tensor();
}

int64_t FlatGradient::state_bytes() const {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.numel() * tensor.element_size() : 0;
  };
  return bytes(grad_) + bytes(piece_) + bytes(sum_);
}

}  // namespace tesserae::shard
