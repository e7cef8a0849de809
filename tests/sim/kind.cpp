#include "tests/sim/kind.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace tesserae::sim {
namespace {

// Without a meta kernel in C++, and of outputs that depend on no value. CUDA enqueues them.
const std::unordered_set<std::string> shapes_from_zeros{"aten::native_layer_norm",
                                                        "aten::native_layer_norm_backward",
                                                        "aten::embedding_dense_backward",
                                                        "aten::index_select",
                                                        "aten::native_batch_norm",
                                                        "aten::native_batch_norm_backward",
                                                        "aten::native_group_norm",
                                                        "aten::native_group_norm_backward",
                                                        "aten::log_sigmoid_forward",
                                                        "aten::dot",
                                                        "aten::roll",
                                                        "aten::flip",
                                                        "aten::min",
                                                        "aten::max",
                                                        "aten::var.correction",
                                                        "aten::std.correction",
                                                        "aten::count_nonzero.dim_IntList",
                                                        "aten::where.self"};

// Of outputs that depend on values, also if these are given as `out`.
const std::unordered_set<std::string> shapes_from_values{"aten::nonzero.out", "aten::masked_select.out"};

// Indices may lie on the host: CUDA copies them.
const std::unordered_set<std::string> with_host_indices{"aten::index.Tensor", "aten::index.Tensor_out",
                                                        "aten::_index_put_impl_", "aten::index_put_"};

bool is_tensor_type(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         (type.kind() == c10::TypeKind::ListType &&
          type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
}

Kind find_out(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  Kind kind;
  kind.name = c10::toString(handle.operator_name());
  for (const c10::Argument& result : schema.returns()) {
    kind.returns_tensors = kind.returns_tensors && is_tensor_type(*result.type());
    int written = -1;
    for (size_t i = 0; result.alias_info() && i < schema.arguments().size(); ++i) {
      const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
      if (!alias || alias->beforeSets() != result.alias_info()->beforeSets()) continue;
      if (alias->isWrite()) written = static_cast<int>(i);
      kind.views = kind.views || !alias->isWrite();
    }
    kind.written.push_back(written);
    kind.only_written = kind.only_written && written >= 0;
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    kind.writes.push_back(alias && alias->isWrite());
    kind.is_out.push_back(schema.arguments()[i].is_out());
    if (schema.arguments()[i].type()->str().starts_with("Generator")) kind.generator = static_cast<int>(i);
  }
  kind.has_meta = handle.hasKernelForDispatchKey(c10::DispatchKey::Meta);
  kind.from_zeros = shapes_from_zeros.contains(kind.name);
  kind.from_values = shapes_from_values.contains(kind.name);
  kind.takes_host_tensors = with_host_indices.contains(kind.name);
  return kind;
}

}  // namespace

const Kind& kind_of(const c10::OperatorHandle& handle) {
  static auto& mutex = *new std::shared_mutex;
  static auto& kinds = *new std::unordered_map<c10::OperatorName, Kind>;
  {
    const std::shared_lock lock(mutex);
    if (const auto found = kinds.find(handle.operator_name()); found != kinds.end()) return found->second;
  }
  Kind kind = find_out(handle);
  const std::unique_lock lock(mutex);
  return kinds.emplace(handle.operator_name(), std::move(kind)).first->second;
}

const std::vector<const char*>& without_decomposition() {
  static const std::vector<const char*> names{"native_layer_norm", "native_batch_norm", "native_group_norm"};
  return names;
}

}  // namespace tesserae::sim
