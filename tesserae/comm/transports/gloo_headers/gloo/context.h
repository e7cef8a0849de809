#pragma once

// The declarations of Gloo that torch's ProcessGroupGloo.hpp needs, for wheels that ship libtorch without Gloo's
// headers. Our CMake uses this folder only when <gloo/context.h> is not found next to torch.
//
// [Note: Gloo's binary interface] No object of these types is made, copied or destroyed by our code, and none of their
// virtual functions is called by it: libtorch does all of that, and we hold shared pointers whose deleters it made. So
// what is declared here has to agree with Gloo only in the names and signatures of what ProcessGroupGloo's inline
// functions mention, and of closeConnections(), which is no virtual function. Keep it so: do not call others through
// these types.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};

}  // namespace gloo
