#include "tesserae/shard/value_hash.h"

#include <algorithm>
#include <vector>

#include "tesserae/base/checksum.h"
#include "tesserae/offload/paged_tensor.h"

namespace tesserae::shard {

uint64_t hash_of(const at::Tensor& flat, int64_t begin, int64_t end) {
  constexpr int64_t block = int64_t{1} << 20;  // elements
  std::vector<uint64_t> blocks;
  for (; begin < end; begin += block) {
    const at::Tensor part = flat.slice(0, begin, std::min(begin + block, end));
    const offload::Use use(part, offload::Access::read);
    const at::Tensor bytes = part.cpu();
    blocks.push_back(checksum({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}));
  }
  return checksum_of_blocks(blocks);
}

}  // namespace tesserae::shard
