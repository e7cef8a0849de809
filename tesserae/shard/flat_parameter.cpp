#include "tesserae/shard/flat_parameter.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/StorageImpl.h>

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/several.h"
#include "tesserae/offload/paged_tensor.h"
#include "tesserae/shard/local_state.h"
#include "tesserae/shard/memory.h"
#include "tesserae/shard/user_collectives.h"

namespace tesserae::shard {
namespace {

at::Tensor narrow(const at::Tensor& flat, const mesh::Range& range) {
  return flat.narrow(0, range.begin, range.size());
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.data_ptr() == b.data_ptr();
}

// What the user's code throws is this step's error, not the lane's.
void run_users(UserCollective& collective, const std::vector<at::Tensor>& buffers, const comm::Group& group,
               std::exception_ptr& failure) {
  try {
    collective.run(buffers, group.rank(), group.size());
  } catch (const comm::CommError&) {
    throw;
  } catch (...) {
    failure = std::current_exception();
  }
}

}  // namespace

FlatParameter::FlatParameter(const UnitContext& context, const Flat& flat, ComputeStorage storage, at::Tensor master,
                             at::Tensor piece)
    : context_(context),
      sharding_(context.sharding),
      flat_(flat),
      master_(std::move(master)),
      piece_(std::move(piece)),
      resident_(piece_.defined() && flat.layout().degrees().parameters == 1 && !offload::is_paged(piece_)),
      storage_(std::move(storage)) {
  if (resident_) storage_.show(piece_);
}

namespace {

// As piece_for() makes it: the whole buffer, in memory for good.
bool would_be_resident(const Sharding& sharding, const Flat& flat) {
  if (flat.layout().degrees().parameters > 1) return false;
  const bool host = sharding.device.is_cpu();
  if (!flat.master_is_piece()) return !(host && sharding.options.tiers.parameters == offload::Tier::disk);
  const offload::Tier tier = master_tier(sharding.options.tiers, flat);
  const bool in_place = tier == offload::Tier::device || (tier == offload::Tier::host && host);
  return in_place && flat.dtypes().master == flat.dtypes().compute;
}

}  // namespace

bool FlatParameter::may_share(const UnitContext& context, const Flat& flat) const {
  const Sharding& sharding = *context.sharding;
  return !extended() && context.gatherer == nullptr && flat.layout().degrees().parameters > 1 &&
         sharding.device.is_cpu() &&
         sharding.options.tiers.parameters != offload::Tier::disk;  // it would keep all in memory
}

bool FlatParameter::would_share(const UnitContext& next, const Flat& flat) const {
  return may_share(next, flat) && next.sharding->parameter_group.can_share();
}

int64_t FlatParameter::planned_bytes(const UnitContext& next, const Flat& flat) const {
  if (extended() || would_share(next, flat) || would_be_resident(*next.sharding, flat)) return 0;
  return flat.total() * static_cast<int64_t>(c10::elementSize(flat.dtypes().compute));
}

at::Tensor FlatParameter::shared_memory(const Flat& flat) const {
  if (!may_share(context_, flat)) return {};
  const auto dtype = flat.dtypes().compute;
  at::Tensor memory;
  const auto task = [&] {
    memory = context_.sharding->parameter_group.share(flat.total() * static_cast<int64_t>(c10::elementSize(dtype)));
  };
  context_.sharding->gather_lane.submit(task).wait();
  return memory.defined() ? memory.view(dtype) : memory;
}

void FlatParameter::share(at::Tensor whole) {
  if (!whole.defined() || extended()) return;
  shared_ = true;
  show(std::move(whole));
  if (!piece_.defined() || same_memory(piece_, own_)) return;
  own_.copy_(piece_);
  // Views share the storage, so they follow it.
  const auto drop = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  piece_.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(own_.data_ptr(), new at::Tensor(own_), drop, sharding_->device));
}

void FlatParameter::extend(std::shared_ptr<GatherExtension> extension) {
  const auto& degrees = flat_.layout().degrees();
  if (degrees.parameters != 1 && degrees.parameters != degrees.optimizer) {
    throw InvalidArgument("fully_shard",
                          cat("parameter ", flat_.slots().front().names.front(),
                              " extends its all-gather, which needs rows in the order of ranks: use ",
                              "degrees that are 1 or ", degrees.optimizer, ", not ", to_string(degrees)));
  }
  storage_.hide();
  resident_ = false;
  comm::Group& group = flat_.master_is_piece() ? sharding_->parameter_group : sharding_->refresh_group;
  extended_ = std::make_unique<ExtendedGather>(std::move(extension), group, flat_);
}

void FlatParameter::rest(comm::Group& group) {
  if (!held_ || !arrived_ || shared_ || extended()) return;
  const at::Tensor part =
      whole_.narrow(0, group.rank() * (whole_.numel() / group.size()), whole_.numel() / group.size());
  rest_ = part.clone();
  rest_version_ = shown_version_;
  rest_group_ = &group;
}

void FlatParameter::show(at::Tensor whole) {
  whole_ = std::move(whole);
  own_ = narrow(whole_, flat_.parameter_range());
}

FlatParameter::~FlatParameter() {
  storage_.hide();
}

int64_t FlatParameter::buffer_bytes() const {
  return resident_ || shared_ || extended()
             ? 0
             : flat_.total() * static_cast<int64_t>(c10::elementSize(flat_.dtypes().compute));
}

int64_t FlatParameter::state_bytes() const {
  return piece_.defined() && !same_memory(piece_, master_) ? piece_.numel() * piece_.element_size() : 0;
}

void FlatParameter::cast_master() {
  const bool was_piece = same_memory(piece_, master_);
  const offload::Use use(master_, offload::Access::read);
  master_ = master_.to(flat_.dtypes().master);
  if (!was_piece || master_.scalar_type() == flat_.dtypes().compute) return;
  // From now on gathering casts: into the shared copy, or a buffer, also where the piece was the whole.
  storage_.hide();
  piece_ = at::Tensor();
  resident_ = false;
}

bool FlatParameter::begin_gather() {
  if (resident_ || (held_ && shown_version_ == version_)) return false;
  if (extended()) extended_->begin();
  if (from_rest_) gather_.wait();  // nobody has waited for it, and its task reads what changes now
  held_ = true;
  arrived_ = false;
  shown_version_ = version_;
  ++context_.statistics().gathers;
  if (extended()) return true;
  if (shared_) return met_version_ != version_;  // else the ranks have come to it already
  from_rest_ = rest_.defined() && rest_version_ == version_;
  if (!from_rest_) rest_ = at::Tensor();
  if (buffer_ < 0) {
    buffer_ = context_.pool().acquire(buffer_bytes(), this);
    if (buffer_ != viewed_) {
      viewed_ = buffer_;
      show(context_.pool().view(buffer_, flat_.total(), flat_.dtypes().compute));
    }
  }
  return true;
}

void FlatParameter::gather(const std::vector<FlatParameter*>& all, const UnitContext& context,
                           const comm::Label& label) {
  if (all.empty()) return;
  const auto failure = std::make_shared<std::exception_ptr>();
  const auto ticket = context.sharding->gather_lane.submit(
      [all, failure, label, sharding = context.sharding, gatherer = context.gatherer] {
        carry(all, *sharding, label, gatherer.get(), *failure);
      });
  for (FlatParameter* parameter : all) {
    parameter->gather_ = ticket;
    parameter->failure_ = failure;
    parameter->met_version_ = parameter->version_;
  }
}

void FlatParameter::carry(const std::vector<FlatParameter*>& all, const Sharding& sharding, const comm::Label& label,
                          UserCollective* gatherer, std::exception_ptr& failure) {
  std::vector<at::Tensor> travelling, resting;
  comm::Group& group = sharding.parameter_group;
  comm::Group* rest_group = nullptr;
  bool shared = false;
  const bool users = gatherer != nullptr && group.size() > 1;
  for (FlatParameter* parameter : all) {
    if (ExtendedGather* extension = parameter->extended_.get()) {
      const std::vector<at::Tensor>& buffers = extension->write_inputs();
      if (users) {
        travelling.insert(travelling.end(), buffers.begin(), buffers.end());
      } else {
        comm::all_gather(extension->group(), buffers, label);  // whatever the wire: they chose what travels
      }
      continue;
    }
    parameter->write_piece();
    shared = shared || parameter->shared_;
    if (parameter->shared_) continue;
    (parameter->from_rest_ ? resting : travelling).push_back(parameter->whole_);
    if (parameter->from_rest_) rest_group = parameter->rest_group_;
  }
  if (shared) group.barrier(label);
  if (rest_group != nullptr) comm::all_gather(*rest_group, resting, label);  // was rounded when it first travelled
  if (users && !travelling.empty()) {
    run_users(*gatherer, travelling, group, failure);
  } else {
    comm::all_gather(group, travelling, label, sharding.options.parameter_wire);
  }
}

// The own piece in its place; that also casts it when the master takes the piece's place.
void FlatParameter::write_piece() {
  if (from_rest_) {
    whole_.narrow(0, rest_group_->rank() * rest_.numel(), rest_.numel()).copy_(rest_);
  } else if (!piece_.defined()) {
    queue_copy(own_, master_);
  } else if (!shared_) {
    queue_copy(own_, piece_);
  }
}

void FlatParameter::finish_gather() {
  if (resident_) {
    context_.workspace->exposed_gather.wait(refresh_);
    refresh_ = {};
    if (!storage_.shows()) storage_.show(piece_);
    return;
  }
  if (!held_) return;  // freed since
  context_.workspace->exposed_gather.wait(gather_);
  if (failure_ != nullptr && *failure_ != nullptr) std::rethrow_exception(*failure_);
  if (from_rest_) rest_ = at::Tensor();
  from_rest_ = false;
  if (extended()) {
    if (!arrived_) extended_->finish();
  } else if (!storage_.shows()) {
    storage_.show(whole_);
  }
  arrived_ = true;
}

void FlatParameter::free(bool keep) {
  if (!held_) return;
  gather_.wait();
  gather_ = {};
  failure_ = nullptr;
  storage_.hide();
  if (extended()) extended_->free();
  if (buffer_ >= 0) context_.pool().release(buffer_, keep);
  buffer_ = -1;
  held_ = false;
}

bool FlatParameter::begin_publish() {
  ++version_;
  return piece_.defined() && !same_memory(piece_, master_) && !extended();
}

void FlatParameter::refresh(const std::vector<FlatParameter*>& all, const UnitContext& context,
                            const comm::Label& label) {
  if (all.empty()) return;
  const auto ticket = context.sharding->gather_lane.submit([all, label, sharding = context.sharding] {
    std::vector<at::Tensor> pieces;
    for (FlatParameter* parameter : all) pieces.push_back(parameter->write_chunk());
    const offload::Use use(pieces, offload::Access::update);
    comm::all_gather(sharding->refresh_group, pieces, label, sharding->options.parameter_wire);
  });
  for (FlatParameter* parameter : all) parameter->refreshes_with(ticket);
}

void FlatParameter::refreshes_with(const comm::Ticket& ticket) {
  refresh_ = ticket;
  if (resident_) storage_.hide(/*coming=*/true);
}

void FlatParameter::require_views(const std::vector<at::Tensor>& parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (storage_.has(parameters[i])) continue;
    throw InvalidArgument(
        "forward", cat("parameter ", flat_.slots()[i].names.front(), " of unit \"", flat_.unit(),
                       "\" was given other data since the model was sharded (torch::load, set_data), which would be "
                       "trained by nobody. Load before shard_model, or write in Sharded::visit_parameters or "
                       "checkpoint::import_weights"));
  }
}

// Into the piece, which refresh_group gathers.
const at::Tensor& FlatParameter::write_chunk() {
  const auto chunk = flat_.chunk_range();
  const int64_t begin = chunk.begin - flat_.parameter_range().begin;
  // Whoever writes the master while it is still read publishes again, and that copy comes after this one.
  queue_copy(narrow(piece_, {begin, begin + chunk.size()}), master_);
  return piece_;
}

at::Tensor FlatParameter::whole_values(const at::Tensor& local) {
  at::Tensor whole = at::empty({flat_.total()}, local.options().device(sharding_->device));
  const auto task = [&] {
    const comm::Label label{flat_.unit(), context_.statistics().steps};
    offload::copy(narrow(whole, local_range()), local);
    if (!flat_.master_is_piece()) sharding_->refresh_group.all_gather(narrow(whole, flat_.parameter_range()), label);
    sharding_->parameter_group.all_gather(whole, label);
  };
  sharding_->gather_lane.submit(task).wait();
  return whole;
}

void FlatParameter::set_values(const at::Tensor& whole) {
  offload::copy(local(), narrow(whole, local_range()));
}

}  // namespace tesserae::shard
