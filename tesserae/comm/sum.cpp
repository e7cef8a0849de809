#include "tesserae/comm/sum.h"

#include <ATen/ops/add.h>

namespace tesserae::comm {

void add_into(const at::Tensor& sum, const at::Tensor& part) {
  at::add_out(const_cast<at::Tensor&>(sum), sum, part);
}

}  // namespace tesserae::comm
