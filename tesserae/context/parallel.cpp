#include "tesserae/context/parallel.h"

#include <string>
#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/comm/same_given.h"

namespace tesserae::context {
namespace {

constexpr std::pair<Method, std::string_view> names[] = {{Method::automatic, "auto"},
                                                         {Method::shared, "shared"},
                                                         {Method::p2p, "p2p"},
                                                         {Method::all_gather, "all_gather"},
                                                         {Method::all_to_all, "all_to_all"}};

}  // namespace

std::string_view to_string(Method method) {
  for (const auto& [known, name] : names) {
    if (known == method) return name;
  }
  return "?";
}

Method method_from_name(std::string_view name) {
  std::string all;
  for (const auto& [method, known] : names) {
    if (known == name) return method;
    all += cat(all.empty() ? "" : ", ", known);
  }
  throw InvalidArgument("context_parallel_method", cat("\"", name, "\" is none of ", all));
}

bool exchanges_heads(int64_t heads, int64_t kv_heads, int64_t ranks) {
  return heads % ranks == 0 && kv_heads % ranks == 0 && 4 * (heads + kv_heads) < 6 * kv_heads * ranks;
}

Parallel::Parallel()
    : Parallel(std::make_shared<comm::MeshFabric>(comm::Fabric::null(mesh::World::single_host(0, 1)))) {}

Parallel::Parallel(std::shared_ptr<comm::MeshFabric> mesh, Method method) : mesh_(std::move(mesh)), method_(method) {
  reconnect();
}

void Parallel::reconnect() const {
  group_ = &mesh_->group(mesh::Axis::context, comm::Traffic::control);
  lane_ = &mesh_->job()->lane(comm::Traffic::control);
  pieces_ = {};
  uses_ = 0;
  compared_ = false;
  const bool may_share = method_ == Method::automatic || method_ == Method::shared;
  shares_ = size() > 1 && may_share && mesh_->job()->device().is_cpu() && group_->share(1).defined();
  if (size() > 1 && method_ == Method::shared && !shares_) {
    throw InvalidArgument("context_parallel_method", cat("\"shared\" needs ranks that share a host's memory, but the ",
                                                         size(), " context ranks do not; take \"auto\" or \"p2p\""));
  }
}

Method Parallel::method_for(int64_t heads, int64_t kv_heads) const {
  const int64_t ranks = size();
  const bool divides = heads % ranks == 0 && kv_heads % ranks == 0;
  if (method_ == Method::all_to_all && !divides) {
    throw InvalidArgument("context_parallel_method",
                          cat("\"all_to_all\" shares out heads, but ", ranks, " ranks do not divide ", heads,
                              " heads and ", kv_heads, " of keys and values; take \"p2p\" or \"all_gather\""));
  }
  if (method_ != Method::automatic) return method_;
  if (shares_) return Method::shared;
  return exchanges_heads(heads, kv_heads, ranks) ? Method::all_to_all : Method::p2p;
}

void Parallel::require_same(const at::Tensor& tokens) const {
  const auto other = comm::first_given_other(*group_, mesh_->job()->device(), {tokens});
  if (!other) return;
  throw InvalidArgument(
      "context::Parallel",
      cat("context ranks ", group_->members()[0], " and ", group_->members()[static_cast<size_t>(other->rank)],
          " were given different tokens (", other->elements_of_first, " and ", other->elements,
          " of them); they share out the same sequences, so all ", size(),
          " read the same batches: deal them out by the data-parallel rank"));
}

void Parallel::require_same_first(const at::Tensor& tokens) const {
  if (size() > 1 && !std::exchange(compared_, true)) require_same(tokens);
}

at::Tensor Parallel::shared_memory(int64_t bytes) const {
  at::Tensor& piece = pieces_[uses_++ % pieces_.size()];
  if (!piece.defined() || piece.numel() < bytes) {
    piece = at::Tensor();
    piece = group_->share(bytes);
    if (!piece.defined()) {
      throw OutOfMemory("context::Parallel", cat("the host has no ", bytes, " bytes of shared memory for keys and ",
                                                 "values; take context_parallel_method \"p2p\""));
    }
  }
  return piece;
}

}  // namespace tesserae::context
