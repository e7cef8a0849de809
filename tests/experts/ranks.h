#pragma once

#include <functional>
#include <memory>

#include "tests/tensor/ranks.h"

namespace tesserae::testing {

/// Runs `body` as the ranks of a job with these axes.
inline void run_mesh(int ranks, const mesh::AxisDegrees& axes,
                     const std::function<void(const std::shared_ptr<tensor::Parallel>&)>& body) {
  comm::run_local(
      ranks,
      [&](comm::Fabric& fabric) {
        const auto job = borrowed(fabric);
        body(std::make_shared<tensor::Parallel>(
            std::make_shared<comm::MeshFabric>(job, mesh::Mesh(fabric.size(), axes))));
      },
      std::chrono::minutes(1));
}

}  // namespace tesserae::testing
