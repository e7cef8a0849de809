#pragma once

#include "tesserae/os/descriptor.h"

namespace tesserae::os {

/// Lets one thread end another's wait_ready() or wait_readable().
class WakeUp {
 public:
  WakeUp();  ///< throws IoError

  void wake() noexcept;   ///< from any thread: descriptor() is readable from now on
  void clear() noexcept;  ///< until the next wake()
  int descriptor() const { return event_.get(); }

 private:
  Descriptor event_;
};

}  // namespace tesserae::os
