#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace tesserae::sim {

/// What must be known of an operator to run it on a device, from its schema and a few tables (kind.cpp).
struct Kind {
  std::string name;                 ///< "aten::add.out"; lives for ever
  std::vector<int> written;         ///< by return: the argument that it is, or -1
  std::vector<bool> writes;         ///< by argument
  std::vector<bool> is_out;         ///< by argument: it is written, and may be made larger
  int generator = -1;               ///< the argument
  bool views = false;               ///< a return shows memory of an argument
  bool returns_tensors = true;      ///< or lists of them, and nothing else
  bool only_written = true;         ///< all returns are arguments
  bool has_meta = false;            ///< a meta kernel says what the returns are
  bool from_zeros = false;          ///< it has none, and its returns are as large whatever the values are
  bool from_values = false;         ///< how large its `out` becomes depends on values
  bool takes_host_tensors = false;  ///< besides numbers
};

/// Found out once. Any thread.
const Kind& kind_of(const c10::OperatorHandle& handle);

/// Operators that run as they are, though torch would make others of them: these have no meta kernels either.
const std::vector<const char*>& without_decomposition();

}  // namespace tesserae::sim
