#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch {
class Library;
}

namespace tesserae::sim {

/// Registers all operators of `sim`. Once a program.
void install_operators();

/// Runs any operator on the device that its arguments lie on (operators.cpp opens with how).
void run_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack);

/// Those that are not left to run_operator: memory, views, copies, reads (natives.cpp).
void add_natives(torch::Library& aten);

}  // namespace tesserae::sim
