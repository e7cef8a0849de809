// How an operator runs that has no kernel of its own here (run_operator):
//
//  1. The arguments say on which device: all tensors on the same, those of the CPU only where CUDA takes them, too.
//  2. What are its outputs? An argument that it writes is one itself. For the others the meta kernel says sizes,
//     strides and dtype; operators without one that do not look at values to know them run on zeros of the host
//     instead (kind.cpp, and those that are given an empty `out`, which they would make larger). What is wrong with the
//     arguments is thrown here, on the host.
//  3. Outputs are allocated, and the CPU's kernel is enqueued on the current stream, with tensors that show the same
//     memory where tasks may use it. It holds addresses, no memory, like a kernel's arguments.
//  4. An operator whose outputs nobody knows (nonzero), or that returns a number (equal), waits for its stream, runs at
//     once, and is counted: that is what CUDA does with most of them.
//
// Structured operators come here by their out variants only: torch itself calls the meta function, allocates, and goes
// on to what is written. Views never come: they have kernels for all devices, but for those in natives.cpp.

#include "tests/sim/operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <utility>
#include <vector>

#include "tests/sim/device.h"
#include "tests/sim/generator.h"
#include "tests/sim/operation.h"
#include "tests/sim/translation.h"

namespace tesserae::sim {
namespace {

using torch::jit::Stack;

at::Tensor keep_wrapped(at::Tensor twin, const at::Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  return twin;
}

at::Tensor on_meta(const at::Tensor& original) {
  // A number stays one of the host: some meta kernels are Python's, which are given it as such.
  if (original.is_cpu() && original.unsafeGetTensorImpl()->is_wrapped_number()) return original;
  const auto options = at::TensorOptions().dtype(original.scalar_type()).device(c10::kMeta);
  return keep_wrapped(at::empty_strided(original.sizes(), original.strides(), options), original);
}

at::Tensor as_zeros(const at::Tensor& original) {
  return keep_wrapped(at::zeros(original.sizes(), at::TensorOptions().dtype(original.scalar_type())), original);
}

// Runs a kernel, that of what `arguments` lie on, and leaves its results in them.
void call(const c10::OperatorHandle& handle, Stack& arguments) {
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  handle.callBoxed(arguments);
}

class Call {
 public:
  Call(const c10::OperatorHandle& handle, const Kind& kind, Stack arguments)
      : handle_(handle),
        kind_(kind),
        arguments_(std::move(arguments)),
        index_(where()),
        guard_(device(index_)),
        device_(Device::at(index_)),
        stream_(device_.current_stream()) {}

  Stack run() {
    TORCH_CHECK_NOT_IMPLEMENTED(!kind_.views, "[", kind_.name, "] a view that sim has no kernel for: natives.cpp");
    std::optional<Stack> shapes;
    if (kind_.returns_tensors) shapes = find_shapes();
    if (!shapes) return run_at_once();
    ++device_.tally().launches;
    Stack results, targets;
    for (size_t i = 0; i < kind_.written.size(); ++i) {
      if (kind_.written[i] >= 0) {
        results.push_back(written(i, shapes->empty() ? c10::IValue() : (*shapes)[i]));
        targets.emplace_back(sizes_of(results.back()));
      } else {
        results.push_back(allocated((*shapes)[i]));
        targets.push_back(Translation(kind_, c10::kCPU, for_tasks).value(results.back()));
      }
    }
    stream_.enqueue(kind_.name.c_str(), [handle = handle_, arguments = for_kernel(), targets = std::move(targets)] {
      Stack stack = arguments;
      call(handle, stack);
      for (size_t i = 0; i < targets.size(); ++i) store(stack[i], targets[i]);
    });
    return results;
  }

 private:
  c10::DeviceIndex where() const {
    std::optional<c10::Device> found;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (tensor.is_cpu() && !kind_.writes[i] && (tensor.dim() == 0 || kind_.takes_host_tensors)) return;
        TORCH_CHECK(!found || *found == tensor.device(), "[", kind_.name, "] tensors on ", *found, " and ",
                    tensor.device(), ": all must be on the same device");
        found = tensor.device();
      });
    }
    for (const c10::IValue& argument : arguments_) {
      if (!found && argument.isDevice()) found = argument.toDevice();
    }
    TORCH_CHECK(!found || found->is_privateuseone(), "[", kind_.name, "] tensors on ", *found,
                " and on sim: all must be on the same device");
    return found && found->has_index() ? found->index() : current_device();
  }

  // Whether it is given an empty `out`, and nobody but the kernel itself knows how large that should be.
  bool grows_its_output() const {
    if (kind_.has_meta || kind_.from_values) return false;
    bool empty = false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!kind_.is_out[i]) continue;
      for_each_tensor(arguments_[i], [&](const at::Tensor& out) { empty = empty || out.numel() == 0; });
    }
    return empty;
  }

  // By return, on any device; empty: all are arguments, of the size that they have. Nothing: nobody knows.
  std::optional<Stack> find_shapes() const {
    const bool from_zeros = kind_.from_zeros || grows_its_output();
    if (!kind_.has_meta && !from_zeros) return kind_.only_written ? std::optional<Stack>(Stack()) : std::nullopt;
    Translation translation(kind_, from_zeros ? c10::kCPU : c10::kMeta, from_zeros ? as_zeros : on_meta);
    Stack stack = translation.arguments(arguments_);
    try {
      call(handle_, stack);
    } catch (const c10::NotImplementedError&) {
      if (kind_.only_written) return Stack();
      return std::nullopt;
    }
    return stack;
  }

  c10::IValue written(size_t result, const c10::IValue& shape) const {
    const c10::IValue& argument = arguments_[static_cast<size_t>(kind_.written[result])];
    if (argument.isTensor() && shape.isTensor() && shape.toTensor().sizes() != argument.toTensor().sizes()) {
      argument.toTensor().resize_(shape.toTensor().sizes());
    }
    return argument;
  }

  c10::IValue allocated(const c10::IValue& shape) const {
    return Translation(kind_, device(index_),
                       [this](const at::Tensor& like) {
                         const auto options = at::TensorOptions().dtype(like.scalar_type()).device(device(index_));
                         return at::empty_strided(like.sizes(), like.strides(), options);
                       })
        .value(shape);
  }

  // Tensors of the host are read now: a number on its way into a kernel's arguments, or indices, for which CUDA waits.
  Stack for_kernel() const {
    const auto show = [this](const at::Tensor& tensor) {
      if (!tensor.is_cpu()) return for_tasks(tensor);
      if (tensor.dim() > 0) ++device_.tally().synchronizations;
      return keep_wrapped(tensor.clone(), tensor);
    };
    return Translation(kind_, c10::kCPU, show, generator()).arguments(arguments_);
  }

  c10::IValue generator() const {
    if (kind_.generator < 0) return {};
    const c10::IValue& given = arguments_[static_cast<size_t>(kind_.generator)];
    const at::Generator& source = given.isGenerator() ? given.toGenerator() : default_generator(index_);
    TORCH_CHECK(source.device() == device(index_), "[", kind_.name, "] a generator of ", source.device(),
                " for tensors on ", device(index_));
    return at::detail::createCPUGenerator(source.get<Generator>()->draw());
  }

  Stack run_at_once() const {
    ++device_.tally().launches;
    ++device_.tally().unknown_shapes;
    device_.synchronize(stream_);
    Stack stack = for_kernel();
    call(handle_, stack);
    Stack results;
    for (size_t i = 0; i < kind_.written.size(); ++i) {
      if (kind_.written[i] >= 0) {
        results.push_back(arguments_[static_cast<size_t>(kind_.written[i])]);
        continue;
      }
      results.push_back(allocated(stack[i]));
      const c10::IValue target = Translation(kind_, c10::kCPU, for_tasks).value(results.back());
      // Enqueued: before it the memory is filled with NaN.
      stream_.enqueue(kind_.name.c_str(), [from = stack[i], target] { store(from, target); });
    }
    return results;
  }

  static c10::IValue sizes_of(const c10::IValue& written) {
    return written.isTensor() ? c10::IValue(written.toTensor().sizes()) : c10::IValue();
  }

  // `to`: tensors for tasks; of a tensor that was written, its sizes.
  static void store(const c10::IValue& from, const c10::IValue& to) {
    if (to.isIntList()) {
      TORCH_CHECK(from.toTensor().sizes() == at::IntArrayRef(to.toIntVector()),
                  "the kernel made its output larger, from ", to, " to ", from.toTensor().sizes(),
                  ": operators.cpp must know that before");
    } else if (to.isTensor() && to.toTensor().defined()) {
      to.toTensor().copy_(from.toTensor());
    } else if (to.isTensorList()) {
      const auto sources = from.toTensorVector(), targets = to.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) store(sources[i], targets[i]);
    }
  }

  const c10::OperatorHandle& handle_;
  const Kind& kind_;
  const Stack arguments_;
  const c10::DeviceIndex index_;
  const c10::DeviceGuard guard_;
  Device& device_;
  Stream& stream_;
};

}  // namespace

void run_operator(const c10::OperatorHandle& handle, Stack* stack) {
  const Kind& kind = kind_of(handle);
  const Operation operation(kind.name.c_str());
  const size_t count = handle.schema().arguments().size();
  Stack arguments(std::make_move_iterator(stack->end() - static_cast<std::ptrdiff_t>(count)),
                  std::make_move_iterator(stack->end()));
  stack->resize(stack->size() - count);
  for (c10::IValue& result : Call(handle, kind, std::move(arguments)).run()) stack->push_back(std::move(result));
}

void install_operators() {
  // Registered for as long as they live: for ever.
  auto& aten = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  add_natives(aten);
  for (const char* const name : without_decomposition()) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
  // torch would resolve a lazy conjugate before it copies it, by a clone, which is such a copy again, without an end.
  for (const auto lazy : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto& copies = *new torch::Library(torch::Library::IMPL, "aten", lazy, __FILE__, __LINE__);
    copies.impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  auto& others = *new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

}  // namespace tesserae::sim
