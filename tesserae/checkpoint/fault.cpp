#include "tesserae/checkpoint/fault.h"

#include <utility>

namespace tesserae::checkpoint {

std::string Fault::text() const {
  std::string place = file;
  if (!tensor.empty()) place += cat(", tensor \"", tensor, "\"");
  if (offset.has_value()) place += cat(", byte ", *offset);
  return cat(place, ": ", what);
}

Damaged::Damaged(std::string_view function, Fault fault)
    : Corruption(function, cat(fault.text(), "; use another checkpoint or copy of it")), fault_(std::move(fault)) {}

}  // namespace tesserae::checkpoint
