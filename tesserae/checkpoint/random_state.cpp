#include "tesserae/checkpoint/random_state.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "tesserae/base/error.h"
#include "tesserae/checkpoint/reader.h"

namespace tesserae::checkpoint {
namespace {

std::string name_of(int rank, c10::Device device) {
  return cat("random/", rank, "/", c10::DeviceTypeName(device.type(), /*lower_case=*/true));
}

std::vector<c10::Device> devices_of(c10::Device device) {
  std::vector<c10::Device> devices{c10::kCPU};
  if (device.type() != c10::kCPU) devices.push_back(device);
  return devices;
}

}  // namespace

std::vector<Piece> random_pieces(int rank, c10::Device device) {
  std::vector<Piece> pieces;
  for (const c10::Device each : devices_of(device)) {
    const at::Generator& generator = at::globalContext().defaultGenerator(each);
    Piece piece = replicated(name_of(rank, each), generator.get_state(), 0);  // a copy, of this rank only
    piece.changes_in_forward = true;
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

bool load_random(const Checkpoint& checkpoint, int rank, c10::Device device) {
  std::vector<std::pair<c10::Device, at::Tensor>> states;
  for (const c10::Device each : devices_of(device)) {
    const std::string name = name_of(rank, each);
    const StoredTensor* stored = checkpoint.manifest().find(name);
    if (stored == nullptr || stored->dtype != Dtype::U8) return false;
    at::Tensor state = at::empty(stored->shape, at::kByte);
    checkpoint.read({{name, {0, stored->elements()}, static_cast<char*>(state.mutable_data_ptr())}});
    states.emplace_back(each, std::move(state));
  }
  for (auto& [each, state] : states) {
    at::Generator generator = at::globalContext().defaultGenerator(each);
    generator.set_state(state);
  }
  return true;
}

}  // namespace tesserae::checkpoint
