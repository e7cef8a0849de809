#include "tesserae/os/random_name.h"

#include <cstdint>
#include <random>

#include "tesserae/base/checksum.h"

namespace tesserae::os {

std::string random_name() {
  std::random_device random;
  return to_hex(uint64_t{random()} << 32 | random());
}

}  // namespace tesserae::os
