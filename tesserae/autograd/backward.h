#pragma once

#include <functional>

namespace tesserae::autograd {

/// True on a thread that is running a backward: a forward is a recomputation.
bool in_backward();

/// Calls `task` once when the current backward (the one that this thread runs) has finished all nodes.
void at_end_of_backward(std::function<void()> task);

}  // namespace tesserae::autograd
