#include "tesserae/config/state_ranks.h"

#include <string>

#include "tesserae/config/json.h"

namespace tesserae::config {
namespace {

bool passes(const std::function<void(int)>& check, int state_ranks) {
  try {
    check(state_ranks);
    return true;
  } catch (const InvalidArgument&) {
    return false;
  }
}

}  // namespace

void check_state_ranks(const mesh::Mesh& mesh, int64_t divisible, const std::function<void(int)>& check) {
  const int tensor = mesh.degree(mesh::axes::tensor), state = mesh.degree(mesh::axes::state);
  try {
    check(state);
  } catch (const InvalidArgument& error) {
    if (tensor == 1) throw;
    std::string fits;
    for (int degree = 1; degree <= mesh.ranks(); ++degree) {
      if (mesh.ranks() % degree != 0 || divisible % degree != 0 || !passes(check, mesh.ranks() / degree)) continue;
      fits += cat(fits.empty() ? "; this fits tensor_parallel_degree " : ", ", degree);
    }
    throw ConfigError("", cat(without_function(error), "; N = ", state, " = ", mesh.ranks(),
                              " ranks / tensor_parallel_degree ", tensor, fits));
  }
}

}  // namespace tesserae::config
